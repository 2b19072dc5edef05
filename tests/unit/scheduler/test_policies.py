"""Which rows each grouping policy takes, and when it waits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

import pytest

from spool.scheduler.batching.verify_grouping import pick
from spool.scheduler.config import Policy
from spool.scheduler.key_class import NOBODY
from spool.scheduler.messages import SequenceRequest
from spool.scheduler.state.key_accounts import KeyAccount
from spool.scheduler.state.workers import Sequence


def idle(sequence_id: int, length: int, verify: int = 4, due: float = 10.0) -> Sequence:
    sequence = Sequence(SequenceRequest(sequence_id, (1,) * length, 50), sequence_id, KeyAccount(NOBODY))
    sequence.verify, sequence.due = verify, due
    return sequence


def picked(
    policy: Policy,
    sequences: list[Sequence],
    verifying: int = 0,
    batch_size: int = 4,
    groups: int = 0,
    may_wait: bool = True,
) -> tuple[list[int], bool]:
    index = {sequence.sequence_id: sequence for sequence in sequences}
    group, forced = pick(policy, index, batch_size, groups, verifying, may_wait)
    return [sequence.sequence_id for sequence in group], forced


MIXED = (10, 20, 30, 20, 10, 20)
"""Lengths of sequences 1, 2, ..."""


def mixed(count: int = 6) -> list[Sequence]:
    return [idle(sequence_id, length) for sequence_id, length in enumerate(MIXED[:count], 1)]


def of_lengths(*lengths: int, verify: Iterable[int] = ()) -> list[Sequence]:
    known = chain(verify, repeat(4))
    return [idle(number, length, next(known)) for number, length in enumerate(lengths, 1)]


RAGGED, EQSPEC, EXSPEC, AUTO = Policy.RAGGED, Policy.EQSPEC, Policy.EXSPEC, Policy.AUTO


@pytest.mark.parametrize(
    ("policy", "sequences", "more", "expected"),
    [
        *((policy, [], {}, None) for policy in Policy),
        # The oldest, without a wait.
        (RAGGED, mixed(), {"verifying": 3}, [1, 2, 3, 4]),
        # The whole cohort.
        (EQSPEC, mixed(3), {"verifying": 1}, None),
        (EQSPEC, mixed(3), {}, [1, 2, 3]),
        # The largest group of one length; of equal ones that with the oldest, and an older full one before any.
        (EXSPEC, mixed(), {}, [2, 4, 6]),
        (EXSPEC, of_lengths(30, 20, 10, 10, 20), {}, [2, 5]),
        (EXSPEC, of_lengths(10, 10, 20, 20, 20, 20), {"batch_size": 2}, [1, 2]),
        # Rows that may verify other numbers of tokens are not equal; without equals, the oldest.
        (EXSPEC, of_lengths(10, 10, 20, 20, verify=(4, 3, 2, 2)), {}, [3, 4]),
        (EXSPEC, of_lengths(*range(10, 16)), {}, [1, 2, 3, 4]),
        # It waits for nobody: where those in the running step will end is not known.
        (EXSPEC, mixed(), {"verifying": 2}, [2, 4, 6]),
        # Those stay together that fit one step; of more than a step, the oldest go.
        (AUTO, mixed(2), {}, [1, 2]),
        (AUTO, mixed(2), {"verifying": 2}, None),
        (AUTO, mixed(2), {"verifying": 2, "may_wait": False}, [1, 2]),
        (AUTO, mixed(), {}, [1, 2, 3, 4]),
        (AUTO, mixed(2), {"verifying": 3}, [1, 2]),
    ],
)
def test_which_rows_are_taken(
    policy: Policy, sequences: list[Sequence], more: dict[str, Any], expected: list[int] | None
) -> None:
    assert picked(policy, sequences, **more) == (expected or [], False)


def test_exspec_passes_nobody_over_who_is_due() -> None:
    sequences = mixed()
    sequences[0].due = 5.5
    assert picked(EXSPEC, sequences, groups=5) == ([2, 4, 6], False)
    assert picked(EXSPEC, sequences, groups=6) == ([1, 2, 3, 4], True)


@pytest.mark.parametrize("policy", [RAGGED, EQSPEC, AUTO])
def test_other_policies_pass_nobody_over(policy: Policy) -> None:
    assert picked(policy, mixed(), groups=100) == ([1, 2, 3, 4], False)
