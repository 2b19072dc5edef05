"""What waits for a gateway, how it is merged, and when a refused client should come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from spool.protos import scheduler_pb2
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import MIN_PRIORITY, FinishReason, RefusalCause, SequenceRequest, Suspicion
from spool.scheduler.sampling import SamplingParameters
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError, GenerationRequest
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.backend.session_codec import read_end, request_from_wire, write_end
from spool.services.rpc.conversion import to_wire
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.session import GatewaySession, RetryAdvice, SessionOptions


def test_replies_are_bounded_and_no_sequence_is_passed_over() -> None:
    """Each sequence has one event with all that happened to it."""
    count = 3000
    told: list[scheduler_pb2.SequenceEvent] = []
    sizes: list[int] = []

    async def requests(ended: asyncio.Event) -> AsyncIterator[scheduler_pb2.SessionRequest]:
        opening = scheduler_pb2.SessionOpening(protocol_version=SPOKEN.newest)
        numbers = range(1, count + 1)
        submissions = [scheduler_pb2.SequenceSubmission(request_id=n, prompt=[1], max_tokens=1) for n in numbers]
        yield scheduler_pb2.SessionRequest(opening=opening, submissions=submissions)
        yield scheduler_pb2.SessionRequest(cancelled_request_ids=numbers)
        await ended.wait()

    async def run() -> None:
        ended = asyncio.Event()
        config = SchedulerConfig(max_queued_sequences=count)
        async with SchedulerService(config, scheduler_epoch=1) as service:
            session = GatewaySession(service, SessionOptions(), RetryAdvice())

            async def write(reply: scheduler_pb2.SessionReply) -> None:
                sizes.append(len(reply.events))
                told.extend(reply.events)
                if len(told) == count:
                    ended.set()

            await session.run(requests(ended), write)

    asyncio.run(run())
    assert max(sizes) <= 1024
    assert [event.request_id for event in told] == [*range(1, count + 1)]
    assert all(event.admitted and event.finished == scheduler_pb2.SEQUENCE_END_CANCELLED for event in told)


@pytest.mark.parametrize(
    "outcome",
    [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        SequenceFailedError("broken"),
        DeadlineExceededError("late"),
        BackendUnavailableError("nobody"),
        AdmissionRefusedError(RefusalCause.QUEUE_FULL, "full"),
        AdmissionRefusedError(RefusalCause.TOO_LONG, "long"),
        AdmissionRefusedError(RefusalCause.INVALID, "wrong"),
        AdmissionRefusedError(RefusalCause.KEY_LIMIT, "max_waiting"),
    ],
    ids=str,
)
def test_ends_cross_the_wire(outcome: FinishReason | Exception) -> None:
    event = scheduler_pb2.SequenceEvent()
    assert read_end(event) is None
    write_end(outcome, 3.0, event)
    back = read_end(scheduler_pb2.SequenceEvent.FromString(event.SerializeToString()))
    assert (type(back), str(back)) == (type(outcome), str(outcome))
    cause = getattr(outcome, "cause", None)
    assert getattr(back, "cause", None) is cause
    waiting_helps = cause in (RefusalCause.QUEUE_FULL, RefusalCause.KEY_LIMIT)
    assert getattr(back, "retry_after_seconds", None) == (3.0 if waiting_helps else None)


def test_ends_that_are_not_known_are_named() -> None:
    with pytest.raises(ValueError, match="sequence_end is 77"):
        read_end(scheduler_pb2.SequenceEvent.FromString(b"\x38\x4d"))
    refusal = scheduler_pb2.SequenceRefusal.FromString(b"\x08\x4d")
    with pytest.raises(ValueError, match="refusal_cause is 77"):
        read_end(scheduler_pb2.SequenceEvent(refused=refusal))


def test_requests_cross_the_wire() -> None:
    sampling = SamplingParameters(temperature=0.7, top_k=5, logit_bias={3: 1.5}, seed=2**64 - 1)
    same = {"key": "a", "priority": MIN_PRIORITY, "cache_scope": b"\xff" * 32}
    again = {"committed_output": (7, 8), "admitted_before": True, "suspicion": Suspicion(2, 1)}
    same |= {"draft_length": 0, "top_logprobs": 0}
    request = GenerationRequest((1, 2), 9, frozenset({4, 2}), sampling, **same, deadline_seconds=5.0)
    submission = to_wire(scheduler_pb2.SequenceSubmission, request, request_id=3, **again)
    back = request_from_wire(11, scheduler_pb2.SequenceSubmission.FromString(submission.SerializeToString()))
    assert back == SequenceRequest(11, (1, 2), 9, frozenset({4, 2}), sampling, **same, **again)
    bare = request_from_wire(1, scheduler_pb2.SequenceSubmission(prompt=[1], max_tokens=1))
    assert bare == SequenceRequest(1, (1,), 1)
    wrong = scheduler_pb2.SequenceSubmission(prompt=[1], max_tokens=1)
    wrong.sampling.temperature = -1
    with pytest.raises(ValueError, match="temperature is -1"):
        request_from_wire(1, wrong)


def test_advice_follows_the_speed_of_late() -> None:
    advice = RetryAdvice()
    assert advice.seconds(1000, 5.0) == 1
    for number in range(100):
        advice.sequence_ended(number * 0.5)
    assert advice.seconds(100, 50.0) == pytest.approx(5, rel=0.1)
    assert advice.seconds(2, 50.0) == 1
    assert advice.seconds(100_000, 50.0) == 30
    assert advice.seconds(100, 5000.0) == 30
