"""Which rows each grouping policy takes, and when it waits."""

from __future__ import annotations

import pytest

from scheduler.batching.verify_grouping import GroupingView, make_policy
from scheduler.config import Policy
from scheduler.key_class import NOBODY
from scheduler.messages import SequenceRequest
from scheduler.state.indexes import CountByLength, DraftedIndex
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.workers import Sequence


def drafted(sequence_id: int, length: int, drafts: int = 4, due: float = 10.0) -> Sequence:
    sequence = Sequence(SequenceRequest(sequence_id, (1,) * length, 50), sequence_id, KeyAccount(NOBODY))
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
    drafting: bool = True,
) -> GroupingView:
    index = DraftedIndex(batch_size)
    for sequence in sequences:
        index.add(sequence)
    counts = CountByLength()
    for length in coming:
        counts.add(length)
    return GroupingView(index, counts, verifying, batch_size, now, may_wait, drafting)


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
    waiting = {"coming": (20, 20, 20), "verifying": 1}
    before = make_policy(policy).pick(view(sequences, now=4.999, **waiting))
    assert before is None or not before.forced
    at = make_policy(policy).pick(view(sequences, now=5.0, **waiting))
    assert at is not None
    assert at.forced
    assert [sequence.sequence_id for sequence in at.sequences] == [1, 2, 3, 4]


def test_auto_keeps_those_together_that_fit_one_step() -> None:
    two = mixed()[:2]
    assert chosen(Policy.AUTO, view(two)) == [1, 2]
    assert chosen(Policy.AUTO, view(two, verifying=2)) is None
    assert chosen(Policy.AUTO, view(two, coming=(7, 8))) is None
    assert chosen(Policy.AUTO, view(two, verifying=2, may_wait=False)) == [1, 2]


def test_auto_waits_for_no_probe() -> None:
    """Where sequences do not draft, one that is being drafted for is looked at only to see what that yields."""
    assert chosen(Policy.AUTO, view(mixed()[:3], coming=(7,), drafting=False)) == [1, 2, 3]
    assert chosen(Policy.AUTO, view(mixed()[:3], verifying=1, drafting=False)) is None


def test_auto_takes_the_oldest_where_more_than_a_step_are_there() -> None:
    assert chosen(Policy.AUTO, view(mixed())) == [1, 2, 3, 4]
    assert chosen(Policy.AUTO, view(mixed()[:2], verifying=3)) == [1, 2]
    assert chosen(Policy.AUTO, view(mixed()[:2], coming=(7, 8, 9))) == [1, 2]
