"""What waits for a gateway, how it is merged, and when a refused client should come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from protos import scheduler_pb2
from scheduler.config import SchedulerConfig
from scheduler.messages import MIN_PRIORITY, EmitTokens, FinishReason, RefusalCause, Suspicion
from scheduler.sampling import SamplingParameters
from services.backend.interface import BackendUnavailableError, DeadlineExceededError, GenerationRequest
from services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from services.backend.session_codec import read_end, request_from_wire, write_end
from services.rpc.conversion import to_wire
from services.rpc.protocol_version import PROTOCOL_VERSION
from services.scheduler.service import SchedulerService
from services.scheduler.session import GatewaySession, RetryAdvice, SessionOptions
from services.scheduler_client.remote_stream import RemoteStream


def test_replies_are_bounded_and_no_sequence_is_passed_over() -> None:
    """Each sequence has one event with all that happened to it."""
    count = 3000
    told: list[scheduler_pb2.SequenceEvent] = []
    sizes: list[int] = []

    async def requests(ended: asyncio.Event) -> AsyncIterator[scheduler_pb2.SessionRequest]:
        opening = scheduler_pb2.SessionOpening(protocol_version=PROTOCOL_VERSION)
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
    if isinstance(outcome, FinishReason):
        assert back is outcome
        return
    assert type(back) is type(outcome)
    assert str(back) == str(outcome)
    if isinstance(outcome, AdmissionRefusedError) and isinstance(back, AdmissionRefusedError):
        assert back.cause is outcome.cause
        assert back.retry_after_seconds == (
            3.0 if outcome.cause in (RefusalCause.QUEUE_FULL, RefusalCause.KEY_LIMIT) else None
        )


def test_ends_that_are_not_known_are_named() -> None:
    with pytest.raises(ValueError, match="sequence_end is 77"):
        read_end(scheduler_pb2.SequenceEvent.FromString(b"\x38\x4d"))
    refusal = scheduler_pb2.SequenceRefusal.FromString(b"\x08\x4d")
    with pytest.raises(ValueError, match="refusal_cause is 77"):
        read_end(scheduler_pb2.SequenceEvent(refused=refusal))


def test_requests_cross_the_wire() -> None:
    sampling = SamplingParameters(temperature=0.7, top_k=5, logit_bias={3: 1.5}, seed=2**64 - 1)
    scope = b"\xff" * 32
    request = GenerationRequest(
        (1, 2), 9, frozenset({4, 2}), sampling, 0, 0, 5.0, key="a", priority=MIN_PRIORITY, cache_scope=scope
    )
    submission = to_wire(
        scheduler_pb2.SequenceSubmission,
        request,
        request_id=3,
        committed_output=(7, 8),
        admitted_before=True,
        suspicion=Suspicion(2, 1),
    )
    back = request_from_wire(11, scheduler_pb2.SequenceSubmission.FromString(submission.SerializeToString()))
    assert (back.sequence_id, back.prompt, back.max_tokens) == (11, (1, 2), 9)
    assert (back.stop_token_ids, back.sampling) == (request.stop_token_ids, sampling)
    assert (back.draft_length, back.top_logprobs) == (0, 0)
    assert (back.committed_output, back.admitted_before) == ((7, 8), True)
    assert back.suspicion == Suspicion(2, 1)
    assert (back.key, back.priority, back.cache_scope) == ("a", MIN_PRIORITY, scope)
    bare = request_from_wire(1, scheduler_pb2.SequenceSubmission(prompt=[1], max_tokens=1))
    assert (bare.draft_length, bare.top_logprobs, bare.sampling) == (None, None, SamplingParameters())
    assert (bare.key, bare.priority, bare.cache_scope) == ("", 0, b"")
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


async def test_stream_remembers_what_it_received_and_how_often_it_was_sent() -> None:
    ends: list[RemoteStream] = []
    request = GenerationRequest((1, 2), 9, deadline_seconds=1000, key="a", priority=5)
    stream = RemoteStream(4, request, ends.append)
    first = stream.submission()
    assert (list(first.committed_output), first.admitted_before) == ([], False)
    assert 900 < first.timeout_seconds <= 1000
    stream.admit()
    stream.push(EmitTokens(1, (5, 6), 1, 1))
    assert stream.fruitless_submissions == 0
    assert (await anext(stream)).tokens == (5, 6)
    stream.push(EmitTokens(1, (7,), 1, 0))
    again = stream.submission()
    assert (list(again.committed_output), again.admitted_before) == ([5, 6, 7], True)
    assert (again.key, again.priority) == (first.key, first.priority) == ("a", 5)
    assert stream.fruitless_submissions == 1
    assert not again.HasField("suspicion")
    stream.suspect(Suspicion(2, 2))
    stream.push(EmitTokens(1, (9,), 0, 0))
    marked = stream.submission().suspicion
    assert (marked.count, marked.tokens) == (2, 1)
    stream.push(EmitTokens(1, (9, 9), 0, 0))
    cleared = stream.submission().suspicion
    assert (cleared.count, cleared.tokens) == (2, 0)
    stream.cancel()
    stream.push(EmitTokens(1, (8,), 0, 0))
    stream.end(SequenceFailedError("late"))
    assert [delta.tokens async for delta in stream] == [(7, 9, 9, 9)]
    assert stream.finish_reason is FinishReason.CANCELLED
    assert [delta async for delta in stream] == []
    assert ends == [stream]
    assert first.request_id == again.request_id == 4
