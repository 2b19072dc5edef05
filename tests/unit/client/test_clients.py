"""Both clients against a real gRPC server whose answers are written down beforehand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import grpc
import pytest

from spool.client import AsyncClient, Client, IncompleteOutputError, OutputChangedError, RetryPolicy
from spool.client.retry import Attempts
from spool.client.v1 import generation_pb2 as pb
from spool.client.v1 import generation_pb2_grpc
from tests.support.waiting import LONG

AT_ONCE = RetryPolicy(attempts=4, first_pause=0.001, longest_pause=0.002)
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
REQUEST = pb.GenerateRequest(text="a", max_tokens=4)


@dataclass(frozen=True)
class Failure:
    code: grpc.StatusCode
    retry_after: str | None = None


def part(*tokens: int, end: bool = False) -> pb.GenerateStreamResponse:
    reason = pb.FINISH_REASON_LENGTH if end else pb.FINISH_REASON_UNSPECIFIED
    text = "".join(map(str, tokens))
    return pb.GenerateStreamResponse(choice=pb.GeneratedChoice(text=text, token_ids=tokens, finish_reason=reason))


USAGE = pb.GenerateStreamResponse(usage=pb.GenerationUsage(completion_tokens=4))
WHOLE = [part(1, 2), part(3), part(4, end=True), USAGE]
Step = pb.GenerateStreamResponse | Failure


@dataclass
class Script(generation_pb2_grpc.GenerationServiceServicer):
    """The steps of each call, in order; those of the last one for all further calls."""

    calls: list[Iterable[Step]]
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set once a client has cancelled a stream."""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:  # noqa: N802
        return pb.GenerateResponse(usage=list(self._messages(request, context))[-1].usage)

    def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        context.add_callback(lambda: None if context.code() else self.cancelled.set())
        yield from self._messages(request, context)

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        list(self._messages(request, context))
        return pb.ListModelsResponse(models=[pb.ModelDescription(id="m")])

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:  # noqa: N802
        return pb.TokenizeResponse(token_ids=map(ord, request.text))

    def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.ServicerContext
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def _messages(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        steps = self.calls[min(len(self.requests), len(self.calls) - 1)]
        self.requests.append(request)
        self.metadata.append({name: str(value) for name, value in context.invocation_metadata()})
        for step in steps:
            if isinstance(step, Failure):
                if step.retry_after is not None:
                    context.set_trailing_metadata((("retry-after", step.retry_after),))
                context.abort(step.code, "as written")
            yield step


@contextmanager
def served(*calls: Iterable[Step]) -> Iterator[tuple[Script, str]]:
    script = Script([*calls])
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield script, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(LONG)


class Caller(Protocol):
    """Makes a client and calls one method; a stream's parts are returned as a list."""

    def __call__(self, address: str, method: str, *arguments: Any, **settings: Any) -> Any: ...


def in_threads(address: str, method: str, *arguments: Any, **settings: Any) -> Any:
    with Client(address, **{"retry": AT_ONCE, **settings}) as client:
        answer = getattr(client, method)(*arguments)
        return list(answer) if method == "stream" else answer


def in_a_loop(address: str, method: str, *arguments: Any, **settings: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(address, **{"retry": AT_ONCE, **settings}) as client:
            if method == "stream":
                return [part async for part in client.stream(*arguments)]
            return await getattr(client, method)(*arguments)

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("call", [in_threads, in_a_loop])


def refused(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.details() == "as written"
    return caught.value.code()


@both_clients
def test_calls_that_generate_nothing(call: Caller) -> None:
    with served([]) as (script, address):
        assert list(call(address, "tokenize", pb.TokenizeRequest(text="ab")).token_ids) == [97, 98]
        assert call(address, "detokenize", pb.DetokenizeRequest(token_ids=[97, 98])).text == "ab"
        assert [model.id for model in call(address, "list_models", api_key="secret").models] == ["m"]
        assert script.metadata[0]["authorization"] == "Bearer secret"
    with pytest.raises(grpc.RpcError) as caught:
        call(address, "list_models")
    assert caught.value.code() is UNAVAILABLE


@both_clients
def test_calls_are_repeated_with_one_seed(call: Caller) -> None:
    with served([Failure(UNAVAILABLE)], [Failure(EXHAUSTED, "0")], [USAGE]) as (script, address):
        assert call(address, "generate", REQUEST).usage == USAGE.usage
        first, *others = script.requests
        assert first.HasField("seed")
        assert others == [first, first]
        assert not REQUEST.HasField("seed")
        call(address, "generate", pb.GenerateRequest(text="a", seed=0))
        assert script.requests[-1].seed == 0


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize(
    ("failure", "attempts"),
    [
        (Failure(UNAVAILABLE), 4),
        (Failure(EXHAUSTED, "0"), 4),
        # Of a message that is too large, and of a limit that no waiting helps against.
        (Failure(EXHAUSTED), 1),
        (Failure(EXHAUSTED, "soon"), 1),
        (Failure(grpc.StatusCode.INVALID_ARGUMENT, "0"), 1),
        # Longer than the call may take.
        (Failure(UNAVAILABLE, "100000"), 1),
    ],
)
@both_clients
def test_calls_end_with_the_servers_own_error(call: Caller, method: str, failure: Failure, attempts: int) -> None:
    with served([failure]) as (script, address):
        assert refused(lambda: call(address, method, REQUEST, LONG)) is failure.code
        assert len(script.requests) == attempts


@pytest.mark.parametrize(("failure", "least"), [(Failure(UNAVAILABLE), 0.0), (Failure(EXHAUSTED, "3"), 3.0)])
def test_pauses_double_and_are_no_shorter_than_the_server_says(failure: Failure, least: float) -> None:
    with served([failure]) as (_, address), pytest.raises(grpc.RpcError) as caught:
        in_threads(address, "list_models", retry=RetryPolicy(attempts=1))
    attempts = Attempts(RetryPolicy(attempts=7, first_pause=1.0, longest_pause=10.0), None)
    for longest in (1, 2, 4, 8, 10, 10):
        pause = attempts.pause_after(caught.value)
        assert max(least, longest / 2) <= pause <= max(least, longest)
    with pytest.raises(grpc.RpcError):
        attempts.pause_after(caught.value)
    attempts.progressed()
    assert attempts.pause_after(caught.value) <= max(least, 1)


@both_clients
def test_a_broken_stream_goes_on(call: Caller) -> None:
    broken = [[*WHOLE[:length], Failure(UNAVAILABLE)] for length in range(len(WHOLE) + 1)]
    # More breaks than the policy allows in a row, but each after something new.
    with served(broken[1], broken[2], broken[3], WHOLE) as (script, address):
        assert call(address, "stream", REQUEST, retry=RetryPolicy(2, 0.001, 0.001)) == WHOLE
        assert len(script.requests) == 4
    with served(broken[2]) as (script, address):
        assert refused(lambda: call(address, "stream", REQUEST)) is UNAVAILABLE
        assert len(script.requests) == 4
    # The usage had come, so the output is whole.
    with served(broken[4]) as (script, address):
        assert call(address, "stream", REQUEST) == WHOLE
        assert len(script.requests) == 1


@both_clients
def test_a_stream_that_begins_otherwise_is_no_continuation(call: Caller) -> None:
    changed = pytest.raises(OutputChangedError, match="choice 0: the repeated call has tokens at 1 that differ")
    with served([part(1, 2), Failure(UNAVAILABLE)], [part(1), part(3)]) as (_, address), changed:
        call(address, "stream", REQUEST)
    with served(WHOLE[:3]) as (_, address), pytest.raises(IncompleteOutputError, match="without its usage"):
        call(address, "stream", REQUEST)


@both_clients
def test_leaving_a_stream_cancels_it(call: Caller) -> None:
    async def leave(address: str) -> None:
        async with AsyncClient(address) as client, aclosing(client.stream(REQUEST)) as parts:
            assert (await anext(parts)).choice.text == "0"

    with served(map(part, count())) as (script, address):
        if call is in_a_loop:
            asyncio.run(leave(address))
        else:
            with Client(address) as client, closing(client.stream(REQUEST)) as parts:
                assert next(parts).choice.text == "0"
        assert script.cancelled.wait(LONG)
        assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"attempts": 0}, "attempts is 0, must be at least 1"),
        ({"first_pause": 0.0}, "first_pause is 0.0, must be above 0"),
        ({"first_pause": 2.0, "longest_pause": 1.0}, "longest_pause is 1.0, must be at least first_pause, 2.0"),
    ],
)
def test_impossible_policies_are_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetryPolicy(**policy)


PLAIN = ("127.0.0.1:1", "localhost:1", "[::1]:1", "localhost", "dns:///localhost:1", "ipv4:127.9.9.9:1", "unix:/a")
BEYOND = (
    "192.0.2.1:1",
    "spool.example:1",
    "localhost.example:1",
    "[2001:db8::1]:1",
    "dns:///spool.example:1",
    "dns://127.0.0.1/spool.example:1",
    "ipv4:127.0.0.1:1,192.0.2.1:1",
    "127.0.0.1.example",
)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_key_does_not_leave_the_machine_in_clear(kind: Callable[..., Any]) -> None:
    async def make(address: str, **options: Any) -> None:
        """A client that is never connected."""
        client = kind(address, **options)
        closed = client.close()
        if closed is not None:
            await closed

    def made(address: str, **options: Any) -> None:
        asyncio.run(make(address, **options))

    for address in PLAIN:
        made(address, api_key="key")
    for address in BEYOND:
        made(address)
        made(address, api_key="key", insecure=True)
        made(address, api_key="key", credentials=grpc.ssl_channel_credentials())
        with pytest.raises(ValueError, match=r"is not encrypted: give credentials, .* or insecure=True"):
            made(address, api_key="key")
    for wrong in ("", " ", "two words", "schl\u00fcssel", "line\n"):
        with pytest.raises(ValueError, match="api_key must be printable ASCII without spaces"):
            made(PLAIN[0], api_key=wrong)
