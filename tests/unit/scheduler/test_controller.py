"""What the controller decides, against an enumeration of all draft lengths with costs that are known exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from scheduler.config import SchedulerConfig
from scheduler.key_class import NOBODY
from scheduler.messages import Role, SequenceRequest, WorkerSpec
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.workers import DraftWorker, Sequence, TargetWorker, Work
from scheduler.statistics import Counters

LONGEST = 6


@dataclass(frozen=True)
class Law:
    base: float
    row: float
    of_pass: float
    of_token: float

    def verify(self, tokens: int) -> float:
        return self.base + self.row * tokens

    def draft(self, passes: int, tokens: int) -> float:
        return self.of_pass * passes + self.of_token * tokens


LAWS = {
    "rows nearly free": Law(0.010, 0.00005, 0.0008, 0.00001),
    "rows cost": Law(0.010, 0.003, 0.0008, 0.0001),
    "slow draft": Law(0.010, 0.0002, 0.006, 0.0002),
}


class Cell:
    """One target and drafts, whose steps are reported as they would be measured."""

    def __init__(
        self, law: Law, batch_size: int = 16, drafts: int = 1, draft_ahead: int = 0, shared_device: bool = False
    ) -> None:
        self.law, self.rng = law, random.Random(7)
        self.config = SchedulerConfig(
            batch_size=batch_size, draft_length=LONGEST, draft_ahead=draft_ahead, shared_device=shared_device
        )
        self.fleet = Fleet(self.config)
        self.controller = Controller(self.config, self.fleet, Counters())
        for name in ("target", *(f"draft{number}" for number in range(drafts))):
            role = Role.TARGET if name == "target" else Role.DRAFT
            self.fleet.add(WorkerSpec(name, role, 16, 100_000, 100_000, 4096))
        self.target: TargetWorker = self.fleet.targets["target"]
        self.drafts: list[DraftWorker] = list(self.fleet.drafts.values())
        self.sequences: list[Sequence] = []

    def submit(self, draft: int = 0, prompt: int = 8, max_tokens: int = 10_000) -> Sequence:
        number = len(self.sequences)
        sequence = Sequence(SequenceRequest(number, (1,) * prompt, max_tokens), number, KeyAccount(NOBODY))
        sequence.target, sequence.draft = self.target, self.drafts[draft]
        for worker in (sequence.target, sequence.draft):
            worker.place(sequence, prompt + LONGEST + 1)
            worker.kv[number].valid = sequence.length - 1
        self.sequences.append(sequence)
        return sequence

    def round(self, acceptance: dict[int, float], forced: int | None = None) -> list[int]:
        """All sequences have a round; `acceptance` is by draft. Returns the lengths that they drafted."""
        lengths = []
        for sequence in self.sequences:
            length = self.controller.for_round(sequence, LONGEST)
            lengths.append(length if forced is None else forced)
        for draft in self.drafts:
            asked = [n for n, one in zip(lengths, self.sequences, strict=True) if one.draft is draft and n]
            if asked:
                work = Work(max(asked), sum(asked))
                self.controller.draft_step(draft, work, self.law.draft(max(asked), sum(asked)), None)
        tokens = len(lengths) + sum(lengths)
        self.controller.target_step(self.target, Work(decoded=tokens), self.law.verify(tokens), None)
        for length, sequence in zip(lengths, self.sequences, strict=True):
            sequence.requested_draft_length = length
            accepted, chance = 0, acceptance[self.drafts.index(sequence.draft)] if sequence.draft else 0.0
            while accepted < length and self.rng.random() < chance:
                accepted += 1
            self.controller.observe(sequence, length, accepted)
        return lengths

    def settle(self, acceptance: dict[int, float], rounds: int = 80) -> list[int]:
        """The lengths that sequences draft most often, each, after so many rounds."""
        for _ in range(rounds):
            self.round(acceptance)
        last = [self.round(acceptance) for _ in range(25)]
        return [max(set(found), key=found.count) for found in zip(*last, strict=True)]


def test_each_draft_model_has_its_own_acceptance_and_its_own_length() -> None:
    cell = Cell(LAWS["rows cost"], drafts=2)
    for number in range(8):
        cell.submit(draft=number % 2)
    lengths = cell.settle({0: 0.97, 1: 0.05})
    assert all(length >= 2 for length in lengths[::2])
    assert all(length == 0 for length in lengths[1::2])
    good, poor = (draft.figures.acceptance.chances[0] for draft in cell.drafts)
    assert good > 0.9
    assert poor < 0.35


@pytest.mark.parametrize("shared_device", [False, True])
def test_a_draft_that_takes_the_targets_time_must_gain_more(shared_device: bool) -> None:
    """Two batches take turns: 11 ms of a target and 8 ms of a draft for 1.6 tokens, beside each other or one by one."""
    cell = Cell(Law(0.010, 0.0002, 0.008, 0.0002), batch_size=4, shared_device=shared_device)
    for _ in range(8):
        cell.submit()
    assert any(cell.settle({0: 0.6})) is not shared_device


@pytest.mark.parametrize(("verification", "length"), [(0.0019, None), (0.0041, 1), (0.0101, 4), (0.1, LONGEST)])
def test_proposals_are_prepared_as_long_as_a_verification_leaves_time_for(
    verification: float, length: int | None
) -> None:
    """Passes of 1 ms, and outcomes that cost as much again."""
    law = Law(verification - 1e-5, 1e-5, 0.001, 0.00001)
    cell = Cell(law, draft_ahead=1000)
    cell.submit()
    cell.settle({0: 0.9})
    preparation = cell.controller.preparation(cell.drafts[0], {cell.target}, 1)
    assert (None if preparation is None else preparation.length) == length
