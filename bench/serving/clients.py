"""Clients that a load is made with: OpenAI's package over HTTP, the stubs of this one over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from deploy.errors import UsageError
from deploy.offline.prompts import Prompt
from spool_client.v1 import generation_pb2, generation_pb2_grpc


class RefusedError(RuntimeError):
    """The server has no room now, and said so."""


class RequestFailedError(RuntimeError):
    """Anything else; the message is the kind of error, so that equal ones can be counted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every request asks for."""

    max_tokens: int
    temperature: float
    timeout: float
    speculation: bool


class LoadClient(Protocol):
    async def ask(self, prompt: Prompt, seed: int, on_delivery: Callable[[], None]) -> int:
        """The number of output tokens; `on_delivery` is called whenever something of the output comes.

        Raises `RefusedError` and `RequestFailedError`.
        """


class HttpClient:
    """`client` is an openai.AsyncOpenAI without retries: a retry would hide a refusal."""

    def __init__(self, client: Any, model: str, asked: Asked) -> None:
        self._client = client
        self._model = model
        self._asked = asked

    async def ask(self, prompt: Prompt, seed: int, on_delivery: Callable[[], None]) -> int:
        import openai

        tokens = None
        try:
            async for chunk in await self._open(prompt, seed):
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                if any(_content(choice) or choice.finish_reason for choice in chunk.choices):
                    on_delivery()
        except openai.RateLimitError as error:
            raise RefusedError(str(error)) from error
        except openai.OpenAIError as error:
            raise RequestFailedError(type(error).__name__) from error
        if tokens is None:
            raise RequestFailedError("the stream ended early")
        return tokens

    async def _open(self, prompt: Prompt, seed: int) -> Any:
        asked = self._asked
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timeout": asked.timeout,
            "extra_body": {} if asked.speculation else {"spool": {"speculation": False}},
        }
        if prompt.text is not None:
            return await self._client.completions.create(prompt=prompt.text, **fields)
        return await self._client.chat.completions.create(messages=list(prompt.messages), **fields)


def _content(choice: Any) -> str | None:
    """Reasoning is output as well."""
    if not hasattr(choice, "delta"):
        return choice.text
    return choice.delta.content or getattr(choice.delta, "reasoning_content", None)


class GrpcClient:
    def __init__(self, stub: generation_pb2_grpc.GenerationServiceStub, key: str, asked: Asked) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._asked = asked

    async def ask(self, prompt: Prompt, seed: int, on_delivery: Callable[[], None]) -> int:
        asked = self._asked
        request = generation_pb2.GenerateRequest(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=seed,
            draft_length=None if asked.speculation else 0,
        )
        if prompt.text is not None:
            request.text = prompt.text
        else:
            for message in prompt.messages:
                request.chat.messages.add(role=message["role"], content=message["content"])
        tokens = None
        try:
            call = self._stub.GenerateStream(request, timeout=asked.timeout, metadata=self._metadata)
            async for message in call:
                if message.choice.token_ids:
                    on_delivery()
                if message.HasField("usage"):
                    tokens = message.usage.completion_tokens
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise RefusedError(error.details() or "") from error
            raise RequestFailedError(error.code().name) from error
        if tokens is None:
            raise RequestFailedError("the stream ended early")
        return tokens


@asynccontextmanager
async def http_client(url: str, key: str, model: str | None, asked: Asked) -> AsyncIterator[LoadClient]:
    """`model` None: the server's own. Raises `UsageError` where there is no server."""
    try:
        import openai
    except ImportError as error:
        raise UsageError("loads over HTTP need the package openai: pip install openai, or give --grpc") from error
    async with openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0) as client:
        try:
            model = model or (await client.models.list()).data[0].id
        except openai.OpenAIError as error:
            raise UsageError(f"{url} does not answer as a server should: {error}") from error
        yield HttpClient(client, model, asked)


@asynccontextmanager
async def grpc_client(address: str, key: str, asked: Asked) -> AsyncIterator[LoadClient]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield GrpcClient(generation_pb2_grpc.GenerationServiceStub(channel), key, asked)
