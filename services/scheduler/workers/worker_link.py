"""The scheduler's connection to one worker: connects, streams steps, detects loss, connects again.

A draft worker gets only empty steps: they show that it lives, and which scheduler it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc
import grpc.aio

from spool.protos import worker_pb2, worker_pb2_grpc
from spool.scheduler.core import SchedulerCore
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import DraftGrant, DraftingReport, MoveKv, Role, RowResult, SendStep
from spool.services.observability.observer import StepTimings
from spool.services.rpc.backoff import Backoff, require_positive
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.conversion import from_wire
from spool.services.rpc.errors import rpc_details, rpc_reason
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.rpc.replies import readable
from spool.services.rpc.supervision import SupervisedTask, is_cancelled
from spool.services.rpc.worker_codec import (
    ROLES,
    opening_to_wire,
    report_from_wire,
    results_from_wire,
    spec_from_wire,
    step_to_wire,
)
from spool.services.scheduler.workers.draft_load import DraftLoad
from spool.services.scheduler.workers.pairing import PairingError, check_role, check_version

logger = logging.getLogger(__name__)

# What gRPC calls a connection that breaks.
_OF_CONNECTIONS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)

# The id of empty steps: the one that opens a stream, and those that ask for a sign of life. The core's ids are higher.
_EMPTY_STEP_ID = 0


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where a worker listens, and its expected role."""

    worker_id: str
    role: Role
    address: str


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Times in seconds. A worker that leaves a step unanswered for `step_timeout` counts as lost.

    So does a worker whose process leaves a ping of gRPC unanswered for `silence_timeout`, however long its step may
    take: the process was stopped, or its machine is gone.

    A worker that had no step for `ping_interval` gets an empty one, whose reply shows whether the worker hangs or
    belongs to another scheduler. Pauses between attempts to connect grow from `first_backoff` to `longest_backoff`.
    """

    connect_timeout: float = 10.0
    step_timeout: float = 60.0
    silence_timeout: float = 1.0
    first_backoff: float = 0.1
    longest_backoff: float = 5.0
    ping_interval: float = 1.0

    def __post_init__(self) -> None:
        require_positive(
            self,
            "connect_timeout",
            "step_timeout",
            "silence_timeout",
            "first_backoff",
            "longest_backoff",
            "ping_interval",
        )


class WorkerUnreachableError(SpoolError, ConnectionError):
    """The worker did not answer, or its answer broke the protocol."""


class _ConnectionBrokenError(WorkerUnreachableError):
    """The connection to the worker broke, which says nothing of the worker."""


class SchedulerFencedError(SpoolError, RuntimeError):
    """Another scheduler, with a higher epoch, has taken the worker over."""


class WorkerState(Enum):
    CONNECTING = "connecting"
    IN_USE = "in use"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LEAVING = "leaving"


class WorkerListener(Protocol):
    """Hears what happens to workers: the service. All calls come from the event loop and must not block."""

    @property
    def core(self) -> SchedulerCore: ...

    def worker_up(self, endpoint: WorkerEndpoint, description: worker_pb2.WorkerDescription) -> None: ...

    def worker_lost(self, endpoint: WorkerEndpoint, reason: str, blameless: bool) -> None:
        """`blameless`: what the worker computed is not the reason."""

    def step_replied(
        self,
        endpoint: WorkerEndpoint,
        step: SendStep,
        results: tuple[RowResult, ...],
        timings: StepTimings,
        drafting: DraftingReport | None,
    ) -> None:
        """`results` holds one entry for each row of the step, in their order."""

    def draft_registered(self, endpoint: WorkerEndpoint, seconds: float, busy_seconds: float) -> None:
        """Since it registered before, `seconds` ago, the draft worker has computed for `busy_seconds`."""

    def link_broken(self, endpoint: WorkerEndpoint, error: BaseException) -> None:
        """A link has ended for good, with SchedulerFencedError or an unexpected error."""


class LinkOwner(Protocol):
    """The workers of a scheduler, of which a link is one."""

    def check_admission(self, link: WorkerLink, description: worker_pb2.WorkerDescription) -> None:
        """Raises PairingError if the worker does not fit the others."""

    def take_epoch(self) -> int:
        """Above all before it."""

    def find(self, worker_id: str) -> WorkerLink | None:
        """The link of a worker that is up."""

    def went_up(self, link: WorkerLink) -> None: ...

    def went_down(self, link: WorkerLink, reason: str, blameless: bool) -> None: ...


class WorkerLink:
    """All that a scheduler knows of one worker, and the stream of its steps, which `run` keeps up.

    Each connection has a scheduler epoch of its own. So the worker refuses steps of a broken stream that still wait
    there, and drops the sequences that no step would release any more. A connection counts as up only when the worker
    has answered an empty step: a worker whose current step hangs still answers `Describe`.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        options: LinkOptions,
        owner: LinkOwner,
        listener: WorkerListener,
        security: ChannelSecurity,
    ) -> None:
        self.endpoint = endpoint
        self.description: worker_pb2.WorkerDescription | None = None
        """Of the start that was up last."""
        self.registered: worker_pb2.WorkerDescription | None = None
        """As the worker registered last; None for one that was added otherwise."""
        self.heard = self.tried = 0.0
        """When the worker registered last, and when a registration last cut a pause short."""
        self.silent = False
        """Whether the last sweep found that it is not in use and has not registered for long."""
        self.load = DraftLoad()
        """Of a draft worker that registers."""
        self.leaving: int | None = None
        """The epoch of the start that asked to be removed."""
        self.error: Exception | None = None
        """Why the link is not up; None while it is, and during the first attempt."""
        self.attempted = asyncio.Event()
        """Set once the first attempt has ended."""
        self.task: SupervisedTask | None = None
        self._options = options
        self._owner = owner
        self._listener = listener
        self._security = security
        self._channel = security.open_channel(endpoint.address, options.silence_timeout)
        self._metadata = security.metadata
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._outgoing: asyncio.Queue[SendStep] | None = None
        self._session_epoch = 0
        self._in_flight: OrderedDict[int, SendStep] = OrderedDict()
        self._deadline: asyncio.Timeout | None = None
        self._pinging = False
        self._unsendable: Exception | None = None
        self._hurry = asyncio.Event()

    @property
    def up(self) -> bool:
        return self._outgoing is not None

    @property
    def epoch(self) -> int | None:
        """Of the start that the link speaks to or, without one that is up, of the start that registered last."""
        description = self.description if self.up else self.registered
        return None if description is None else description.worker_epoch

    @property
    def state(self) -> WorkerState:
        if self.leaving is not None:
            return WorkerState.LEAVING
        if self.up:
            return WorkerState.UNREACHABLE if self._speaks_to_another_start else WorkerState.IN_USE
        if self.error is None:
            return WorkerState.CONNECTING
        return WorkerState.REFUSED if isinstance(self.error, PairingError) else WorkerState.UNREACHABLE

    @property
    def reason(self) -> str:
        """Why the worker is not in use; empty where it is."""
        if self.leaving is not None:
            return "it asked to be removed"
        if self._speaks_to_another_start:
            return "the scheduler speaks to another start of it"
        return "" if self.error is None else str(self.error)

    @property
    def _speaks_to_another_start(self) -> bool:
        return self.up and self.registered is not None and self.registered.worker_epoch != self.epoch

    async def describe(self) -> worker_pb2.WorkerDescription:
        """Raises WorkerUnreachableError, or PairingError for the wrong role or another version of the protocol."""
        endpoint = self.endpoint
        try:
            description = await self._ask()
        except grpc.aio.AioRpcError as error:
            name = f"worker {endpoint.worker_id} at {endpoint.address}"
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise PairingError(f"{name} refuses this scheduler: {rpc_details(error)}") from error
            raise WorkerUnreachableError(f"{name} does not answer: {rpc_reason(error)}") from error
        check_version(endpoint.worker_id, description, SPOKEN)
        check_role(endpoint.worker_id, ROLES.to_wire(endpoint.role), description)
        try:
            spec_from_wire(endpoint.worker_id, description)
        except ValueError as error:
            raise WorkerUnreachableError(f"worker {endpoint.worker_id} describes itself wrongly: {error}") from error
        return description

    async def run(self) -> None:
        """Keeps the link up until cancelled. Raises SchedulerFencedError."""
        backoff = Backoff(self._options.first_backoff, self._options.longest_backoff, self._hurry)
        try:
            while True:
                try:
                    description = await self.describe()
                    self._owner.check_admission(self, description)
                    await self._session(description)
                except WorkerUnreachableError as error:
                    self._note(error)
                    if self.up:
                        blameless = isinstance(error, _ConnectionBrokenError) and await self._suspect_is_innocent()
                        backoff.reset()
                        self._outgoing = None
                        self._in_flight.clear()
                        self._owner.went_down(self, str(error), blameless)
                    await self._reopen_channel()
                except PairingError as error:
                    self._note(error)
                    backoff.use_longest()
                await backoff.pause()
        finally:
            self._outgoing = None

    def _note(self, error: Exception) -> None:
        """The attempt has failed, or the link is down."""
        if str(error) != str(self.error):
            logger.log(logging.ERROR if isinstance(error, PairingError) else logging.WARNING, "%s", error)
        self.error = error
        self.attempted.set()

    async def _suspect_is_innocent(self) -> bool:
        """After the connection broke: whether the worker computes a suspect, and lives.

        Only a suspect is worth the wait: all others go elsewhere at once, whatever became of the worker.
        """
        if self.description is None or not self._listener.core.has_suspect(self.endpoint.worker_id):
            return False
        try:
            async with asyncio.timeout(self._options.silence_timeout):
                while True:
                    try:
                        return (await self._ask()).worker_epoch == self.description.worker_epoch
                    except grpc.aio.AioRpcError as error:
                        # The call may have gone out on the connection that is about to break.
                        logger.info("worker %s does not answer: %s", self.endpoint.worker_id, rpc_reason(error))
                        await asyncio.sleep(self._options.first_backoff)
        except TimeoutError:
            return False

    async def _ask(self) -> worker_pb2.WorkerDescription:
        """Raises AioRpcError."""
        description: worker_pb2.WorkerDescription | None = await self._stub.Describe(
            worker_pb2.DescribeRequest(protocol_version=SPOKEN.newest, oldest_protocol_version=SPOKEN.oldest),
            timeout=self._options.connect_timeout,
            wait_for_ready=True,
            metadata=self._metadata,
        )
        return readable(description)

    def retry_now(self) -> None:
        """Ends the pause before the next attempt; no effect on a link that is up."""
        self._hurry.set()

    def send(self, step: SendStep) -> None:
        """Queues a step for sending. A link that is down ignores the step: its loss is or soon will be reported."""
        if self._outgoing is None:
            return
        self._in_flight[step.step_id] = step
        self._outgoing.put_nowait(step)
        if len(self._in_flight) == 1:
            self._expect_reply()

    async def import_kv(self, move: MoveKv, source: WorkerLink, timeout_seconds: float) -> worker_pb2.ImportKvReply:
        """Has this worker fetch the KV of a sequence from another one. Raises WorkerUnreachableError."""
        if self.description is None or source.description is None or not (self.up and source.up):
            raise WorkerUnreachableError(f"worker {self.endpoint.worker_id} or {source.endpoint.worker_id} is not up")
        request = worker_pb2.ImportKvRequest(
            worker_epoch=self.description.worker_epoch,
            scheduler_epoch=self._session_epoch,
            sequence_id=move.opening.sequence_id,
            tokens=move.tokens,
            parameters=opening_to_wire(move.opening),
            source_address=source.endpoint.address,
            source_worker_epoch=source.description.worker_epoch,
            source_scheduler_epoch=source._session_epoch,
        )
        try:
            reply: worker_pb2.ImportKvReply = readable(
                await self._stub.ImportKv(request, timeout=timeout_seconds, metadata=self._metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise WorkerUnreachableError(f"worker {self.endpoint.worker_id}: {rpc_reason(error)}") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise WorkerUnreachableError(f"worker {self.endpoint.worker_id}: its connection was closed") from None
        return reply

    async def dismiss(self) -> None:
        """Tells the worker to drop every sequence; to be called after `run` was cancelled.

        A worker that cannot be reached has dropped them, or drops them for its next scheduler.
        """
        if self.description is None:
            return
        opening = worker_pb2.StepRequest(
            worker_epoch=self.description.worker_epoch,
            step_id=_EMPTY_STEP_ID,
            scheduler_epoch=self._owner.take_epoch(),
        )
        try:
            limit = self._options.connect_timeout
            async for _ in self._stub.Steps(iter([opening]), timeout=limit, metadata=self._metadata):
                return
        except grpc.aio.AioRpcError as error:
            logger.info("worker %s did not hear that it is dismissed: %s", self.endpoint.worker_id, rpc_reason(error))

    async def close(self) -> None:
        await self._channel.close(None)

    async def _reopen_channel(self) -> None:
        """A channel connects again with the certificate that it was opened with, which may have expired since."""
        if not self._security.tls:
            return
        try:
            channel = self._security.open_channel(self.endpoint.address, self._options.silence_timeout)
        except OSError as error:
            logger.warning("worker %s: no channel with the present certificate: %s", self.endpoint.worker_id, error)
            return
        before, self._channel = self._channel, channel
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        await before.close(None)

    async def _session(self, description: worker_pb2.WorkerDescription) -> None:
        """Runs one stream to its end. Always raises WorkerUnreachableError or SchedulerFencedError."""
        outgoing: asyncio.Queue[SendStep] = asyncio.Queue()
        self._pinging = False
        self._unsendable = None
        self._session_epoch = self._owner.take_epoch()
        call = self._stub.Steps(
            self._requests(outgoing, description.worker_epoch, self._session_epoch), metadata=self._metadata
        )
        try:
            async with asyncio.timeout(self._options.step_timeout) as self._deadline:
                async for reply in call:
                    self._check_reply(readable(reply))
                    if not self.up:
                        self._open(outgoing, description)
                    else:
                        self._take(reply)
                    self._expect_reply()
            raise self._unreachable("it ended the stream")
        except TimeoutError:
            step_id = next(iter(self._in_flight), _EMPTY_STEP_ID)
            raise self._unreachable(f"no reply to step {step_id} within {self._options.step_timeout:g} s") from None
        except grpc.aio.AioRpcError as error:
            kind = _ConnectionBrokenError if error.code() in _OF_CONNECTIONS else WorkerUnreachableError
            raise kind(self._lost_because(rpc_reason(error))) from error
        except asyncio.InvalidStateError as error:
            raise _ConnectionBrokenError(self._lost_because(f"the stream broke: {error}")) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            if self._unsendable is not None:
                raise self._unreachable(f"a step cannot be sent: {self._unsendable!r}") from None
            raise _ConnectionBrokenError(self._lost_because("the stream was cancelled")) from None
        finally:
            self._deadline = None
            call.cancel()

    async def _requests(
        self, outgoing: asyncio.Queue[SendStep], worker_epoch: int, scheduler_epoch: int
    ) -> AsyncIterator[worker_pb2.StepRequest]:
        empty = worker_pb2.StepRequest(
            worker_epoch=worker_epoch, step_id=_EMPTY_STEP_ID, scheduler_epoch=scheduler_epoch
        )
        yield empty
        while True:
            try:
                async with asyncio.timeout(self._options.ping_interval):
                    step = await outgoing.get()
            except TimeoutError:
                if self.up and not self._in_flight and not self._pinging:
                    self._pinging = True
                    self._expect_reply()
                    yield empty
            else:
                try:
                    grant = None if step.grant is None else self._granted(step.grant, scheduler_epoch)
                    request = step_to_wire(step, worker_epoch, scheduler_epoch, grant)
                except Exception as error:
                    self._unsendable = error
                    raise
                yield request

    def _granted(self, grant: DraftGrant, scheduler_epoch: int) -> worker_pb2.DraftGrant | None:
        """The grant as the worker gets it; None for a draft worker that is not up."""
        draft = self._owner.find(grant.draft_id)
        if draft is None or draft.description is None:
            return None
        return worker_pb2.DraftGrant(
            address=draft.endpoint.address,
            draft_epoch=draft.description.worker_epoch,
            scheduler_epoch=scheduler_epoch,
            number=grant.number,
            target_id=self.endpoint.worker_id,
        )

    def _open(self, outgoing: asyncio.Queue[SendStep], description: worker_pb2.WorkerDescription) -> None:
        # Other workers may have come up since the check before the connection was made.
        self._owner.check_admission(self, description)
        self._hurry.clear()
        self.error = None
        self._outgoing = outgoing
        self.description = description
        self.attempted.set()
        self._owner.went_up(self)

    def _check_reply(self, reply: worker_pb2.StepReply) -> None:
        if reply.status == worker_pb2.STEP_STATUS_FENCED:
            raise SchedulerFencedError(f"worker {self.endpoint.worker_id}: {reply.error}")
        # INVALID ends the stream too, for a step out of order: failing its rows would fail sequences that did no wrong
        # and leave what it was to release.
        if reply.status != worker_pb2.STEP_STATUS_OK:
            raise self._unreachable(f"it refused step {reply.step_id}: {reply.error or f'status {reply.status}'}")

    def _take(self, reply: worker_pb2.StepReply) -> None:
        if reply.step_id == _EMPTY_STEP_ID and self._pinging:
            self._pinging = False
            return
        step = self._in_flight.pop(reply.step_id, None)
        if step is None:
            raise self._unreachable(f"it answered step {reply.step_id}, which awaits no answer")
        try:
            results = results_from_wire(step, reply)
        except ValueError as error:
            raise self._unreachable(f"reply to step {reply.step_id}: {error}") from error
        drafting = report_from_wire(reply.drafting) if reply.HasField("drafting") else None
        self._listener.step_replied(self.endpoint, step, results, from_wire(StepTimings, reply.timings), drafting)

    def _expect_reply(self) -> None:
        """Moves the deadline: each step has the whole time, from the moment at which the worker could start on it."""
        if self._deadline is not None and not self._deadline.expired():
            now = asyncio.get_running_loop().time()
            waiting = self._in_flight or self._pinging
            self._deadline.reschedule(now + self._options.step_timeout if waiting else None)

    def _unreachable(self, reason: str) -> WorkerUnreachableError:
        return WorkerUnreachableError(self._lost_because(reason))

    def _lost_because(self, reason: str) -> str:
        return f"worker {self.endpoint.worker_id} at {self.endpoint.address} is lost: {reason}"
