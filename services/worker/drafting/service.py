"""The Drafter service of a draft worker: who may have proposals, and what goes in and out on each stream."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import grpc.aio

from spool.protos import draft_pb2, draft_pb2_grpc, worker_pb2
from spool.services.rpc.protocol_version import SPOKEN, version_conflict
from spool.services.worker.drafting.batcher import Batcher
from spool.services.worker.drafting.frame_listener import FrameListener
from spool.services.worker.drafting.frames import FRAMES_METADATA_KEY, frame_of
from spool.services.worker.drafting.limits import MAX_STREAMS, BadMessageError, check_at_most
from spool.services.worker.drafting.messages import verdicts_from_wire
from spool.services.worker.drafting.target_stream import TargetStream

logger = logging.getLogger(__name__)

_OPENING_SECONDS = 10.0
_MAX_TARGET_ID = 256
_REMEMBERED_GRANTS = 4096
"""Of targets without a stream; those seen longest ago are forgotten first."""


class DrafterService(draft_pb2_grpc.DrafterServicer):
    """Lets a target in whose grant is for this start of the worker and not replaced by a later one; a target has one
    stream. `draining` lets none in any more."""

    def __init__(self, batcher: Batcher, worker_epoch: int, vocabulary_size: int) -> None:
        self._batcher = batcher
        self._worker_epoch = worker_epoch
        self._vocabulary_size = vocabulary_size
        self._streams: dict[str, TargetStream] = {}
        self._grants: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._frames: FrameListener | None = None
        self.draining = False

    async def listen(self, host: str) -> None:
        """Offers connections for frames to targets from now on. Raises OSError."""
        self._frames = FrameListener(self._read)
        await self._frames.start(host)

    @property
    def streams(self) -> int:
        return len(self._streams)

    def dismiss(self) -> None:
        """Ends all streams and lets none in any more. Targets that still asked go on without."""
        self.draining = True
        for stream in [*self._streams.values()]:
            stream.end(BadMessageError("the draft worker is leaving", "UNAVAILABLE"))
        if self._frames is not None:
            self._frames.stop()

    async def Propose(  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.Proposals]:
        try:
            stream = await self._admitted(request_iterator)
        except BadMessageError as error:
            await context.abort(grpc.StatusCode[error.code], str(error))
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            offered = () if self._frames is None else ((FRAMES_METADATA_KEY, self._frames.offer(stream)),)
            await context.send_initial_metadata(offered)
            while (proposals := await stream.answer()) is not None:
                if stream.frames is None:
                    yield proposals
                else:
                    stream.frames.write(frame_of(proposals))
                    with suppress(OSError):  # whoever reads from it ends the stream
                        await stream.frames.drain()
            if stream.refusal is not None:
                logger.warning("target %s gets no more proposals: %s", stream.target_id, stream.refusal)
                await context.abort(grpc.StatusCode[stream.refusal.code], str(stream.refusal))
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.result()
        finally:
            reader.cancel()
            stream.end(None)
            if stream.frames is not None:
                stream.frames.close()

    def _free(self, stream: TargetStream) -> None:
        """The stream has ended."""
        self._batcher.close(stream)
        if self._frames is not None:
            self._frames.withdraw(stream)
        if self._streams.get(stream.target_id) is stream:
            del self._streams[stream.target_id]

    async def _admitted(self, requests: AsyncIterator[draft_pb2.DraftRequest]) -> TargetStream:
        """The stream that the first message opens; an earlier one of the target ends. Raises BadMessageError."""
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise BadMessageError(f"no opening came within {_OPENING_SECONDS:g} s", "DEADLINE_EXCEEDED") from None
        if first is None or not first.HasField("opening"):
            raise BadMessageError("opening is absent, must be in the first message of a stream")
        grant = first.opening.grant
        conflict = version_conflict("the target", first.opening, "this draft worker", SPOKEN)
        if conflict is not None:
            raise BadMessageError(conflict, "FAILED_PRECONDITION")
        if self.draining:
            raise BadMessageError("the draft worker is draining and takes no targets", "UNAVAILABLE")
        self._check(grant)
        target_id = grant.target_id
        earlier = self._streams.get(target_id)
        if earlier is None:
            check_at_most("the number of streams", len(self._streams) + 1, MAX_STREAMS, "RESOURCE_EXHAUSTED")
        else:
            earlier.end(BadMessageError(f"target_id {target_id!r} has opened another stream", "FAILED_PRECONDITION"))
        self._grants[target_id] = (grant.scheduler_epoch, grant.number)
        self._grants.move_to_end(target_id)
        while len(self._grants) > _REMEMBERED_GRANTS:
            self._grants.popitem(last=False)
        self._streams[target_id] = TargetStream(target_id, self._free)
        return self._streams[target_id]

    def _check(self, grant: worker_pb2.DraftGrant) -> None:
        """Raises BadMessageError for a grant that does not hold."""
        if not 0 < len(grant.target_id) <= _MAX_TARGET_ID:
            raise BadMessageError(f"target_id has {len(grant.target_id)} characters, must have 1 to {_MAX_TARGET_ID}")
        if grant.draft_epoch != self._worker_epoch:
            raise BadMessageError(
                f"draft_epoch is {grant.draft_epoch}, must be {self._worker_epoch}, this worker's",
                "FAILED_PRECONDITION",
            )
        epoch, number = self._grants.get(grant.target_id, (0, 0))
        if (grant.scheduler_epoch, grant.number) < (epoch, number):
            raise BadMessageError(
                f"the grant for target_id {grant.target_id!r} has scheduler_epoch {grant.scheduler_epoch} and number "
                f"{grant.number}, must be no earlier than {epoch} and {number}, which came after it",
                "FAILED_PRECONDITION",
            )

    async def _read(self, requests: AsyncIterator[draft_pb2.DraftRequest], stream: TargetStream) -> None:
        """Until the target ends its stream. Raises what reading it raises, but for BadMessageError."""
        try:
            async for request in requests:
                if stream.closed:
                    break
                if request.HasField("opening"):
                    raise BadMessageError("opening came again, must be in the first message of a stream only")
                self._batcher.add(stream, verdicts_from_wire(request, self._vocabulary_size))
                await stream.room()
        except BadMessageError as error:
            stream.end(error)
        finally:
            stream.end(None)
