"""From what a request asks for and the model's chat template to the form of the answers."""

from __future__ import annotations

import json
from dataclasses import replace

from spool.services.gateway.answers.call_grammar import calls_grammar, content_grammar, free_grammar, held_fault
from spool.services.gateway.answers.formats import FORMATS, ToolFormat, detect_format
from spool.services.gateway.answers.reader import AnswerForm
from spool.services.gateway.answers.reasoning import THINK, THINK_END, Reasoning
from spool.services.gateway.answers.tools import ToolUse
from spool.services.gateway.errors import invalid
from spool.services.gateway.options import GenerationOptions
from spool.services.gateway.structure import Structure
from spool.services.text.tokenizer import ModelTokenizer


def answer_form(
    options: GenerationOptions, reasoning: Reasoning, tokenizer: ModelTokenizer, tool_format: ToolFormat | None
) -> AnswerForm:
    """`reasoning`: as the prompt leaves it to a model that reasons. `tool_format`: the server's setting.

    Raises RequestError where the model cannot call functions.
    """
    if not options.as_message:
        return AnswerForm()
    use = _offered(options)
    template = tokenizer.chat_template(with_tools=use is not None)
    if THINK not in template.source or THINK_END not in template.source:
        reasoning = Reasoning.NONE
    hidden = tokenizer.special_texts if options.skip_special_tokens else frozenset[str]()
    if use is None:
        return AnswerForm(reasoning=reasoning, hidden=hidden)
    found = tool_format or detect_format(template.source)
    if not isinstance(found, ToolFormat):
        told = f"is that of {found}, whose calls are not supported" if found else "does not tell how calls are written"
        message = f"tools is given, but the model's chat template {told}"
        raise invalid(f"{message}; the server's gateway.tool_format can say it", "tools")
    form, either = FORMATS[found], options.structure is not None and not use.constrained
    several = use.parallel and template.takes_several_calls
    return AnswerForm(
        replace(form, bare=form.bare and not either), use.callable_tools, several, reasoning, hidden, either
    )


def answer_structure(options: GenerationOptions, form: AnswerForm, tokenizer: ModelTokenizer) -> Structure | None:
    """What an answer must look like: what the request asks for, calls, or calls that fit; None for any other.

    Raises RequestError for a function to whose schema calls cannot be held.
    """
    use, asked, token_id = _offered(options), options.structure, tokenizer.token_id
    parts = []
    if use is not None and form.calls is not None:
        for tool in use.callable_tools:
            if tool.strict or use.constrained:
                field = f"tools.{use.tools.index(tool)}.function.parameters"
                if (fault := held_fault(tool, form.calls)) is not None:
                    raise invalid(f"{field} cannot be used: {fault}", field)
                parts.append(Structure("json_schema", json.dumps(tool.schema()), field))
        use = replace(use, parallel=form.several)
        if use.constrained:
            return Structure("lark", calls_grammar(use, form.calls, form.reasoning, token_id), "tools", tuple(parts))
        if asked is not None:
            frame = calls_grammar(use, form.calls, form.reasoning, token_id, or_content=True)
            return replace(asked, frame=frame, parts=(*parts, asked))
        if use.strict and form.calls.marked:
            return Structure("lark", free_grammar(use, form.calls, form.reasoning, token_id), "tools", tuple(parts))
    if asked is not None and form.reasoning is not Reasoning.NONE:
        return replace(asked, frame=content_grammar(form.reasoning, token_id))
    return asked


def _offered(options: GenerationOptions) -> ToolUse | None:
    return options.tools if options.tools is not None and options.tools.offered else None
