"""Steps as they were seen: how much drafting they hide, and the picture of them."""

import json

import pytest

from scheduler.messages import Role, Row, SendStep
from services.observability.observer import StepTimings
from services.scheduler.telemetry.step_trace import StepTrace, TracedStep, chrome_trace


def traced(role: Role, begin: float, end: float, worker_id: str = "w") -> TracedStep:
    return TracedStep(
        role=role,
        worker_id=worker_id,
        step_id=1,
        rows=1,
        draft_length=4,
        equal_length=False,
        packed_rows=5,
        sent=begin,
        replied=end,
        queued=0.0,
        prepare=0.0,
        forward=end - begin,
        sample=0.0,
        total=end - begin,
    )


def recorded() -> list[TracedStep]:
    trace = StepTrace()
    row = Row(sequence_id=7, kv_len=3, prefix_digest=0, tokens=(1,), draft_tokens=(2, 3))
    proposal = Row(sequence_id=7, kv_len=3, prefix_digest=0, tokens=(1,), draft_length=4)
    verify, propose = SendStep("target-0", 1, (row, row)), SendStep("draft-0", 1, (proposal,))
    lost = SendStep("target-1", 1, (row,))
    trace.step_sent(Role.TARGET, verify, now=10.0)
    trace.step_sent(Role.DRAFT, propose, now=10.0)
    trace.step_sent(Role.TARGET, lost, now=10.0)
    trace.worker_lost(Role.TARGET, "target-1", 1)
    timings = StepTimings(queued=0.5, prepare=0.25, forward=1.0, sample=0.5, total=2.0, packed_rows=6)
    for role, step in ((Role.TARGET, verify), (Role.DRAFT, propose), (Role.TARGET, lost)):
        trace.step_replied(role, step, (), timings, now=13.0)
    trace.step_replied(Role.TARGET, SendStep("target-0", 2, (row,)), (), timings, now=14.0)
    return trace.steps


def test_only_steps_seen_from_sending_to_reply_are_recorded() -> None:
    target, draft = recorded()
    assert (target.rows, target.draft_length, target.packed_rows) == (2, 2, 6)
    assert (draft.rows, draft.draft_length) == (1, 4)
    assert target.started == 11.0
    assert target.computing == (11.25, 12.75)


def test_chrome_trace_has_a_lane_for_each_queue_and_worker() -> None:
    content = json.loads(json.dumps(chrome_trace(recorded())))
    events = content["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["draft-0", "draft-0 queue", "target-0", "target-0 queue"]
    shown = {(lanes[e["tid"]], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert shown["target-0 queue", "verify 2 rows, gamma 2"] == (pytest.approx(0.5e6), pytest.approx(0.5e6))
    assert shown["target-0", "verify 2 rows, gamma 2"] == (pytest.approx(1e6), pytest.approx(2e6))
    assert shown["target-0", "forward"] == (pytest.approx(1.25e6), pytest.approx(1e6))
    assert shown["target-0", "sample"] == (pytest.approx(2.25e6), pytest.approx(0.5e6))
    assert ("draft-0", "propose 1 rows, gamma 4") in shown
    # The format asks for these of every event, and slices of a lane to nest.
    assert all({"name", "ph", "pid", "tid"} <= event.keys() for event in events)
    for lane in set(lanes) - {tid for tid, name in lanes.items() if name.endswith("queue")}:
        slices = sorted((e["ts"], -e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == lane)
        outer_end = slices[0][0] - slices[0][1]
        assert all(begin - minus <= outer_end + 1e-6 for begin, minus in slices)
