"""From what a request asks for and the model's chat template to the form of the answers."""

from __future__ import annotations

import json

from services.gateway.answers.call_grammar import calls_grammar, free_grammar
from services.gateway.answers.formats import FORMATS, ToolFormat, detect_format
from services.gateway.answers.reader import AnswerForm
from services.gateway.answers.reasoning import THINK, THINK_END, Reasoning
from services.gateway.answers.tools import ToolUse
from services.gateway.errors import invalid
from services.gateway.options import GenerationOptions
from services.gateway.structure import Structure
from services.text.tokenizer import ModelTokenizer


def answer_form(
    options: GenerationOptions, opens_reasoning: bool, tokenizer: ModelTokenizer, tool_format: ToolFormat | None
) -> AnswerForm:
    """`opens_reasoning`: the prompt ends with the tag that opens reasoning. `tool_format`: the server's setting.

    Raises RequestError where the model cannot call functions.
    """
    if not options.as_message:
        return AnswerForm()
    use = options.tools if options.tools is not None and options.tools.offered else None
    template = tokenizer.chat_template(with_tools=use is not None)
    reasoning = Reasoning.NONE
    # A structure holds from the first token on, so it leaves no room for reasoning.
    if options.structure is None and THINK in template.source and THINK_END in template.source:
        reasoning = Reasoning.OPEN if opens_reasoning else Reasoning.POSSIBLE
    hidden = tokenizer.special_texts if options.skip_special_tokens else frozenset[str]()
    if use is None:
        return AnswerForm(reasoning=reasoning, hidden=hidden)
    found = tool_format or detect_format(template.source)
    if found is None:
        message = "tools is given, but the model's chat template does not tell how calls are written"
        raise invalid(f"{message}; the server's gateway.tool_format can say it", "tools")
    names = frozenset(tool.name for tool in use.callable_tools)
    return AnswerForm(FORMATS[found], names, use.parallel, reasoning, hidden)


def call_structure(use: ToolUse | None, form: AnswerForm, tokenizer: ModelTokenizer) -> Structure | None:
    """What an answer must look like that has to call functions, or whose calls have to fit; None for any other."""
    if use is None or form.calls is None or not (use.constrained or (use.strict and form.calls.marked)):
        return None
    write = calls_grammar if use.constrained else free_grammar
    parts = tuple(
        Structure("json_schema", json.dumps(tool.schema()), f"tools.{use.tools.index(tool)}.function.parameters")
        for tool in use.callable_tools
        if tool.strict or use.constrained
    )
    return Structure("lark", write(use, form.calls, form.reasoning, tokenizer.token_id), "tools", parts)
