"""How fast targets are at a given number of sequences, taken from the scheduler's real core in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from bench.virtual_time.rates import RateSimulation
from deploy.planning.hardware import ReplicaKind, replica_kind
from deploy.planning.virtual_cell import Costs
from scheduler.config import SchedulerConfig
from scheduler.messages import Role

Floats = NDArray[np.float64]

TARGETS_PER_DRAFT = 4
MAX_RUNNING = 128
"""Running sequences for each target; more wait."""
BATCH_SIZE = 64
DRAFT_LENGTH = 6
PREFILL_CHUNK = 512
ACCEPTANCE = 0.7
LOADS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sequences on each target."""
_WIRE_SECONDS = 0.0002
_JITTER = 0.02
_LEARNING, _COUNTED = 60, 180
"""Tokens of a sequence, on average."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica of the target and one of the draft, each on a GPU of its own."""

    target: ReplicaKind
    draft: ReplicaKind

    @property
    def costs(self) -> Costs:
        """Without the scheduler's own time."""
        return Costs(
            base=self.target.step,
            row=self.target.token,
            draft_base=self.draft.step,
            draft_row=self.draft.token,
            latency=_WIRE_SECONDS,
            jitter=_JITTER,
            kv=self.target.kv_token,
            draft_kv=self.draft.kv_token,
        )


def h100_pair() -> Hardware:
    """Models of 8B and 0.6B parameters in bfloat16, with the shares of the data sheets that `spool plan` assumes."""
    shares = {"bandwidth_share": 0.8, "operations_share": 0.5}
    return Hardware(
        replica_kind("h100", 8e9, 2, 131072, 1, 1.0, **shares), replica_kind("h100", 6e8, 2, 114688, 1, 1.0, **shares)
    )


def config(targets: int) -> SchedulerConfig:
    return SchedulerConfig(
        batch_size=BATCH_SIZE,
        max_running=MAX_RUNNING * targets,
        draft_length=DRAFT_LENGTH,
        prefill_chunk=PREFILL_CHUNK,
        max_queued_sequences=10**6,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured with `sequences` on each target, none of them prefilling.

    A target commits `tokens` a second in `rounds` of single sequences, for which `drafted` tokens are proposed in
    `proposals`; it computes for the share `busy` of the time, in steps of `step_seconds`. `target_base`, `target_row`,
    `draft_pass` and `draft_row` are seconds that the scheduler has learnt, `acceptance` the chance of a draft token.
    """

    sequences: float
    tokens: float
    rounds: float
    drafted: float
    proposals: float
    busy: float
    step_seconds: float
    target_base: float
    target_row: float
    draft_pass: float
    draft_row: float
    acceptance: float


def measure(hardware: Hardware, sequences: int, context: int, targets: int = TARGETS_PER_DRAFT) -> Load:
    """Targets with one draft in virtual time, all sequences with `context` tokens of KV on average."""
    cell = RateSimulation(config(targets), hardware.costs, lambda _id, _position: ACCEPTANCE)
    for number in range(targets):
        cell.join(f"target{number}", Role.TARGET)
    cell.join("draft", Role.DRAFT)
    count = sequences * targets
    prompt = max(1, context - (_LEARNING + _COUNTED) // 2)
    for sequence in range(count):
        cell.submit(sequence, prompt, None)
    cell.run(lambda: cell.emitted_tokens >= count * _LEARNING)
    began, tokens, steps, rounds = cell.now, cell.emitted_tokens, cell.verify_steps, cell.rounds
    busy, asked = _busy(cell), cell.asked("draft").copy()
    cell.run(lambda: cell.emitted_tokens >= count * _COUNTED)
    seconds = cell.now - began
    snapshot = cell.core.snapshot()
    target = next(one for one in snapshot.workers if one.role is Role.TARGET)
    draft = next(one for one in snapshot.workers if one.role is Role.DRAFT)
    computed = _busy(cell) - busy
    asked = cell.asked("draft") - asked
    return Load(
        sequences=sequences,
        tokens=(cell.emitted_tokens - tokens) / seconds / targets,
        rounds=(cell.rounds - rounds) / seconds / targets,
        drafted=sum(length * number for length, number in asked.items()) / seconds / targets,
        proposals=asked.total() / seconds / targets,
        busy=min(1.0, computed / seconds / targets),
        step_seconds=computed / max(1, cell.verify_steps - steps),
        target_base=target.base_seconds,
        target_row=target.row_seconds,
        draft_pass=draft.base_seconds,
        draft_row=draft.row_seconds,
        acceptance=snapshot.acceptance,
    )


def _busy(cell: RateSimulation) -> float:
    return sum(worker.busy_seconds for worker in cell.workers.values() if worker.spec.role is Role.TARGET)


class Speeds:
    """What was measured, in between by straight lines, and beyond the last load as at that one."""

    def __init__(self, loads: Sequence[Load], prefill_token_seconds: float) -> None:
        """`prefill_token_seconds`: what a token of a prompt adds to a step."""
        self.loads = tuple(loads)
        self._prefill_token = prefill_token_seconds
        self._at = np.array([0.0, *(load.sequences for load in loads)])
        self._columns = {field.name: self._column(field.name) for field in fields(Load)}

    def _column(self, name: str) -> Floats:
        values = [float(getattr(load, name)) for load in self.loads]
        first = 0.0 if name in ("tokens", "rounds", "drafted", "proposals", "busy") else values[0]
        return np.array([first, *values])

    def of(self, name: str, sequences: Floats) -> Floats:
        """A field of `Load`, by sequences on a target."""
        return np.interp(sequences, self._at, self._columns[name])

    def prefill(self, sequences: Floats) -> Floats:
        """Tokens a second that a target can prefill beside so many sequences that decode: a chunk with every step."""
        step = np.where(sequences > 0, self.of("step_seconds", sequences), self.loads[0].step_seconds)
        return PREFILL_CHUNK / (step + PREFILL_CHUNK * self._prefill_token)

    def slowed(self, prefill: Floats) -> Floats:
        """How fast decoding is beside so many prefilled tokens a second, as a share of its speed without."""
        return np.maximum(1.0 - prefill * self._prefill_token, 0.0)

    def request_rate(self, token_seconds: float, prompt: float, output: float) -> float:
        """Requests a second with which a target takes `token_seconds` a token, in balance. Found by bisection."""
        low, high = 0.0, 1.0 / (prompt * self._prefill_token)
        for _ in range(60):
            middle = (low + high) / 2
            found = self.sequences_at(middle, prompt, output)
            # Each token of n sequences takes n seconds over the tokens that they all get in a second.
            if found is not None and found / (middle * output) <= token_seconds:
                low = middle
            else:
                high = middle
        return low

    def request_rate_limit(self, prompt: float, output: float) -> float:
        """Requests a second that a target can finish, however long their tokens take."""
        most = float(np.max(self._columns["tokens"]))
        return most / (output + most * prompt * self._prefill_token)

    def sequences_at(self, rate: float, prompt: float, output: float) -> float | None:
        """The sequences that decode on a target at so many requests a second; None where it cannot keep up."""
        numbers = np.linspace(0.0, float(MAX_RUNNING), 2049)
        speeds = self.of("tokens", numbers) * self.slowed(np.full_like(numbers, rate * prompt))
        enough = np.flatnonzero(speeds >= rate * output)
        return float(numbers[enough[0]]) if enough.size else None


def measured_speeds(
    hardware: Hardware, context: int, say: Callable[[], None], targets: int = TARGETS_PER_DRAFT
) -> Speeds:
    """`say` is called after each of `LOADS`."""
    loads = []
    for sequences in LOADS:
        loads.append(measure(hardware, sequences, context, targets))
        say()
    return Speeds(loads, hardware.target.token)
