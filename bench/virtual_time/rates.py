"""Tokens per virtual second of a cell with known costs: the oracle for what AUTO decides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from bench.virtual_time.luck import AcceptanceOf
from bench.virtual_time.virtual_cell import Costs, VirtualCell
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import (
    Command,
    EmitTokens,
    FailSequence,
    FinishSequence,
    RefuseSequence,
    Role,
    SequenceRequest,
    SequenceSubmitted,
)
from scheduler.statistics import Snapshot

_ENDLESS = 90_000
_PROMPT_LENGTHS = (5, 30, 12, 60)

FLAT = Costs(base=0.005, row=0.00002, draft_base=0.0008, draft_row=0.000005)
"""Like a GPU: rows are nearly free."""
STEEP = Costs(base=0.004, row=0.0025, draft_base=0.0008, draft_row=0.0001)
"""Every verified row costs: drafting pays for few rows that are nearly always right."""
CPU = Costs(base=0.015, row=0.0007, draft_base=0.003, draft_row=0.0002)
"""As measured on two cores with a model of 135 million parameters and a draft of a quarter of its layers."""
SHARED_CPU = Costs(base=0.0165, row=0.0008, draft_base=0.0025, draft_row=0.0002, row_alone=0.0004)
"""The same, where exclusive steps compute on both cores: less for a row, but reading weights takes as long."""
KERNELS = Costs(base=0.0075, row=0.0006, draft_base=0.0025, draft_row=0.0001, row_alone=0.00033)
"""Shared cores again, with kernels of our own for the linear layers and attention."""
SLOW_DRAFT = Costs(base=0.010, row=0.0002, draft_base=0.006, draft_row=0.0002)
"""A pass of the draft takes more than half of one of the target."""


@dataclass(frozen=True)
class Measured:
    """Committed tokens per virtual second: after the learning, and from the start."""

    rate: float
    rate_from_start: float
    snapshot: Snapshot
    disturbed_steps: int
    """Exclusive steps during which another worker computed."""
    other_steps: int
    """Steps that verify nothing: those of drafts."""
    verify_steps: int


class RateSimulation(VirtualCell):
    """Sequences that never end, or that another one follows."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        acceptance: AcceptanceOf,
        seed: int = 0,
        ranks: tuple[float, ...] = (),
    ) -> None:
        super().__init__(config, costs, acceptance, seed, ranks)
        self.emitted_tokens = 0
        self._submissions: dict[int, tuple[int, int | None, int | None]] = {}
        self._last_id = -1

    def submit(
        self, sequence_id: int, prompt_length: int, draft_length: int | None, output_tokens: int | None = None
    ) -> None:
        """With `output_tokens` another sequence of the same kind comes for each that ends."""
        self._last_id = max(self._last_id, sequence_id)
        self._submissions[sequence_id] = prompt_length, draft_length, output_tokens
        most = _ENDLESS if output_tokens is None else output_tokens
        # No two prompts begin alike: nothing is found in prefix caches.
        prompt = (sequence_id + 1,) * prompt_length
        self.tell(SequenceSubmitted(SequenceRequest(sequence_id, prompt, most, draft_length=draft_length)))

    def asked(self, worker_id: str) -> Counter[int]:
        """How many proposals of which length a draft was asked for."""
        return self.workers[worker_id].asked

    @property
    def rounds(self) -> int:
        return sum(self.core.snapshot().draft_lengths.values())

    def delivered(self, command: Command) -> None:
        match command:
            case EmitTokens():
                self.emitted_tokens += len(command.tokens)
            case FinishSequence():
                # An event of its own, so that the other commands are carried out before those that follow from it.
                again = self._submissions.pop(command.sequence_id)
                self.at(self.now, partial(self._submit_next, *again))
            case FailSequence() | RefuseSequence():
                raise AssertionError(command)

    def _submit_next(self, prompt_length: int, draft_length: int | None, output_tokens: int | None) -> None:
        self.submit(self._last_id + 1, prompt_length, draft_length, output_tokens)


def rate_of(
    costs: Costs,
    acceptance: AcceptanceOf,
    *,
    policy: Policy,
    draft_length: int,
    batch_size: int,
    sequences: int,
    requested: int | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    tokens_each: int = 300,
    learning: int = 60,
    targets: int = 1,
    drafts: int = 1,
    seed: int = 0,
    draft_ahead: int = 0,
    ranks: tuple[float, ...] = (),
) -> Measured:
    """Runs until there are `tokens_each` for every one of the first sequences on average.

    None ends, or each after `output_tokens`, and then another one comes.

    The learning is the first `learning` tokens of that. `requested` is the draft length that the requests ask for.
    """
    window = max(sequences, batch_size)
    config = SchedulerConfig(
        batch_size=batch_size, max_running=window, policy=policy, draft_length=draft_length, draft_ahead=draft_ahead
    )
    simulation = RateSimulation(config, costs, acceptance, seed, ranks)
    for index in range(targets):
        simulation.join(f"target{index}", Role.TARGET)
    for index in range(drafts):
        simulation.join(f"draft{index}", Role.DRAFT)
    for sequence_id in range(sequences):
        usual = _PROMPT_LENGTHS[sequence_id % len(_PROMPT_LENGTHS)]
        simulation.submit(sequence_id, usual if prompt_tokens is None else prompt_tokens, requested, output_tokens)
    simulation.run(lambda: simulation.emitted_tokens >= sequences * learning)
    learnt_at, learnt_tokens = simulation.now, simulation.emitted_tokens
    simulation.run(lambda: simulation.emitted_tokens >= sequences * tokens_each)
    return Measured(
        (simulation.emitted_tokens - learnt_tokens) / (simulation.now - learnt_at),
        simulation.emitted_tokens / simulation.now,
        simulation.core.snapshot(),
        simulation.disturbed_steps,
        simulation.other_steps,
        simulation.verify_steps,
    )
