"""Which rows each grouping policy takes, and when it waits."""

from __future__ import annotations

import pytest

from scheduler.batching.verify_grouping import Arrivals, GroupingView, make_policy
from scheduler.config import Policy
from scheduler.costs.draft_plan import DraftPlan
from scheduler.costs.step_times import TargetTimes, expected_commit
from scheduler.key_class import NOBODY
from scheduler.messages import SequenceRequest
from scheduler.state.indexes import CountByLength, DraftedIndex, group_key
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.workers import Sequence


def drafted(sequence_id: int, length: int, drafts: int = 4, due: float = 10.0, acceptance: float = 0.7) -> Sequence:
    sequence = Sequence(SequenceRequest(sequence_id, (1,) * length, 50), sequence_id, KeyAccount(NOBODY))
    sequence.draft_tokens = (1,) * drafts
    sequence.expected_tokens = expected_commit(acceptance, drafts)
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
    times: TargetTimes | None = None,
    plan: DraftPlan | None = None,
    arrivals: Arrivals | None = None,
) -> GroupingView:
    index = DraftedIndex(batch_size)
    for sequence in sequences:
        index.add(sequence)
    counts = CountByLength()
    for length in coming:
        counts.add(length)
    return GroupingView(
        index, counts, verifying, batch_size, now, may_wait, times or TargetTimes(0.1), plan, lambda: arrivals
    )


def arrivals(seconds: float, rows: int, drafts: int = 4, acceptance: float = 0.7) -> Arrivals:
    return Arrivals(seconds, rows, rows * (1 + drafts), rows * expected_commit(acceptance, drafts))


def chosen(policy: Policy, grouping: GroupingView) -> list[int] | None:
    choice = make_policy(policy).pick(grouping)
    return None if choice is None else [sequence.sequence_id for sequence in choice.sequences]


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
    waiting = {"coming": (20, 20, 20), "verifying": 1, "arrivals": arrivals(0.001, 3)}
    before = make_policy(policy).pick(view(sequences, now=4.999, **waiting))
    assert before is None or not before.forced
    at = make_policy(policy).pick(view(sequences, now=5.0, **waiting))
    assert at is not None
    assert at.forced
    assert [sequence.sequence_id for sequence in at.sequences] == [1, 2, 3, 4]


def measured(equal: float, ragged: float, per_token: float = 0.0) -> TargetTimes:
    times = TargetTimes(0.1)
    for rows in (5, 20, 10, 15, 40):
        times.observe(rows, True, 0, equal + rows * per_token)
        times.observe(rows, False, 0, ragged + rows * per_token)
    return times


def test_auto_takes_more_rows_where_raggedness_is_free() -> None:
    assert chosen(Policy.AUTO, view(mixed(), times=measured(0.1, 0.1))) == [1, 2, 3, 4]


def test_auto_takes_the_equal_group_where_realignment_is_dear() -> None:
    assert chosen(Policy.AUTO, view(mixed(), times=measured(0.1, 0.3))) == [2, 4, 6]


def test_auto_counts_what_each_row_is_expected_to_commit() -> None:
    """Three equal rows against four of other lengths, where an unequal step takes half as long again."""
    times = measured(0.1, 0.15)
    assert chosen(Policy.AUTO, view(mixed(), times=times)) == [2, 4, 6]
    hopeless = [drafted(i, length, acceptance=0.0 if length == 20 else 0.9) for i, length in MIXED]
    assert chosen(Policy.AUTO, view(hopeless, times=times)) == [1, 2, 3, 4]


def test_auto_waits_when_what_is_coming_comes_soon_enough() -> None:
    times = measured(0.1, 0.1)
    two = mixed()[:2]
    soon, late = arrivals(0.01, 2), arrivals(0.5, 2)
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=soon, times=times)) is None
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=late, times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=None, times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=soon, may_wait=False, times=times)) == [1, 2]


def test_auto_does_not_wait_for_proposals_that_are_worth_little() -> None:
    """Every row costs as much as the step's base: two more rows of plain value do not pay for the time they take."""
    times = measured(0.01, 0.01, per_token=0.01)
    two = [drafted(1, 10, drafts=0), drafted(2, 20, drafts=0)]
    poor, rich = arrivals(0.01, 2, acceptance=0.05), arrivals(0.01, 2, acceptance=1.0)
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=poor, times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, coming=(7, 8), arrivals=rich, times=times)) is None


def plan(merged: bool = False, split: bool = False) -> DraftPlan:
    return DraftPlan((), merged, split, time_sliced=False, full_draft_step=0.0, rate=1.0, plain_rate=1.0, cycle=0.1)


def test_a_merged_plan_keeps_those_that_fit_one_step_together() -> None:
    times = measured(0.1, 0.1)
    two, merged = mixed()[:2], plan(merged=True)
    assert chosen(Policy.AUTO, view(two, verifying=2, plan=merged, times=times)) is None
    assert chosen(Policy.AUTO, view(two, verifying=3, plan=merged, times=times)) == [1, 2]  # five do not fit
    assert chosen(Policy.AUTO, view(two, verifying=2, plan=plan(), times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, verifying=2, plan=merged, may_wait=False, times=times)) == [1, 2]
    for seconds, expected in ((0.09, None), (0.11, [1, 2])):  # an own step costs 0.1 s before its first row
        waiting = view(two, coming=(7, 8), arrivals=arrivals(seconds, 2), plan=merged, times=times)
        assert chosen(Policy.AUTO, waiting) == expected


def test_a_split_plan_sends_half_and_then_the_other_half() -> None:
    times = measured(0.1, 0.1)
    four = mixed()[:4]
    assert chosen(Policy.AUTO, view(four, plan=plan(split=True), times=times)) == [1, 2]
    assert chosen(Policy.AUTO, view(four[2:], verifying=2, plan=plan(split=True), times=times)) == [3, 4]


def test_auto_does_not_wait_past_the_bound() -> None:
    two = mixed()[:2]
    two[0].due = 0.005
    grouping = view(two, coming=(7, 8), arrivals=arrivals(0.01, 2), times=measured(0.1, 0.1))
    assert chosen(Policy.AUTO, grouping) == [1, 2]


@pytest.mark.parametrize("asked_for_groups_after", [0, 20, 45])
def test_the_index_stays_right_while_rows_come_and_go(asked_for_groups_after: int) -> None:
    index, there, largest = DraftedIndex(3), [], []
    sequences = [drafted(i, 10 + i % 3, drafts=i % 2) for i in range(30)]
    leaving = sequences[::2] + sequences[1::2]
    for event, sequence in enumerate(sequences + leaving):
        if event < len(sequences):
            index.add(sequence)
            there.append(sequence)
        else:
            index.remove(sequence)
            there.remove(sequence)
        assert index.first(100) == there
        assert index.oldest() is (there[0] if there else None)
        if event >= asked_for_groups_after:
            # Of each sequence, those that were drafted since and are of its kind.
            groups = [
                [other for other in there[at:] if group_key(other) == group_key(one)][:3]
                for at, one in enumerate(there)
            ]
            largest = index.largest_group()
            assert largest == max(groups, key=len, default=[])
        index.check_integrity()
    assert len(index) == 0
    assert largest == []


def test_groups_that_nobody_asked_for_in_a_long_time_are_right_when_asked_for_again() -> None:
    index = DraftedIndex(3)
    stays = [drafted(1, 10), drafted(2, 10)]
    for sequence in stays:
        index.add(sequence)
    assert index.largest_group() == stays
    for sequence_id in range(3, 203):
        passing = drafted(sequence_id, 11)
        index.add(passing)
        index.remove(passing)
        index.check_integrity()
    late = drafted(203, 10)
    index.add(late)
    assert index.largest_group() == [*stays, late]
    index.check_integrity()


def test_a_length_that_changes_while_drafted_is_noticed() -> None:
    index = DraftedIndex(3)
    sequence = drafted(1, 10)
    index.add(sequence)
    assert index.largest_group() == [sequence]
    sequence.commit((1,))
    with pytest.raises(RuntimeError, match="changed its length"):
        index.check_integrity()
