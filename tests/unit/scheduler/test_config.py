"""Settings are checked where they are made, with field, value and limit in the message."""

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import Role, WorkerSpec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("max_running", 0),
        ("prefill_chunk", 0),
        ("max_queued_sequences", 0),
        ("max_queued_tokens", 0),
        ("steps_in_flight", 0),
        ("draft_batch_size", 0),
        ("draft_length", -1),
        ("draft_ahead", -1),
        ("wait_bound_steps", -0.5),
        ("wait_bound_steps", float("inf")),
        ("initial_step_seconds", 0.0),
        ("initial_step_seconds", float("nan")),
        ("policy", "ragged"),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value!r}, must be "):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["page_size", "total_pages", "max_sequence_length", "max_num_batched_tokens"])
def test_a_worker_without_room_is_refused(field: str) -> None:
    values = {"page_size": 1, "total_pages": 1, "max_sequence_length": 1, "max_num_batched_tokens": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} of worker w is 0"):
        WorkerSpec("w", Role.TARGET, **values)
