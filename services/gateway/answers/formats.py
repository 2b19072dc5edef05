"""The forms in which models write calls of functions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ToolFormat(Enum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls are JSON objects with `name` and arguments, after the marker `begin` and, unless it is empty, before `end`.

    With `bare`, an answer that begins with such an object is a call without the marker too. The other texts say how a
    constrained answer is written: `before_all`, then the calls, each between `before_each` and `after_each` and
    separated by `between`, then `after_all`. With `several` false, an answer has one call.
    """

    begin: str
    end: str = ""
    bare: bool = False
    arguments_key: str = "arguments"
    before_all: str = ""
    before_each: str = ""
    after_each: str = ""
    after_all: str = ""
    between: str = ""
    several: bool = True
    call_id_prefix: str = "call_"
    call_id_letters: int = 24

    @property
    def marked(self) -> bool:
        """Whether every call has the marker before it."""
        return not self.bare


FORMATS = {
    # Qwen2.5 and Qwen3 too.
    ToolFormat.HERMES: CallFormat(
        begin="<tool_call>",
        end="</tool_call>",
        before_each="<tool_call>\n",
        after_each="\n</tool_call>",
        between="\n",
    ),
    # Its templates take one call in a message.
    ToolFormat.LLAMA3: CallFormat(begin="<|python_tag|>", bare=True, arguments_key="parameters", several=False),
    # Its templates want ids of nine letters and digits.
    ToolFormat.MISTRAL: CallFormat(
        begin="[TOOL_CALLS]",
        before_all="[TOOL_CALLS] [",
        between=", ",
        after_all="]",
        call_id_prefix="",
        call_id_letters=9,
    ),
}

# Other families use the same markers around other forms: XML for each argument, or names outside of the JSON.
_OTHER_FORMS = ("<arg_key>", "<function=", "[ARGS]", "[CALL_ID]", "<tool_sep>")


def detect_format(template: str) -> ToolFormat | None:
    """The format that the text of a chat template tells; None where it tells none that is known."""
    if any(mark in template for mark in _OTHER_FORMS):
        return None
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return ToolFormat.LLAMA3
    return None
