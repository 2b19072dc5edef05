"""Messages of a chat, and the functions that the model may call in it, as OpenAI's requests have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from spool.services.gateway.answers.tools import Tool, ToolUse
from spool.services.gateway.http.openai_fields import Body, Content, PlainText, check_json, check_text, wrong
from spool.services.gateway.options import ChatRole, chat_message, shown
from spool.services.text.bounded_json import read_json
from spool.services.text.chat_template import UnparsedArguments

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    check_json(value)
    return value


def _arguments(value: object) -> dict[str, Any] | UnparsedArguments:
    """Templates expect arguments as an object; OpenAI's messages have its JSON text.

    An answer that ended at max_tokens holds the beginning of such a text, and must be accepted in the history.
    """
    if not isinstance(value, str):
        raise wrong(f"is {shown(value)}, must be a text")
    try:
        arguments = read_json(value) if value.strip() else {}
        if isinstance(arguments, dict):
            return _parameters(arguments)
    except ValueError:
        pass
    return UnparsedArguments(check_text(value))


class Function(Body):
    """What the model may call."""

    name: FunctionName
    description: PlainText | None = None
    """Tells the model what the function does."""
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] | None = None
    """JSON schema of the arguments, an object; without one, the function takes none."""
    strict: bool | None = None
    """True: the arguments fit the schema even if the model is free to call or not (not with Llama 3)."""


class ToolDefinition(Body):
    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


class _ChosenName(BaseModel):
    name: str


class _ChosenFunction(BaseModel):
    type: Literal["function"]
    function: _ChosenName


@dataclass(frozen=True, slots=True)
class ToolChoiceValue:
    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None


def _tool_choice(value: object) -> ToolChoiceValue | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoiceValue(value)
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not others and not more:
            return ToolChoiceValue("function", name)
    form = '{"type": "function", "function": {"name": ...}}'
    raise wrong(f"is {shown(value)}, must be 'none', 'auto', 'required' or {form}")


ToolChoice = Annotated[
    Any,
    BeforeValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | _ChosenFunction | None),
]


def tool_use(
    tools: list[ToolDefinition] | None, choice: ToolChoiceValue | None, parallel: bool | None
) -> ToolUse | None:
    """None where the answer calls nothing. Raises an error for a validator to raise."""
    mode = "auto" if choice is None else choice.mode
    if not tools:
        if mode in ("required", "function"):
            raise wrong("tool_choice asks for a call, which needs tools", "tool_choice")
        return None
    given = tuple(definition.tool() for definition in tools)
    name = None if choice is None else choice.name
    return ToolUse(given, mode == "required", name, parallel is not False, offered=mode != "none")


class CalledFunction(Body):
    name: PlainText
    arguments: Annotated[Any, BeforeValidator(_arguments, json_schema_input_type=str)]
    """JSON text of an object. Any other text goes into the prompt as it is."""
    provider_specific_fields: Any = None
    """Accepted, without effect."""


class MessageToolCall(Body):
    """A call that the assistant has made."""

    id: PlainText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted, without effect: streams have it."""
    provider_specific_fields: Any = None
    """Accepted, without effect."""

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    role: ChatRole
    """`developer` is what newer clients call `system`."""
    content: Content | None = None
    """Only messages of the assistant may be without."""
    name: PlainText | None = None
    tool_call_id: PlainText | None = None
    """Of a message with the role `tool`: the id of the call whose result it is."""
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    """Calls that the assistant has made."""
    reasoning_content: PlainText | None = None
    """The assistant's reasoning, for templates that use it."""
    reasoning: PlainText | None = None
    """Another name of reasoning_content."""
    refusal: PlainText | None = None
    """Stands for the content of a message that has none."""
    annotations: list[Any] | None = None
    """Accepted, without effect."""
    provider_specific_fields: Any = None
    """Accepted, without effect: LiteLLM's messages have it."""

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.role != "assistant":
            for field in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
                if getattr(self, field):
                    raise wrong(f"is given with the role {self.role!r}, must be with 'assistant' only", field)
            if self.content is None:
                raise wrong("is missing, must be a text", "content")
        if self.role == "tool" and not self.tool_call_id:
            raise wrong("is missing, must be the id of the call whose result the message is", "tool_call_id")
        return self

    def for_template(self, called: Mapping[str, str]) -> dict[str, Any]:
        """`called` has the names of the functions that were called, by the ids of the calls."""
        calls = [call.for_template() for call in self.tool_calls or []] or None
        more = {
            # Some templates want the function's name with its result, which OpenAI's clients do not send.
            "name": self.name or called.get(self.tool_call_id or ""),
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        given = {key: value for key, value in more.items() if value is not None}
        return chat_message(self.role, self.content or self.refusal or "", **given)


Messages = Annotated[list[Message], Field(fail_fast=True)]
ToolDefinitions = Annotated[list[ToolDefinition], Field(fail_fast=True)]


def for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """The messages as chat templates know them."""
    called = {call.id: call.function.name for message in messages for call in message.tool_calls or []}
    return tuple(message.for_template(called) for message in messages)
