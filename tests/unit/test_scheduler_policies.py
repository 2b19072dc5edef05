"""Which rows each grouping policy takes, and when it waits."""

from __future__ import annotations

import pytest

from scheduler.config import Policy
from scheduler.drafted import CountByLength, DraftedIndex
from scheduler.messages import SequenceRequest
from scheduler.policies import GroupingView, make_policy
from scheduler.sequence import Sequence
from scheduler.step_times import Acceptance, LinearFit, VerifyTimes, expected_commit


def drafted(sequence_id: int, length: int, drafts: int = 4, due: float = 10.0) -> Sequence:
    sequence = Sequence(SequenceRequest(sequence_id, (1,) * length, 50), sequence_id)
    sequence.draft_tokens = (1,) * drafts
    sequence.due = due
    return sequence


def view(
    sequences: list[Sequence],
    *,
    coming: tuple[int, ...] = (),
    verifying: int = 0,
    batch_size: int = 4,
    now: float = 0.0,
    may_wait: bool = True,
    times: VerifyTimes | None = None,
    arrivals: tuple[float, int] = (0.0, 0),
) -> GroupingView:
    index = DraftedIndex(batch_size)
    for sequence in sequences:
        index.add(sequence)
    counts = CountByLength()
    for length in coming:
        counts.add(length)
    return GroupingView(
        index, counts, verifying, batch_size, now, may_wait, times or VerifyTimes(0.1), 0.7, lambda: arrivals
    )


def chosen(policy: Policy, grouping: GroupingView) -> list[int] | None:
    choice = make_policy(policy).choose(grouping)
    return None if choice is None else [sequence.sequence_id for sequence in choice.rows]


MIXED = [(1, 10), (2, 20), (3, 30), (4, 20), (5, 10), (6, 20)]


def mixed() -> list[Sequence]:
    return [drafted(sequence_id, length) for sequence_id, length in MIXED]


@pytest.mark.parametrize("policy", list(Policy))
def test_nothing_drafted_nothing_chosen(policy: Policy) -> None:
    assert chosen(policy, view([])) is None


def test_ragged_takes_the_oldest_rows_and_never_waits() -> None:
    assert chosen(Policy.RAGGED, view(mixed(), coming=(10, 20), verifying=3)) == [1, 2, 3, 4]


def test_eqspec_waits_for_its_whole_cohort() -> None:
    assert chosen(Policy.EQSPEC, view(mixed()[:3], coming=(15,))) is None
    assert chosen(Policy.EQSPEC, view(mixed()[:3], verifying=1)) is None
    assert chosen(Policy.EQSPEC, view(mixed()[:3])) == [1, 2, 3]


def test_exspec_takes_the_largest_equal_group() -> None:
    assert chosen(Policy.EXSPEC, view(mixed())) == [2, 4, 6]


def test_exspec_breaks_ties_by_the_oldest_member() -> None:
    sequences = [drafted(1, 30), drafted(2, 20), drafted(3, 10), drafted(4, 10), drafted(5, 20)]
    assert chosen(Policy.EXSPEC, view(sequences)) == [2, 5]


def test_exspec_prefers_an_older_full_group_to_a_younger_larger_one() -> None:
    sequences = [drafted(i, 10) for i in range(2)] + [drafted(i, 20) for i in range(2, 6)]
    assert chosen(Policy.EXSPEC, view(sequences, batch_size=2)) == [0, 1]


def test_rows_with_other_draft_lengths_are_not_equal() -> None:
    sequences = [drafted(1, 10, drafts=4), drafted(2, 10, drafts=3), drafted(3, 20, drafts=2), drafted(4, 20, drafts=2)]
    assert chosen(Policy.EXSPEC, view(sequences)) == [3, 4]


def test_exspec_falls_back_to_the_oldest_rows_without_equals() -> None:
    sequences = [drafted(i, 10 + i) for i in range(6)]
    assert chosen(Policy.EXSPEC, view(sequences, coming=(10,))) == [0, 1, 2, 3]


def test_exspec_waits_only_for_members_of_the_same_length() -> None:
    assert chosen(Policy.EXSPEC, view(mixed(), coming=(20,))) is None
    assert chosen(Policy.EXSPEC, view(mixed(), coming=(10, 21))) == [2, 4, 6]
    assert chosen(Policy.EXSPEC, view(mixed(), coming=(20,), batch_size=3)) == [2, 4, 6]
    assert chosen(Policy.EXSPEC, view(mixed(), coming=(20,), may_wait=False)) == [2, 4, 6]


@pytest.mark.parametrize("policy", [Policy.EQSPEC, Policy.EXSPEC, Policy.AUTO])
def test_an_overdue_row_goes_at_once_with_the_oldest(policy: Policy) -> None:
    sequences = mixed()
    sequences[0].due = 5.0
    waiting = {"coming": (20, 20, 20), "verifying": 1, "arrivals": (0.001, 3)}
    before = make_policy(policy).choose(view(sequences, now=4.999, **waiting))
    assert before is None or not before.forced
    at = make_policy(policy).choose(view(sequences, now=5.0, **waiting))
    assert at is not None
    assert at.forced
    assert [sequence.sequence_id for sequence in at.rows] == [1, 2, 3, 4]


def measured(equal: float, ragged: float, per_row: float = 0.0) -> VerifyTimes:
    times = VerifyTimes(0.1)
    for rows in (5, 20, 10, 15, 40):
        times.observe(rows, True, equal + rows * per_row)
        times.observe(rows, False, ragged + rows * per_row)
    return times


def test_auto_takes_more_rows_where_raggedness_is_free() -> None:
    assert chosen(Policy.AUTO, view(mixed(), times=measured(0.1, 0.1))) == [1, 2, 3, 4]


def test_auto_takes_the_equal_group_where_realignment_is_dear() -> None:
    assert chosen(Policy.AUTO, view(mixed(), times=measured(0.1, 0.3))) == [2, 4, 6]


def test_auto_waits_when_what_is_coming_comes_soon_enough() -> None:
    times = measured(0.1, 0.1)
    two = mixed()[:2]
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=(0.01, 2), times=times)) is None
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=(0.5, 2), times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=(0.0, 0), times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=(0.01, 2), may_wait=False, times=times)) == [1, 2]


def test_auto_does_not_wait_past_the_bound() -> None:
    two = mixed()[:2]
    two[0].due = 0.005
    grouping = view(two, coming=(7, 8), arrivals=(0.01, 2), times=measured(0.1, 0.1))
    assert chosen(Policy.AUTO, grouping) == [1, 2]


def test_the_index_stays_right_while_rows_come_and_go() -> None:
    index = DraftedIndex(3)
    sequences = [drafted(i, 10 + i % 3, drafts=i % 2) for i in range(30)]
    for sequence in sequences:
        index.add(sequence)
        index.check_integrity()
    for sequence in sequences[::2] + sequences[1::2]:
        index.remove(sequence)
        index.check_integrity()
    assert len(index) == 0
    assert index.oldest() is None
    assert index.largest_group() == []


def test_a_length_that_changes_while_drafted_is_noticed() -> None:
    index = DraftedIndex(3)
    sequence = drafted(1, 10)
    index.add(sequence)
    sequence.tokens.extend([1])
    with pytest.raises(RuntimeError, match="changed its length"):
        index.check_integrity()


def test_the_fit_finds_base_and_slope() -> None:
    fit = LinearFit(9.0)
    assert fit.predict(100) == 9.0
    for rows in (8, 40, 16, 80, 24):
        fit.observe(rows, 0.02 + 0.0005 * rows)
    assert fit.predict(60) == pytest.approx(0.05, rel=1e-6)


def test_equal_sizes_give_their_mean_and_a_falling_cost_is_taken_for_noise() -> None:
    fit = LinearFit(9.0)
    fit.observe(8, 0.1)
    fit.observe(8, 0.2)
    assert 0.1 < fit.predict(1000) < 0.2
    falling = LinearFit(9.0)
    falling.observe(8, 0.2)
    falling.observe(80, 0.1)
    assert falling.predict(1000) == pytest.approx(falling.predict(8))


def test_one_slow_step_does_not_stretch_the_bound() -> None:
    times = VerifyTimes(0.05)
    times.observe(8, True, 40.0)
    assert times.typical == 0.05
    for _ in range(5):
        times.observe(8, True, 0.02)
    assert times.typical == 0.02
    for seconds in (float("nan"), float("inf"), -1.0):
        times.observe(8, True, seconds)
    assert times.typical == 0.02


def test_acceptance_counts_the_tokens_that_were_tried() -> None:
    acceptance = Acceptance()
    for _ in range(2000):
        acceptance.observe(4, 3)  # three taken, the fourth refused
        acceptance.observe(0, 0)
    assert acceptance.rate == pytest.approx(0.75, abs=0.01)
    assert expected_commit(1.0, 4) == 5
    assert expected_commit(0.0, 4) == 1
    assert expected_commit(0.5, 2) == pytest.approx(1.75)
