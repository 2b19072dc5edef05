"""Settings are checked where they are made, with field, value and limit in the message."""

from __future__ import annotations

import pytest

from spool.scheduler.config import SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import Role, WorkerSpec
from spool.scheduler.sampling import SamplingParameters

LAST_TOKEN = 2_147_483_647


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("max_running", 0),
        ("prefill_chunk", 0),
        ("max_queued_sequences", 0),
        ("max_queued_tokens", 0),
        ("steps_in_flight", 0),
        ("draft_length", -1),
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


def test_names_of_classes_are_there_and_differ() -> None:
    with pytest.raises(ValueError, match=r"keys\[1\] has the name 'a', must differ from keys\[0\]"):
        SchedulerConfig(keys=(KeyClass("a"), KeyClass("a", weight=2)))
    with pytest.raises(ValueError, match=r"keys\[0\] has the name '', must have at least 1 character"):
        SchedulerConfig(keys=(KeyClass(""),))


@pytest.mark.parametrize(
    ("field", "included", "beyond"),
    [
        ("temperature", (0, 100), (-0.001, 100.001)),
        ("top_k", (0, LAST_TOKEN), (-1, LAST_TOKEN + 1)),
        ("top_p", (1e-9, 1), (0, 1.001)),
        ("min_p", (0, 1), (-0.001, 1.001)),
        ("repetition_penalty", (0.01, 100), (0, 1e-300, 0.0099, 100.001)),
        ("presence_penalty", (-2, 2), (-2.001, 2.001)),
        ("frequency_penalty", (-2, 2), (-2.001, 2.001)),
        ("seed", (0, 18_446_744_073_709_551_615), (-1, 18_446_744_073_709_551_616)),
        ("min_tokens", (0, LAST_TOKEN), (-1, LAST_TOKEN + 1)),
    ],
)
def test_every_limit_of_sampling_is_included(
    field: str, included: tuple[float, float], beyond: tuple[float, float]
) -> None:
    for value in included:
        assert getattr(SamplingParameters(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in beyond:
        with pytest.raises(ValueError, match=f"^{field} is {value!r}, must be "):
            SamplingParameters(**{field: value})  # type: ignore[arg-type]


def test_tokens_and_biases_of_sampling_have_limits() -> None:
    ends = frozenset({0, LAST_TOKEN})
    biases = {0: -100.0, LAST_TOKEN: 100.0}
    given = SamplingParameters(end_token_ids=ends, bad_words=((0, LAST_TOKEN),), logit_bias=biases)
    assert (given.end_token_ids, given.bad_words, given.logit_bias) == (ends, ((0, LAST_TOKEN),), biases)
    for token in (-1, LAST_TOKEN + 1):
        with pytest.raises(ValueError, match=f"^end_token_ids holds {token}, "):
            SamplingParameters(end_token_ids=frozenset({token}))
        with pytest.raises(ValueError, match=r"^bad_words holds "):
            SamplingParameters(bad_words=((5,), (5, token)))
        with pytest.raises(ValueError, match=rf"^logit_bias\[{token}\] is 1.0, "):
            SamplingParameters(logit_bias={token: 1.0})
    with pytest.raises(ValueError, match=r"^bad_words holds "):
        SamplingParameters(bad_words=((),))
    for bias in (-100.001, 100.001, float("nan")):
        with pytest.raises(ValueError, match=r"^logit_bias\[3\] is "):
            SamplingParameters(logit_bias={3: bias})
