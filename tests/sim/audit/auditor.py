"""Judges a cell by its messages alone, as docs/protocol.md says what they must be.

It knows nothing of the code that runs: only the generated messages, who wrote them, who read them, and when, and what
passes of targets verify. Each process is judged by what it could know: a worker's answer by the steps that it had read
by then, a scheduler's step by the answers that had come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from spool.protos import scheduler_pb2, worker_pb2
from tests.sim.audit.proposals import DraftAudit
from tests.sim.audit.scheduler import SchedulerAudit
from tests.sim.audit.sessions import GatewayAudit
from tests.sim.audit.worker import WorkerAudit

T = TypeVar("T")

_SESSION, _IMPORT = "/spool.scheduler.v1.Scheduler/Session", "/spool.worker.v1.Worker/ImportKv"
_PROPOSE = "/spool.draft.v1.Drafter/Propose"


class Party(Hashable, Protocol):
    """One start of a process."""

    name: str


class Auditor:
    """Listens to all calls (tests/sim/cell/rpc/network.py). `problem` is told of every broken rule, in words."""

    def __init__(self, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self._clock = clock
        self._problem = lambda text: problem(f"audit: {text}")
        self._workers: dict[Any, WorkerAudit] = {}
        self._schedulers: dict[Any, SchedulerAudit] = {}
        self._gateways: dict[Any, GatewayAudit] = {}
        self._drafts: dict[Any, DraftAudit] = {}
        # Of calls with one request.
        self._requests: dict[Any, Any] = {}

    def wrote(self, call: Any, by_client: bool, message: Any) -> None:
        match call.method:
            case "/spool.worker.v1.Worker/Steps":
                if by_client:
                    self._scheduler(call.client).wrote_step(call, message)
                else:
                    self._worker(call.server).wrote_reply(call, message)
            case "/spool.scheduler.v1.Scheduler/Session":
                if by_client:
                    self._gateway(call.client).wrote(call, message)
                else:
                    self._scheduler(call.server).sessions.wrote(call, message)
            case "/spool.draft.v1.Drafter/Propose":
                if by_client:
                    self._worker(call.client).proposals.asks(call, message)
                else:
                    self._draft(call.server).answers(call, message)
            case _ if by_client:
                self._requests[call] = message
                self._asked(call, message)
            case _:
                self._answered(call, message)

    def read(self, call: Any, by_client: bool, message: Any) -> None:
        match call.method:
            case "/spool.worker.v1.Worker/Steps":
                if by_client:
                    self._scheduler(call.client).read_reply(call, message)
                else:
                    self._worker(call.server).read_step(call, message)
            case "/spool.scheduler.v1.Scheduler/Session":
                if by_client:
                    self._gateway(call.client).read(call, message)
                else:
                    self._scheduler(call.server).sessions.read(call, message)
            case "/spool.draft.v1.Drafter/Propose":
                if by_client:
                    self._worker(call.client).proposals.hears(message)
                else:
                    self._draft(call.server).reads(call, message)
            case "/spool.worker.v1.Worker/ImportKv":
                if by_client:
                    self._scheduler(call.client).moved_kv(call, self._requests[call])
                else:
                    self._worker(call.server).asked_to_import(call, message)
            case "/spool.worker.v1.Worker/ExportKv" if by_client:
                self._worker(call.client).read_kv(message, self._requests[call])

    def computes(self, process: Party, sequence_id: int, history: Sequence[int], drafted: Sequence[int]) -> None:
        """A pass of the target verifies `drafted` behind the history."""
        self._worker(process).proposals.computes(sequence_id, history, drafted)

    def admitted(self, call: Any) -> None:
        """The server has let the client in."""
        if call.method == _PROPOSE:
            self._draft(call.server).admits(call)

    def served(self, call: Any) -> None:
        """The server's end of a call is over."""
        if call.method == _SESSION:
            self._scheduler(call.server).sessions.ended(call)
        elif call.method == _IMPORT:
            self._worker(call.server).import_ended(call)

    def check_end(self, alive: Iterable[Party]) -> None:
        """Once all sequences have ended: no living worker has KV of any."""
        for process in alive:
            audit = self._workers.get(process)
            left = audit.book.sequences() if audit is not None else []
            if left:
                self._problem(f"{process.name} was not told to release sequences {left}")

    def _asked(self, call: Any, message: Any) -> None:
        match message:
            case worker_pb2.ImportKvRequest():
                self._scheduler(call.client).moves_kv(call, message)
            case worker_pb2.ExportKvRequest():
                self._worker(call.client).wants_kv(message)
            case scheduler_pb2.RegisterRequest():
                self._worker(call.client).registers(message)

    def _answered(self, call: Any, message: Any) -> None:
        request = self._requests[call]
        match message:
            case worker_pb2.ImportKvReply():
                self._worker(call.server).has_imported(call)
            case worker_pb2.KvPart():
                self._worker(call.server).gives_kv(call, request, message)
            case worker_pb2.WorkerDescription():
                self._worker(call.server).described(message)
                self._draft(call.server).described(message)
                if request.protocol_version != message.protocol_version:
                    self._problem(f"{call.server.name} answers a scheduler of version {request.protocol_version}")
            case scheduler_pb2.RegisterReply():
                self._scheduler(call.server).registered(request, message)
            case scheduler_pb2.DeregisterReply():
                self._scheduler(call.server).deregistered(request)

    def _worker(self, process: Party) -> WorkerAudit:
        return self._known(self._workers, WorkerAudit, process)

    def _scheduler(self, process: Party) -> SchedulerAudit:
        return self._known(self._schedulers, SchedulerAudit, process)

    def _gateway(self, process: Party) -> GatewayAudit:
        return self._known(self._gateways, GatewayAudit, process)

    def _draft(self, process: Party) -> DraftAudit:
        return self._known(self._drafts, DraftAudit, process)

    def _known(self, known: dict[Any, T], kind: Callable[..., T], process: Party) -> T:
        audit = known.get(process)
        if audit is None:
            audit = known[process] = kind(process.name, self._clock, self._problem)
        return audit
