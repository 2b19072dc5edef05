"""The forms in which models write calls of functions."""

# ruff: noqa: RUF001  (the bars in the markers of some models)

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, replace
from enum import Enum

MARKER = re.compile(r"<[^<>]+>|\[TOOL_CALLS\]")
"""What may be one token."""


class ToolFormat(Enum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    GLM45 = "glm45"
    GLM47 = "glm47"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"


@dataclass(frozen=True, slots=True)
class CallTags:
    """What a call is made of that is no JSON object: `name`, the name, `arguments`, the arguments, `end`.

    The arguments are a JSON object. With `key`, each of them stands for itself instead: `key`, its name, `value`, its
    value, `value_end`. A value that must be a string is text as it stands, any other is JSON. Readers ignore white
    space around tags, and of a value one line break next to a tag that has one there.
    """

    name: str
    arguments: str
    end: str
    key: str = ""
    value: str = ""
    value_end: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls stand after the marker `begin` and, unless it is empty, before `end`. Without `tags`, they are JSON objects
    with `name` and arguments.

    With `bare`, an answer that begins with such an object is a call without the marker too. The other texts say how a
    constrained answer is written: `before_all`, then the calls, each between `before_each` and `after_each` and
    separated by `between`, then `after_all`.
    """

    begin: str
    end: str = ""
    tags: CallTags | None = None
    bare: bool = False
    arguments_key: str = "arguments"
    before_all: str = ""
    before_each: str = ""
    after_each: str = ""
    after_all: str = ""
    between: str = ""
    call_id_prefix: str = "call_"
    call_id_letters: int = 24

    @property
    def marked(self) -> bool:
        """Whether every call has the marker before it."""
        return not self.bare

    @property
    def markers(self) -> frozenset[str]:
        return frozenset(
            {self.begin, self.end, *MARKER.findall(" ".join(astuple(self.tags or CallTags("", "", ""))))} - {""}
        )


_TOOL_CALL = CallFormat(
    "<tool_call>", "</tool_call>", before_each="<tool_call>\n", after_each="\n</tool_call>", between="\n"
)
_QWEN3_CODER = CallTags("<function=", ">\n", "</function>", "<parameter=", ">\n", "\n</parameter>\n")
_GLM45 = CallTags("", "\n", "</tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
_GLM47 = CallTags("", "", "</tool_call>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>")
_DEEPSEEK_V3 = CallTags("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")
_DEEPSEEK_V31 = CallTags("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = CallFormat(_DEEPSEEK_BEGIN, _DEEPSEEK_END, before_all=_DEEPSEEK_BEGIN, after_all=_DEEPSEEK_END)

FORMATS = {
    # Qwen2.5 and Qwen3 too.
    ToolFormat.HERMES: _TOOL_CALL,
    ToolFormat.LLAMA3: CallFormat(begin="<|python_tag|>", bare=True, arguments_key="parameters", between="; "),
    # Its templates want ids of nine letters and digits.
    ToolFormat.MISTRAL: CallFormat(
        begin="[TOOL_CALLS]",
        before_all="[TOOL_CALLS] [",
        between=", ",
        after_all="]",
        call_id_prefix="",
        call_id_letters=9,
    ),
    ToolFormat.QWEN3_CODER: replace(_TOOL_CALL, tags=_QWEN3_CODER),
    ToolFormat.GLM45: replace(_TOOL_CALL, tags=_GLM45, before_each="<tool_call>", after_each=""),
    ToolFormat.GLM47: replace(_TOOL_CALL, tags=_GLM47, before_each="<tool_call>", after_each="", between=""),
    ToolFormat.DEEPSEEK_V3: replace(_DEEPSEEK, tags=_DEEPSEEK_V3, between="\n"),
    ToolFormat.DEEPSEEK_V31: replace(_DEEPSEEK, tags=_DEEPSEEK_V31),
}

# Texts that only the chat templates of one family have, the telling ones first.
_TELLING: dict[str, ToolFormat | str] = {
    "<tool_sep>": "Hunyuan",
    "｜DSML｜": "DeepSeek V3.2",
    "<seed:tool_call>": "Seed-OSS",
    "<minimax:tool_call>": "MiniMax M2",
    "<|tool_calls_section_begin|>": "Kimi K2",
    "<|channel|>": "gpt-oss",
    "[ARGS]": "Mistral from tokenizer version 11 on",
    "[CALL_ID]": "Mistral from tokenizer version 11 on",
    "</arg_key><arg_value>": ToolFormat.GLM47,
    "<arg_key>": ToolFormat.GLM45,
    "<parameter=": ToolFormat.QWEN3_CODER,
    "<function=": "Functionary",
    "[TOOL_CALLS]": ToolFormat.MISTRAL,
    "<tool_call>": ToolFormat.HERMES,
    "<|python_tag|>": ToolFormat.LLAMA3,
    '"parameters": dictionary of argument name': ToolFormat.LLAMA3,
}


def detect_format(template: str) -> ToolFormat | str | None:
    """The format that the text of a chat template tells, or whose it is if it is another; None if it tells none."""
    if _DEEPSEEK_BEGIN in template:
        return ToolFormat.DEEPSEEK_V3 if "```json" in template else ToolFormat.DEEPSEEK_V31
    return next((found for text, found in _TELLING.items() if text in template), None)
