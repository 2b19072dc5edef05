"""Messages of the cell simulation that are changed on the way: what nobody knows is ignored, nothing else is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from protos import scheduler_pb2, worker_pb2
from tests.sim.cell.plan import Plan, WirePlan, make_plan
from tests.sim.cell.rpc.wire import Wire, read_reply
from tests.sim.cell.schedule import ScheduleResult, run_plan


def drawn(seed: int, kinds: tuple[str, ...]) -> tuple[Plan, random.Random]:
    rng = random.Random(seed)
    return make_plan(rng, seed, 200, kinds), rng


def run(seed: int, wire: WirePlan | None, kinds: tuple[str, ...] = ()) -> ScheduleResult:
    plan, rng = drawn(seed, kinds)
    return run_plan(replace(plan, wire=wire), rng)


def finished(result: ScheduleResult) -> int:
    return result.outcomes["stop"] + result.outcomes["length"]


def refused(result: ScheduleResult) -> int:
    return result.outcomes["refused queue_full"] + result.outcomes["refused key_limit"]


def wire(plan: WirePlan) -> tuple[Wire, Counter[str]]:
    struck: Counter[str] = Counter()
    return Wire(plan, random.Random(0), struck, lambda *_: None), struck


STEP = worker_pb2.StepRequest(
    step_id=300,
    rows=[worker_pb2.Row(sequence_id=1, tokens=[5, 6], parameters=worker_pb2.SequenceParameters(prompt_length=2))],
)


def test_unknown_fields_are_at_every_depth_and_change_nothing_that_is_known() -> None:
    odd, struck = wire(WirePlan(1.0, 0.0, 0.0, 0))
    grown = Counter[str]()
    for _ in range(50):
        raw = odd.carry(STEP, type(STEP).SerializeToString)
        read = worker_pb2.StepRequest.FromString(raw)
        # From the innermost one on: what is discarded of a message is discarded of all within.
        for name, part in (("parameters", read.rows[0].parameters), ("row", read.rows[0]), ("step", read)):
            size = part.ByteSize()
            part.DiscardUnknownFields()
            grown[name] += part.ByteSize() < size
        assert read == STEP
    assert min(grown[name] for name in ("step", "row", "parameters")) > 10
    assert struck == {"unknown fields": 50}


@pytest.mark.parametrize(
    "message", [STEP, scheduler_pb2.SessionRequest(cancelled_request_ids=[1]), worker_pb2.StepReply(error="no")]
)
def test_truncated_messages_cannot_be_read(message: worker_pb2.StepRequest) -> None:
    cutting, struck = wire(WirePlan(0.0, 0.0, 1.0, 30))
    whole = message.SerializeToString()
    for _ in range(30):
        raw = cutting.carry(message, type(message).SerializeToString)
        assert whole.startswith(raw)
        with pytest.raises(DecodeError):
            type(message).FromString(raw)
        assert read_reply(raw, type(message).FromString) is None
    assert struck == {"message truncated": 30}
    assert cutting.carry(message, type(message).SerializeToString) == whole


def test_a_message_without_fields_cannot_be_truncated() -> None:
    cutting, struck = wire(WirePlan(0.0, 0.0, 1.0, 30))
    assert cutting.carry(scheduler_pb2.SessionRequest(), scheduler_pb2.SessionRequest.SerializeToString) == b""
    assert not struck


@pytest.mark.parametrize("seed", [1, 3])
def test_unknown_fields_change_no_course(seed: int) -> None:
    kinds = ("worker crash", "scheduler crash", "worker leaves", "reset")
    odd = run(seed, WirePlan(0.9, 0.0, 0.0, 0), kinds)
    assert odd.faults["unknown fields"] > 200
    assert odd.events == run(seed, None, kinds).events


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_repeated_steps_break_no_rule(seed: int) -> None:
    result = run(seed, WirePlan(0.1, 0.1, 0.0, 0))
    assert result.faults["message repeated"] > 0
    assert finished(result) > 0.7 * finished(run(seed, None))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(16))
def test_messages_that_cannot_be_read_break_no_rule(seed: int) -> None:
    result = run(seed, WirePlan(0.1, 0.0, 0.05, 6))
    assert 0 < result.faults["message truncated"] <= 6
    # A worker that is lost in a burst costs requests that would have waited for it: these are refused.
    assert finished(result) + refused(result) > 0.7 * finished(run(seed, None))
    assert finished(result) > 0
