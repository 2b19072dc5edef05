"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from spool.client.calls import CHANNEL_OPTIONS, check_key, metadata_for, repeatable
from spool.client.received import ReceivedOutput
from spool.client.retry import Attempts, RetryPolicy
from spool.client.v1.generation_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    ListModelsRequest,
    ListModelsResponse,
    ReplayRequest,
    ReplayResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub


class AsyncClient:
    """`Client` for asyncio, made and used in one event loop.

    Cancelling a task that awaits a method cancels the request.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = None,
        options: Sequence[tuple[str, Any]] = (),
        insecure: bool = False,
    ) -> None:
        check_key(api_key, address, encrypted=credentials is not None, insecure=insecure)
        settings = [*CHANNEL_OPTIONS, *options]
        self._channel = (
            grpc.aio.insecure_channel(address, settings)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, settings)
        )
        self._stub = GenerationServiceStub(self._channel)
        self._metadata = metadata_for(api_key, settings)
        self._retry = retry or RetryPolicy()

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, request: GenerateRequest, timeout: float | None = None) -> GenerateResponse:
        """The whole output."""
        return await self._answer(self._stub.Generate, repeatable(request), timeout)

    async def stream(
        self,
        request: GenerateRequest,
        timeout: float | None = None,
    ) -> AsyncGenerator[GenerateStreamResponse, None]:
        """As `Client.stream`. `contextlib.aclosing` cancels a request at once whose stream is left early."""
        attempts, received, request = Attempts(self._retry, timeout), ReceivedOutput(), repeatable(request)
        while not received.complete:
            received.begin_call()
            call = self._stub.GenerateStream(request, timeout=attempts.seconds_left(), metadata=self._metadata)
            try:
                async for message in call:
                    part = received.take(message)
                    if part is not None:
                        attempts.progressed()
                        yield part
                received.end_call()
            except grpc.RpcError as error:
                if not received.complete:
                    await asyncio.sleep(attempts.pause_after(error))
            finally:
                call.cancel()

    async def tokenize(self, request: TokenizeRequest, timeout: float | None = None) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        return await self._answer(self._stub.Tokenize, request, timeout)

    async def detokenize(self, request: DetokenizeRequest, timeout: float | None = None) -> DetokenizeResponse:
        """The text of token ids."""
        return await self._answer(self._stub.Detokenize, request, timeout)

    async def list_models(self, timeout: float | None = None) -> ListModelsResponse:
        """The models that requests may name."""
        return await self._answer(self._stub.ListModels, ListModelsRequest(), timeout)

    async def replay(
        self, receipts: Iterable[str], timeout: float | None = None
    ) -> AsyncGenerator[ReplayResponse, None]:
        """As `Client.replay`."""
        requests = (ReplayRequest(receipt=receipt) for receipt in receipts)
        call = self._stub.Replay(requests, timeout=timeout, metadata=self._metadata)
        try:
            async for answer in call:
                yield answer
        finally:
            call.cancel()

    async def _answer(self, method: Callable[..., Any], request: object, timeout: float | None) -> Any:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return await method(request, timeout=attempts.seconds_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                await asyncio.sleep(attempts.pause_after(error))
