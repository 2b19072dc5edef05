"""Tools and thoughts in chats, as OpenAI's package reads them, of a model whose answers the test writes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from spool.protos import scheduler_pb2
from spool.scheduler.messages import EmitTokens, FinishReason, TokenLogprobs
from spool.services.backend.interface import GenerationRequest
from spool.services.backend.sequence_stream import SequenceFailedError
from spool.services.gateway.settings import GatewaySettings
from spool.services.text.tokenizer import ModelTokenizer
from tests.integration.gateway.expected import TIMEOUT, Recorder, error_of
from tests.support.chat_templates import GLM45, HERMES, LLAMA3, MISTRAL, QWEN3_CODER, THINKING
from tests.support.gateway import Gateways
from tests.unit.services.test_tokenizer import byte_level

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Zürich?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")
LINE_ENDS = "".join(character for character in map(chr, range(0x3000)) if len(f"a{character}b".splitlines()) > 1)
"""Every character at which Python ends a line."""


class SpokenStream:
    """Tokens of a text, a few at a time, then the end token, unless `max_tokens` are fewer."""

    def __init__(self, tokens: list[int], end: int, request: GenerationRequest, step: int) -> None:
        self.finish_reason: FinishReason | None = None
        self.fingerprints: dict[str, dict[str, str]] = {}
        self.queue_seconds = 0.0
        self.workers: dict[str, None] = {}
        self.refusal: Exception | None = None
        self._tokens, self._request, self._step = [*tokens, end], request, step

    def __await__(self) -> Iterator[None]:
        yield

    async def __aiter__(self) -> AsyncIterator[EmitTokens]:
        spoken = self._tokens[: self._request.max_tokens]
        for first in range(0, len(spoken), self._step):
            tokens = tuple(spoken[first : first + self._step])
            logprobs = tuple(TokenLogprobs(token, -0.5) for token in tokens if self._request.top_logprobs is not None)
            yield EmitTokens(0, tokens, 0, 0, (), logprobs)
        self.finish_reason = FinishReason.STOP if spoken == self._tokens else FinishReason.LENGTH

    def cancel(self) -> None:
        pass


class BrokenStream(SpokenStream):
    async def __aiter__(self) -> AsyncIterator[EmitTokens]:
        async for emission in super().__aiter__():
            yield emission
        raise SequenceFailedError(f"broken{LINE_ENDS}off")


class Speaker(Recorder):
    """A model that answers with the given texts, one after the other, `step` tokens a round."""

    def __init__(self, gateways: Gateways, tokenizer: ModelTokenizer) -> None:
        super().__init__(gateways)
        self.says: list[str | list[int]] = []
        self.step = 3
        self.stream = SpokenStream
        self.tokenizer = tokenizer

    async def model(self) -> scheduler_pb2.ServedModel:
        return scheduler_pb2.ServedModel(
            model_id="speaker",
            vocabulary_size=self.tokenizer.vocabulary_size,
            max_sequence_length=4000,
            tokenizer_digest=self.tokenizer.vocabulary_digest,
        )

    def submit(self, request: GenerationRequest) -> SpokenStream:  # type: ignore[override]
        self.requests.append(request)
        [end] = self.tokenizer.stop_token_ids
        said = self.says.pop(0)
        tokens = self.tokenizer.encode(said) if isinstance(said, str) else said
        return self.stream(tokens, end, request, self.step)

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.requests[-1].prompt, skip_special_tokens=False)


class Talk:
    """What a model says to a request, by the `openai` package, whole and as a stream."""

    def __init__(self, client: openai.OpenAI, url: str, backend: Speaker) -> None:
        self.client = client
        self.url = url
        self.backend = backend

    def whole(self, *says: str, **request: Any) -> ChatCompletion:
        self.backend.says = list(says)
        return self.client.chat.completions.create(**{"model": "speaker", "messages": ASK, "n": len(says), **request})

    def post(self, says: str = "", **body: Any) -> httpx.Response:
        """The same by itself, for what the package does not send or hides."""
        self.backend.says = [says]
        body = {"model": "speaker", "messages": ASK, **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=TIMEOUT)

    def chunks(self, *says: str, step: int = 3, **request: Any) -> list[ChatCompletionChunk]:
        self.backend.says, self.backend.step = list(says), step
        return list(
            self.client.chat.completions.create(
                **{"model": "speaker", "messages": ASK, "n": len(says), **request}, stream=True
            )
        )


Open = Callable[..., AbstractContextManager[Talk]]


@pytest.fixture(scope="module")
def talk(gateways: Gateways, tmp_path_factory: pytest.TempPathFactory) -> Open:
    @contextmanager
    def opened(
        template: str,
        settings: GatewaySettings | None = None,
        speaker: type[Speaker] = Speaker,
        markers: Sequence[str | tokenizers.AddedToken] = MARKERS,
    ) -> Iterator[Talk]:
        folder: Path = tmp_path_factory.mktemp("speaker")
        model: tokenizers.Tokenizer = byte_level()
        model.add_special_tokens(list(markers))
        model.save(str(folder / "tokenizer.json"))
        config = {"eos_token": "<end>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        tokenizer = ModelTokenizer(folder)
        backend = speaker(gateways, tokenizer)
        with (
            gateways.serve(settings, backend, tokenizer=tokenizer) as served,
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield Talk(client, served.url, backend)

    return opened


def joined(chunks: list[ChatCompletionChunk], choice: int = 0) -> dict[str, Any]:
    """The message that a stream makes up, by OpenAI's rules, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for part in chunk.choices:
            if part.index != choice:
                continue
            assert "finish_reason" not in message
            message["content"] += part.delta.content or ""
            message["reasoning_content"] += getattr(part.delta, "reasoning_content", None) or ""
            for call in part.delta.tool_calls or []:
                assert call.function is not None
                if call.index == len(message["tool_calls"]):
                    assert (call.type, call.function.arguments) == ("function", "")
                    message["tool_calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(message["tool_calls"]) - 1
                    assert (call.id, call.function.name) == (None, None)
                    message["tool_calls"][-1][2] += call.function.arguments or ""
            if part.finish_reason is not None:
                message["finish_reason"] = part.finish_reason
    return message


def as_joined(done: ChatCompletion, choice: int = 0) -> dict[str, Any]:
    one = done.choices[choice]
    calls = [[call.id, call.function.name, call.function.arguments] for call in one.message.tool_calls or []]  # type: ignore[union-attr]
    return {
        "content": one.message.content or "",
        "reasoning_content": getattr(one.message, "reasoning_content", None) or "",
        "tool_calls": calls,
        "finish_reason": one.finish_reason,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Ids are those of the request."""
    return {**message, "tool_calls": [call[1:] for call in message["tool_calls"]]}


def test_calls(talk: Open) -> None:
    said = f"Let me see.\n{CALL}\n{STOP}"
    with talk(HERMES) as model:
        done = model.whole(said, tools=TOOLS)
        [choice] = done.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        calls = as_joined(done)["tool_calls"]
        assert [call[1:] for call in calls] == [["weather", '{"city": "Zürich"}'], ["stop", "{}"]]
        assert len({call[0] for call in calls}) == 2
        assert '"description": "Of a city"' in model.backend.prompt
        assert done.usage is not None
        assert done.usage.completion_tokens == len(model.backend.tokenizer.encode(said)) + 1
        for step in (1, 4, 1000):
            assert without_ids(joined(model.chunks(said, tools=TOOLS, step=step))) == without_ids(as_joined(done))
        assert model.whole(CALL, tools=TOOLS).choices[0].message.content is None


@pytest.mark.parametrize("stream", [SpokenStream, BrokenStream])
def test_an_event_is_one_line_to_every_client(talk: Open, stream: type[SpokenStream]) -> None:
    """Some clients end a line wherever Python's str.splitlines does: at ten characters, of which JSON escapes seven."""
    assert "\u2028" in LINE_ENDS
    said = f"a{LINE_ENDS}b\n{CALL.replace('Zürich', f'c{LINE_ENDS[-3:]}d')}"
    body = {"model": "speaker", "messages": ASK, "tools": TOOLS, "stream": True, "logprobs": True}
    with talk(HERMES) as model:
        model.backend.says, model.backend.stream = [said], stream
        with httpx.stream("POST", f"{model.url}/v1/chat/completions", json=body, timeout=TIMEOUT) as response:
            assert response.status_code == 200
            received = b"".join(response.iter_raw())
    for lines in (list(httpx.Response(200, content=received).iter_lines()), received.decode().splitlines()):
        *events, done = [line.removeprefix("data: ") for line in lines if line]
        assert done == "[DONE]"
        parsed = [json.loads(event) for event in events]
        error = parsed.pop()["error"]["message"] if stream is BrokenStream else None
        assert error == (f"broken{LINE_ENDS}off" if stream is BrokenStream else None)
        chunks = [ChatCompletionChunk.model_validate(event) for event in parsed]
        if error is None:
            message = joined(chunks)
            assert message["content"] == f"a{LINE_ENDS}b"
            assert [json.loads(call[2]) for call in message["tool_calls"]] == [{"city": f"c{LINE_ENDS[-3:]}d"}]
        logprobs = [part.logprobs for chunk in chunks for part in chunk.choices if part.logprobs is not None]
        spelled = b"".join(bytes(entry.bytes or []) for one in logprobs for entry in one.content or [])
        assert LINE_ENDS in spelled.decode()


def test_every_choice_has_its_own_calls(talk: Open) -> None:
    says = [CALL, "No.", f"{STOP}\n{CALL}"]
    with talk(HERMES) as model:
        done = model.whole(*says, tools=TOOLS)
        chunks = model.chunks(*says, tools=TOOLS)
        for choice in range(3):
            assert without_ids(joined(chunks, choice)) == without_ids(as_joined(done, choice))
        assert [choice.finish_reason for choice in done.choices] == ["tool_calls", "stop", "tool_calls"]
        assert len({call[0] for choice in range(3) for call in as_joined(done, choice)["tool_calls"]}) == 3


def test_limits_of_calls(talk: Open) -> None:
    with talk(HERMES) as model:
        done = model.whole(CALL, tools=TOOLS, max_tokens=len(CALL) - 20)
        assert done.choices[0].finish_reason == "length"
        [[_, name, arguments]] = as_joined(done)["tool_calls"]
        assert (name, arguments[:9]) == ("weather", '{"city": ')
        done = model.whole(CALL, tools=TOOLS, stop="rich")
        assert (done.choices[0].finish_reason, done.choices[0].stop_reason) == ("stop", "rich")
        assert [call[2] for call in as_joined(done)["tool_calls"]] == ['{"city": "Zü']
        done = model.whole(f"{CALL}\nDone.", tools=TOOLS, stop="Done")
        assert done.choices[0].finish_reason == "tool_calls"
        done = model.whole(f"{CALL}\n{STOP}", tools=TOOLS, parallel_tool_calls=False)
        assert [call[1] for call in as_joined(done)["tool_calls"]] == ["weather"]
        for request in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            done = model.whole(CALL, **request)
            assert (done.choices[0].message.content, done.choices[0].finish_reason) == (CALL, "stop")
            assert done.choices[0].message.tool_calls is None
            assert "<tools>" not in model.backend.prompt


@pytest.mark.parametrize("dumped", [False, True])
def test_history_becomes_the_prompt(talk: Open, dumped: bool) -> None:
    """Answers are sent back as the package gives them."""
    with talk(HERMES) as model:
        answer = model.whole(CALL, tools=TOOLS).choices[0].message
        result = {"role": "tool", "tool_call_id": (answer.tool_calls or [])[0].id, "content": "sunny"}
        history = [*ASK, answer.model_dump() if dumped else answer, result]
        assert model.whole("It is sunny.", messages=history, tools=TOOLS).choices[0].message.content == "It is sunny."
        assert model.backend.prompt.endswith(
            f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
            '<|im_start|>user\n<tool_response name="weather">\nsunny\n</tool_response><|im_end|>\n'
            "<|im_start|>assistant\n"
        )


THOUGHT = f"<think>\nLet me think.\n</think>\n\nSo:\n{CALL}"


def test_thoughts(talk: Open) -> None:
    with talk(THINKING) as model:
        done = model.whole(THOUGHT, tools=TOOLS)
        message = as_joined(done)
        assert (message["reasoning_content"], message["content"]) == ("Let me think.", "So:")
        assert getattr(done.choices[0].message, "reasoning") == "Let me think."  # noqa: B009
        assert [call[1] for call in message["tool_calls"]] == ["weather"]
        for step in (1, 1000):
            chunks = model.chunks(THOUGHT, tools=TOOLS, step=step)
            assert without_ids(joined(chunks)) == without_ids(message)
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Let me think."
        hidden = model.whole(THOUGHT, tools=TOOLS, extra_body={"include_reasoning": False})
        assert without_ids(as_joined(hidden)) == {**without_ids(message), "reasoning_content": ""}
        assert hidden.usage is not None
        assert done.usage is not None
        assert hidden.usage.completion_tokens == done.usage.completion_tokens
        chunks = model.chunks(THOUGHT, tools=TOOLS, extra_body={"include_reasoning": False})
        assert joined(chunks)["reasoning_content"] == ""
        # The prompt can begin the thought, or rule it out.
        begun = model.whole("Hm.\n</think>Yes", extra_body={"chat_template_kwargs": {"begin_thinking": True}})
        assert (as_joined(begun)["reasoning_content"], begun.choices[0].message.content) == ("Hm.", "Yes")
        none = model.whole("Yes", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert as_joined(none)["content"] == "Yes"
    with talk(HERMES) as model:
        assert model.whole(THOUGHT).choices[0].message.content == THOUGHT


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_message_that_is_continued_may_begin_the_thought(talk: Open, step: int) -> None:
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    for begun, said, reasoning, content in (
        ("<think>\nLet me see", " it is 4.\n</think>\n\nFour.", " it is 4.", "Four."),
        ("<think>\nLet me see ", "it is 4.", "it is 4.", ""),
        ("<think>", "\nHm.</think>Four.", "Hm.", "Four."),
        ("<think>\nIt is 4.\n</think>\n\n", "Four.", "", "Four."),
        ("<think>\nIt is 4.\n</think>\n\nThe answer", " is <think>.", "", " is <think>."),
        ("The answer", " is 4.", "", " is 4."),
        ("", "<think>Hm.</think>Four.", "Hm.", "Four."),
    ):
        asked: Any = [*ASK, {"role": "assistant", "content": begun}]
        with talk(THINKING) as model:
            message = joined(model.chunks(said, step=step, messages=asked, extra_body=continued))
            assert (message["reasoning_content"], message["content"]) == (reasoning, content)
            assert message == as_joined(model.whole(said, messages=asked, extra_body=continued))
            # A thought in the question is the person's.
            other = [{"role": "user", "content": "<think>"}, *asked[1:]]
            assert joined(model.chunks(said, step=step, messages=other, extra_body=continued)) == message


def test_stop_strings_are_those_of_the_content(talk: Open) -> None:
    with talk(THINKING) as model:
        done = model.whole("<think>\nOne. Two.\n</think>\n\nThree. Four.", stop=["."])
        assert as_joined(done) == {
            "content": "Three",
            "reasoning_content": "One. Two.",
            "tool_calls": [],
            "finish_reason": "stop",
        }
        [choice] = model.whole("<think>One. Two.", stop=["."], max_tokens=12).choices
        assert (getattr(choice.message, "reasoning_content"), choice.finish_reason) == ("One. T", "length")  # noqa: B009


def test_calls_have_a_grammar_where_they_must_fit(talk: Open) -> None:
    strict, named = [openai.pydantic_function_tool(City)], {"type": "function", "function": {"name": "stop"}}
    for template, asked, constrained in (
        (MISTRAL, {"tools": TOOLS, "tool_choice": "required"}, True),
        (MISTRAL, {"tools": TOOLS, "tool_choice": named}, True),
        (MISTRAL, {"tools": TOOLS}, False),
        (MISTRAL, {"tools": strict}, True),
        (LLAMA3, {"tools": strict}, False),
    ):
        with talk(template) as model:
            model.whole("a", **asked)
            assert (model.backend.requests[-1].sampling.grammar is not None) is constrained


class City(BaseModel):
    city: str


def test_strict_calls_are_parsed_by_openais_client(talk: Open) -> None:
    said = CALL.replace("weather", "City")
    with talk(HERMES) as model:
        model.backend.says = [said]
        done = model.client.chat.completions.parse(
            model="speaker", messages=ASK, tools=[openai.pydantic_function_tool(City)]
        )
        [call] = done.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == City(city="Zürich")


def test_what_cannot_be_required_names_the_function(talk: Open) -> None:
    # llguidance knows no `uniqueItems`; without a grammar that does no harm.
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    with talk(HERMES) as model:
        response = model.post(tools=tools, tool_choice="required")
        assert response.status_code == 400
        assert error_of(response).startswith("tools.2.function.parameters cannot be used: ")
        assert response.json()["error"]["param"] == "tools.2.function.parameters"
        assert model.whole("a", tools=tools).choices[0].message.content == "a"
        wrong = {"type": "json_schema", "json_schema": {"name": "odd", "schema": odd}}
        with pytest.raises(openai.BadRequestError, match=r"response_format.* cannot be used"):
            model.whole("a", tools=TOOLS, tool_choice="required", response_format=wrong)
    # Where each argument stands for itself, nothing can hold for several.
    tools = [{"type": "function", "function": {"name": "odd", "parameters": {"anyOf": [PARAMETERS]}, "strict": True}}]
    with (
        talk(QWEN3_CODER) as model,
        pytest.raises(openai.BadRequestError, match=r"tools\.0.* cannot be used: it has anyOf"),
    ):
        model.whole("a", tools=tools)


@pytest.mark.parametrize("template", [QWEN3_CODER, GLM45])
def test_parameters_that_are_no_schema_are_named(talk: Open, template: str) -> None:
    to_x = {"properties": {"a": {"$ref": "#/x"}}}
    patterns = [{"properties": {"a": {"type": "string", "pattern": pattern}}} for pattern in (5, {"(^)": 1})]
    with talk(template) as model:
        for parameters in (*patterns, *(to_x | {"x": x} for x in ({"type": 5}, {"enum": 5}, {"anyOf": 5}))):
            tools = [{"type": "function", "function": {"name": "odd", "parameters": parameters}}]
            response = model.post(tools=tools, tool_choice="required")
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "tools.0.function.parameters"


def test_a_template_for_one_call_gets_one_call(talk: Open) -> None:
    said = '<|python_tag|>{"name": "weather", "parameters": {"city": "Zürich"}}; {"name": "stop", "parameters": {}}'
    with talk(LLAMA3) as model:
        done = model.whole(said, tools=TOOLS)
        [call] = as_joined(done)["tool_calls"]
        assert call[1:] == ["weather", '{"city": "Zürich"}']
        assert without_ids(joined(model.chunks(said, tools=TOOLS))) == without_ids(as_joined(done))
        two = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
        results = [{"role": "tool", "tool_call_id": name, "content": "sunny"} for name in "ab"]
        history = [*ASK, {"role": "assistant", "content": None, "tool_calls": two}, *results]
        response = model.post(messages=history, tools=TOOLS)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages.1.tool_calls")
        assert "has 2 calls, must have one: " in error_of(response)
        assert "This model only supports single tool-calls at once!" in error_of(response)


def test_formats_that_are_not_known_are_named_and_can_be_set(talk: Open) -> None:
    for tag, message in (
        ("<|tool_calls_section_begin|>", "is that of Kimi K2"),
        ("<call>", r"gateway\.tool_format can"),
    ):
        template = HERMES.replace("<tool_call>", tag)
        with talk(template) as model, pytest.raises(openai.BadRequestError, match=message):
            model.whole(CALL, tools=TOOLS)
    settings = GatewaySettings.model_validate({"tool_format": "hermes"})
    with talk(template, settings) as model:
        assert model.whole(CALL, tools=TOOLS).choices[0].finish_reason == "tool_calls"
