"""What a worker owes those that call it: judged by what one start of a worker read and wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from zlib import crc32

from spool.protos import scheduler_pb2, worker_pb2
from tests.sim.audit.books import KvBook, digest_of
from tests.sim.audit.proposals import ProposalAudit

_OK, _WRONG, _FENCED, _INVALID = (
    worker_pb2.STEP_STATUS_OK,
    worker_pb2.STEP_STATUS_WRONG_EPOCH,
    worker_pb2.STEP_STATUS_FENCED,
    worker_pb2.STEP_STATUS_INVALID,
)


class _Fetch:
    """What came of the KV of a sequence that is on its way to the worker."""

    def __init__(self, wanted: worker_pb2.ExportKvRequest) -> None:
        self.wanted = wanted
        self.header: worker_pb2.KvHeader | None = None
        self.pages = 0
        self.damaged = False

    def take(self, part: worker_pb2.KvPart) -> None:
        if part.HasField("header"):
            self.header = part.header
            return
        self.damaged |= part.page.index != self.pages or crc32(part.page.data) != part.page.checksum
        self.pages += 1


class WorkerAudit:
    """One start of a worker. `problem` is told of what breaks a rule."""

    def __init__(self, name: str, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self.book = KvBook()
        self.proposals = ProposalAudit(self._problem)
        self._name = name
        self._clock = clock
        self._tell = problem
        self._epoch = 0
        self._description: worker_pb2.WorkerDescription | None = None
        # By call, in the order in which they were read.
        self._unanswered: dict[Any, deque[worker_pb2.StepRequest]] = {}
        self._highest = self._highest_read = 0
        self._raised_at = 0.0
        self._last_step = 0
        self._answers: dict[int, worker_pb2.StepReply] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._imports: dict[Any, worker_pb2.ImportKvRequest] = {}
        self._had_import = False
        self._exported: dict[Any, int] = {}

    def _problem(self, text: str) -> None:
        self._tell(f"{self._name}: {text}")

    # Steps.

    def read_step(self, call: Any, request: worker_pb2.StepRequest) -> None:
        self._unanswered.setdefault(call, deque()).append(request)
        self.proposals.asked(request)
        if self._description is None or request.worker_epoch == self._description.worker_epoch:
            self._highest_read = max(self._highest_read, request.scheduler_epoch)

    def wrote_reply(self, call: Any, reply: worker_pb2.StepReply) -> None:
        waiting = self._unanswered.get(call)
        if not waiting:
            self._problem(f"step {reply.step_id} is answered, and was not asked for")
            return
        request = waiting.popleft()
        if reply.step_id != request.step_id:
            self._problem(f"step {reply.step_id} is answered before step {request.step_id}, which came first")
        self._check_epoch(reply.worker_epoch)
        step = f"step {request.step_id} of epoch {request.scheduler_epoch}"
        if (reply.status == _WRONG) != (request.worker_epoch != reply.worker_epoch):
            self._problem(f"{step} is for epoch {request.worker_epoch} of the worker, its status is {reply.status}")
        if reply.status == _WRONG:
            return
        if request.scheduler_epoch < self._highest:
            if reply.status != _FENCED:
                self._problem(f"{step} is answered with status {reply.status}, epoch {self._highest} has spoken")
            return
        if reply.status == _FENCED:
            if request.scheduler_epoch >= self._highest_read:
                self._problem(f"{step} is fenced off, no higher epoch has spoken")
            return
        if request.scheduler_epoch > self._highest:
            self._highest, self._raised_at = request.scheduler_epoch, self._clock()
            self.book = KvBook()
            self._answers.clear()
            self._last_step = 0
        self._check_turn(step, request, reply)

    def _check_turn(self, step: str, request: worker_pb2.StepRequest, reply: worker_pb2.StepReply) -> None:
        if not request.step_id and not request.rows and not request.released_sequence_ids:
            if len(reply.rows.counts) or reply.status not in (_OK, _INVALID):
                self._problem(f"{step}, which is empty, is answered with rows or status {reply.status}")
            return
        first = self._answers.get(request.step_id)
        if first is not None:
            if reply is not first and reply.status == _OK and reply != first:
                self._problem(f"{step} comes again, and has another answer than the first one")
            return
        if reply.status != _OK:
            return
        if request.step_id <= self._last_step:
            self._problem(f"{step} is executed after step {self._last_step}")
        self._last_step = request.step_id
        self._answers[request.step_id] = reply
        problem = self.book.settle(request, reply, self.proposals.verified)
        if problem is not None:
            self._problem(f"{step}: {problem}")
        description = self._description
        if description is not None and not (self.book.sequences() or self._had_import):
            missing = description.total_pages - reply.free_pages
            if missing:
                self._problem(f"{step}: {missing} pages are not free, and no sequence has KV")

    def _check_epoch(self, worker_epoch: int) -> None:
        if self._epoch and worker_epoch != self._epoch:
            self._problem(f"calls its epoch {worker_epoch}, and before that {self._epoch}")
        self._epoch = worker_epoch

    # What it says of itself.

    def described(self, description: worker_pb2.WorkerDescription) -> None:
        self._check_epoch(description.worker_epoch)
        self._description = self.proposals.description = description

    def registers(self, request: scheduler_pb2.RegisterRequest) -> None:
        self.described(request.description)
        known = request.highest_scheduler_epoch
        if not self._highest <= known <= max(self._highest, self._highest_read):
            self._problem(f"says that epoch {known} is the highest that spoke, it was {self._highest}")

    # KV that moves.

    def wants_kv(self, request: worker_pb2.ExportKvRequest) -> None:
        """From another worker."""
        self._fetches[request.sequence_id] = _Fetch(request)
        wanted = (request.kv_len, request.prefix_digest)
        for asked in self._imports.values():
            if asked.sequence_id == request.sequence_id and (
                (len(asked.tokens), digest_of(asked.tokens)) == wanted
                and asked.source_worker_epoch == request.worker_epoch
                and asked.source_scheduler_epoch == request.scheduler_epoch
            ):
                return
        self._problem(f"fetches KV of sequence {request.sequence_id} other than it was told to")

    def read_kv(self, part: worker_pb2.KvPart, request: worker_pb2.ExportKvRequest) -> None:
        fetch = self._fetches.get(request.sequence_id)
        if fetch is not None and fetch.wanted is request:
            fetch.take(part)

    def asked_to_import(self, call: Any, request: worker_pb2.ImportKvRequest) -> None:
        self._imports[call] = request
        self.proposals.opened(request.sequence_id, request.parameters)
        self._had_import = True

    def has_imported(self, call: Any) -> None:
        """It says that the sequence is its own now."""
        request = self._imports.pop(call)
        what = f"sequence {request.sequence_id} is taken in"
        if request.worker_epoch != self._epoch or self._outdated(request.scheduler_epoch):
            self._problem(f"{what} for epochs {request.worker_epoch} and {request.scheduler_epoch}")
        fetch = self._fetches.get(request.sequence_id)
        pages = 0 if self._description is None else _kept_pages(self._description, len(request.tokens))
        if fetch is None or fetch.header is None or fetch.header.pages != pages or fetch.pages != pages:
            came = 0 if fetch is None else fetch.pages
            self._problem(f"{what} with {came} pages of KV, there are {pages}")
        elif fetch.damaged:
            self._problem(f"{what} with a page that is damaged or out of its place")
        elif self._description is not None and fetch.header.model_id != self._description.model_id:
            self._problem(f"{what} with KV of model {fetch.header.model_id}")
        if request.scheduler_epoch == self._highest:
            self.book.take_in(request)

    def import_ended(self, call: Any) -> None:
        self._imports.pop(call, None)

    def gives_kv(self, call: Any, request: worker_pb2.ExportKvRequest, part: worker_pb2.KvPart) -> None:
        what = f"gives KV of sequence {request.sequence_id}"
        if request.worker_epoch != self._epoch or self._outdated(request.scheduler_epoch):
            self._problem(f"{what} to epochs {request.worker_epoch} and {request.scheduler_epoch}")
        place = self._exported.get(call, -1)
        self._exported[call] = place + 1
        if part.HasField("header"):
            has = self.book.digest(request.sequence_id, request.kv_len)
            current = request.scheduler_epoch == self._highest
            if current and (self.book.kv_len(request.sequence_id), has) != (request.kv_len, request.prefix_digest):
                self._problem(f"{what}, and has {self.book.kv_len(request.sequence_id)} positions, or other ones")
        elif part.page.index != place:
            self._problem(f"{what}: page {part.page.index} goes out in the place of page {place}")

    def _outdated(self, epoch: int) -> bool:
        """Whether another epoch has had the worker for some time; what was made before that may still go out."""
        return epoch > self._highest or (epoch < self._highest and self._raised_at < self._clock())


def _kept_pages(description: worker_pb2.WorkerDescription, length: int) -> int:
    """Those that the layers of a sequence of that length still need."""
    pages = 0
    for span, window in zip(description.page_spans, description.page_windows, strict=True):
        pages += -(-length // span) - (max(0, length - window + 1) // span if window else 0)
    return pages
