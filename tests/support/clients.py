"""Requests for text over either API of a gateway, and their answers in the words of neither."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import grpc.aio
import httpx

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1 import generation_pb2_grpc
from tests.support.gateway import Served
from tests.support.waiting import LONG

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids or the messages of a chat."""


class Usage(NamedTuple):
    prompt: int
    completion: int
    drafted: int
    accepted: int
    cached: int
    seed: int


NOTHING = Usage(0, 0, 0, 0, 0, 0)


@dataclass
class Choice:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """`stop` or `length`."""
    stop: str | int | None = None


@dataclass
class Answer:
    """`code` and `error` are empty where there was no error."""

    status: int | grpc.StatusCode
    headers: Mapping[str, str]
    """Those of gRPC are the initial and the trailing metadata."""
    code: str = ""
    error: str = ""
    choices: list[Choice] = field(default_factory=list)
    usage: Usage = NOTHING

    def add(self, index: int, text: str, tokens: Sequence[int], end: str, stop: str | int | None) -> None:
        """A part of a choice, or the whole."""
        self.choices += [Choice() for _ in range(len(self.choices), index + 1)]
        choice = self.choices[index]
        assert not choice.end
        choice.text, choice.tokens = choice.text + text, [*choice.tokens, *tokens]
        choice.end, choice.stop = end, stop


def message_of(prompt: Prompt, **fields: Any) -> pb.GenerateRequest:
    """Raises TypeError or ValueError where gRPC's request has no such field or value."""
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, **fields)
    if prompt and isinstance(prompt[0], Mapping):
        messages = [pb.ChatMessage(**message) for message in prompt]  # type: ignore[arg-type]
        return pb.GenerateRequest(chat=pb.Chat(messages=messages), **fields)
    return pb.GenerateRequest(tokens=pb.TokenIds(token_ids=prompt), **fields)  # type: ignore[arg-type]


class Clients:
    """Of one gateway."""

    def __init__(self, http: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        self.http = http
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def over_http(
        self,
        prompt: Prompt,
        stream: bool = False,
        headers: Mapping[str, str] | None = None,
        draft_length: int | None = None,
        proposer: str | None = None,
        **fields: Any,
    ) -> Answer:
        chat = bool(prompt) and isinstance(prompt[0], Mapping)
        body = {"messages" if chat else "prompt": prompt, "return_token_ids": True, **fields}
        options = {"draft_length": draft_length, "proposer": proposer}
        body["spool"] = {name: value for name, value in options.items() if value is not None}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        route = "/v1/chat/completions" if chat else "/v1/completions"
        response = await self.http.post(route, content=json.dumps(body), headers=JSON | dict(headers or {}))
        answer = Answer(response.status_code, response.headers)
        events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
        parts = [json.loads(part) for part in (events or [response.text])]
        for part in parts:
            if "error" in part:
                assert part["error"].keys() == {"message", "type", "param", "code"}
                answer.code, answer.error = part["error"]["code"] or "", part["error"]["message"]
                return answer
            for choice in part["choices"]:
                text = (choice.get("message") or choice.get("delta") or {}).get("content") if chat else choice["text"]
                tokens, end = choice.get("token_ids") or [], choice["finish_reason"] or ""
                answer.add(choice["index"], text or "", tokens, end, choice.get("stop_reason"))
        usage = parts[-1]["usage"]
        spool, cached = usage["spool"], usage["prompt_tokens_details"]["cached_tokens"]
        counts = usage["prompt_tokens"], usage["completion_tokens"], spool["drafted"], spool["accepted"]
        answer.usage = Usage(*counts, cached, spool["seed"])
        return answer

    async def over_grpc(
        self, prompt: Prompt, stream: bool = False, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        metadata, request = tuple((headers or {}).items()), message_of(prompt, **fields)
        if stream:
            call = self.stub.GenerateStream(request, metadata=metadata, timeout=LONG)
        else:
            call = self.stub.Generate(request, metadata=metadata, timeout=LONG)
        try:
            parts = [part async for part in call] if stream else [await call]
        except grpc.aio.AioRpcError as error:
            trailing = {**dict(await call.initial_metadata()), **dict(error.trailing_metadata())}
            return Answer(error.code(), trailing, trailing.get("spool-error-code", ""), error.details() or "")
        answer = Answer(grpc.StatusCode.OK, dict(await call.initial_metadata()))
        for choice in [part.choice for part in parts if part.HasField("choice")] if stream else parts[0].choices:
            end = pb.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
            stop = choice.WhichOneof("stop_reason")
            reason = getattr(choice, stop) if stop else None
            answer.add(choice.index, choice.text, choice.token_ids, "" if end == "unspecified" else end, reason)
        usage = parts[-1].usage
        counts = usage.prompt_tokens, usage.completion_tokens, usage.drafted_tokens, usage.accepted_tokens
        answer.usage = Usage(*counts, usage.cached_prompt_tokens, usage.seed)
        return answer


JSON = {"content-type": "application/json"}


@asynccontextmanager
async def clients_of(served: Served) -> AsyncIterator[Clients]:
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=2 * LONG) as http,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        yield Clients(http, channel)
