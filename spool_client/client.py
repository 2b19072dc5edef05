"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

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

Answer = TypeVar("Answer")


class Client:
    """Calls spool.v1.GenerationService at `address`, which is host:port or another target of gRPC.

    `credentials` encrypt the connection, for instance `grpc.ssl_channel_credentials()`; without, it is plain, and a key
    is sent to this machine alone unless `insecure` says that nobody else can read it on its way (else: ValueError).
    `options` are gRPC's, on top of those of this package. Any number of threads may call at once; `close`, or leaving
    the `with` block, ends their calls.

    `timeout` of a method is in seconds, for all attempts together. Every method raises grpc.RpcError with the last
    attempt's code and details once `retry` gives up.
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
            grpc.insecure_channel(address, settings)
            if credentials is None
            else grpc.secure_channel(address, credentials, settings)
        )
        self._stub = GenerationServiceStub(self._channel)
        self._metadata = metadata_for(api_key, settings)
        self._retry = retry or RetryPolicy()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, request: GenerateRequest, timeout: float | None = None) -> GenerateResponse:
        """The whole output."""
        return self._answer(self._stub.Generate, repeatable(request), timeout)

    def stream(
        self, request: GenerateRequest, timeout: float | None = None
    ) -> Generator[GenerateStreamResponse, None, None]:
        """The output as it grows, each part once. The last part has the usage.

        A stream that breaks goes on where it was: the request is made again with the same seed, and what has been
        delivered already is compared and left out. A request without a seed gets one. Closing the generator, or
        dropping it, cancels the request.

        Raises OutputChangedError where the repeated request gives other output.
        """
        attempts, received, request = Attempts(self._retry, timeout), ReceivedOutput(), repeatable(request)
        while not received.complete:
            received.begin_call()
            call = self._stub.GenerateStream(request, timeout=attempts.seconds_left(), metadata=self._metadata)
            try:
                yield from _new_parts(call, received, attempts)
            except grpc.RpcError as error:
                if not received.complete:
                    time.sleep(attempts.pause_after(error))
            finally:
                call.cancel()

    def tokenize(self, request: TokenizeRequest, timeout: float | None = None) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        return self._answer(self._stub.Tokenize, request, timeout)

    def detokenize(self, request: DetokenizeRequest, timeout: float | None = None) -> DetokenizeResponse:
        """The text of token ids."""
        return self._answer(self._stub.Detokenize, request, timeout)

    def list_models(self, timeout: float | None = None) -> ListModelsResponse:
        """The models that requests may name."""
        return self._answer(self._stub.ListModels, ListModelsRequest(), timeout)

    def replay(self, receipts: Iterable[str], timeout: float | None = None) -> Generator[ReplayResponse, None, None]:
        """What becomes of receipts, each in JSON, when the server computes them again; in any order.

        Both are streams, so there may be any number. The call is not repeated when it fails. Closing the generator, or
        dropping it, cancels the rest.
        """
        requests = (ReplayRequest(receipt=receipt) for receipt in receipts)
        call = self._stub.Replay(requests, timeout=timeout, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def _answer(self, method: Callable[..., Answer], request: object, timeout: float | None) -> Answer:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return method(request, timeout=attempts.seconds_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.pause_after(error))


def _new_parts(
    call: Iterable[GenerateStreamResponse], received: ReceivedOutput, attempts: Attempts
) -> Generator[GenerateStreamResponse, None, None]:
    for message in call:
        part = received.take(message)
        if part is not None:
            attempts.progressed()
            yield part
    received.end_call()
