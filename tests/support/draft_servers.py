"""Draft workers on threads of their own, real and scripted, and a target that plays verdicts to a proposer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Self

import grpc

from spool.engine.drafting.model_drafting import Draft
from spool.engine.drafting.proposer import Asked, Proposer
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.kv.pages import PageTable
from spool.engine.steps import RowOutcome, VerifyRow
from spool.protos import draft_pb2, worker_pb2
from spool.scheduler.sampling import SamplingParameters
from spool.scheduler.state.digests import DigestedTokens
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.worker.base_server import step_thread
from spool.services.worker.drafting.server import DraftServer


@dataclass
class RunningDraft:
    server: DraftServer
    draft: Draft
    address: str
    loop: asyncio.AbstractEventLoop
    ahead: bool

    def grant(self, number: int = 1, target_id: str = "target-0", scheduler_epoch: int = 1) -> worker_pb2.DraftGrant:
        return worker_pb2.DraftGrant(
            address=self.address,
            draft_epoch=self.server.worker_epoch,
            scheduler_epoch=scheduler_epoch,
            number=number,
            target_id=target_id,
        )


@contextmanager
def running_draft(
    load: Callable[[], Draft],
    port: int = 0,
    security: ChannelSecurity | None = None,
    prefix_cache: bool = True,
    ahead: bool = False,
) -> Iterator[RunningDraft]:
    """`load` runs on the thread that computes."""
    started: list[RunningDraft | BaseException] = []
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(end.set))
        thread = step_thread()
        draft = await asyncio.wrap_future(thread.submit(load))
        server = DraftServer(draft, prefix_cache, port=port, thread=thread, security=security, ahead=ahead)
        started.append(RunningDraft(server, draft, await server.start(), loop, ahead))
        ready.set()
        await end.wait()
        await server.stop(0)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            started.append(error)
            ready.set()
            raise

    thread = threading.Thread(target=run, name="draft-server")
    thread.start()
    ready.wait()
    try:
        running = started[0]
        if isinstance(running, BaseException):
            raise running
        yield running
    finally:
        stop[0]()
        thread.join()


@dataclass(eq=False)
class PlayedSequence:
    """A sequence of a target that commits what the test says. All of `tokens` but the last are in its history."""

    sequence_id: int
    prompt: Sequence[int]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    cache_scope: bytes = b""

    def __post_init__(self) -> None:
        self.drafting = SequenceDrafting(self.sequence_id, self.cache_scope)
        self.tokens = DigestedTokens(self.prompt)

    @property
    def digest(self) -> int:
        return self.tokens.digest(len(self.tokens))

    def commit(self, *tokens: int) -> None:
        self.tokens.extend(tokens)

    def verdict(self, draft_length: int) -> tuple[VerifyRow, RowOutcome, int]:
        """After a step that sampled the last of the tokens, or, where there is only the prompt, fed it."""
        sampled = self.tokens.tokens[-1:] if len(self.tokens) > len(self.prompt) else []
        history = self.tokens.tokens[: len(self.tokens) - len(sampled)]
        row = VerifyRow(PageTable(), (), (), bool(sampled), history, len(self.prompt), self.sampling)
        row.draft_length, row.drafting = draft_length, self.drafting
        return row, RowOutcome(sampled), self.digest


def offer(proposer: Proposer, sequences: Sequence[PlayedSequence], draft_length: int) -> None:
    rows, outcomes, digests = zip(*(one.verdict(draft_length) for one in sequences), strict=True)
    proposer.offer(rows, outcomes, digests)


def take(
    proposer: Proposer, sequences: Sequence[PlayedSequence], most: int, wait_seconds: float = 0.0
) -> list[list[int]]:
    asked = [Asked(one.drafting, one.digest, most) for one in sequences]
    return [list(proposal) for proposal in proposer.take(asked, wait_seconds)]


Answered = Iterator[draft_pb2.Proposals | bytes]


class ScriptedDrafter:
    """A draft worker that lets every target in and answers each request as `script` says: messages, bytes in place of
    them, or an exception that ends the stream. `requests` are those that came, openings of streams included."""

    def __init__(self, script: Callable[[draft_pb2.DraftRequest], Answered]) -> None:
        self.script = script
        self.requests: SimpleQueue[draft_pb2.DraftRequest] = SimpleQueue()

    def grant(self, number: int = 1) -> worker_pb2.DraftGrant:
        return worker_pb2.DraftGrant(address=self.address, draft_epoch=1, number=number, target_id="target-0")

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(4)
        self._server = grpc.server(self._threads)
        handler = grpc.stream_stream_rpc_method_handler(
            self._propose,
            draft_pb2.DraftRequest.FromString,
            lambda answer: answer if isinstance(answer, bytes) else answer.SerializeToString(),
        )
        service = grpc.method_handlers_generic_handler("spool.draft.v1.Drafter", {"Propose": handler})
        self._server.add_generic_rpc_handlers((service,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()
        self._threads.shutdown(wait=False)

    def _propose(self, requests: Iterator[draft_pb2.DraftRequest], context: grpc.ServicerContext) -> Answered:
        context.send_initial_metadata(())
        for request in requests:
            self.requests.put(request)
            yield from self.script(request)


def answer_of(
    request: draft_pb2.DraftRequest, tokens: Callable[[int, int], Sequence[int]] = lambda sequence_id, most: (1,) * most
) -> draft_pb2.Proposals:
    """What a healthy draft that proposes `tokens` answers."""
    proposed = [tokens(*one) for one in zip(request.sequence_ids, request.draft_lengths, strict=True)]
    return draft_pb2.Proposals(
        sequence_ids=request.sequence_ids,
        digests=request.digests,
        counts=[len(one) for one in proposed],
        tokens=[token for one in proposed for token in one],
    )
