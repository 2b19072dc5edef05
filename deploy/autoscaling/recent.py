"""From readings of a scheduler's counters to figures of the last seconds. No clock: every reading says when it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.autoscaling.capacity import CellFigures, bounded_stretch, round_law

# Rates are of this time; what one sequence asks for is told by a longer one.
RATE_SECONDS = 10.0
KEPT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A scheduler at one moment; `time` is monotonic, in seconds.

    Totals since its start: sequences `arrived` and `ended`, `tokens` delivered in so many `deliveries`, of them
    `accepted` tokens out of `drafted` ones. Now: `decoding`, `running` (those and what is prefilled) and `waiting`
    sequences, workers and the shares of them that have a step. Step times and `room` as in `CellFigures`.
    """

    time: float
    arrived: int = 0
    ended: int = 0
    tokens: int = 0
    deliveries: int = 0
    drafted: int = 0
    accepted: int = 0
    decoding: int = 0
    running: int = 0
    waiting: int = 0
    targets: int = 0
    drafts: int = 0
    target_busy: float = 0.0
    draft_busy: float = 0.0
    acceptance: float = math.nan
    target_base: float = math.nan
    target_row: float = math.nan
    draft_pass: float = math.nan
    draft_row: float = math.nan
    room: float = math.nan


def add_reading(readings: tuple[Reading, ...], reading: Reading) -> tuple[Reading, ...]:
    """The readings to keep: none that is older than is asked for."""
    kept = [one for one in readings if reading.time - KEPT_SECONDS <= one.time <= reading.time]
    return (*kept, reading)


def figures_of(readings: Sequence[Reading], batch_size: int, draft_length: int) -> CellFigures:
    """Of at least one reading, in the order of their times. `draft_length` is the longest that is drafted."""
    now, first = readings[-1], readings[0]
    begin = _at(readings, now.time - RATE_SECONDS)
    recent = [one for one in readings if one.time >= begin.time]
    seconds = now.time - begin.time
    rounds_begin = begin if now.deliveries > begin.deliveries else first
    rounds = now.deliveries - rounds_begin.deliveries
    tokens_per_second = _quotient(now.tokens - begin.tokens, seconds)
    tokens_per_sequence = _quotient(now.tokens - first.tokens, now.ended - first.ended, math.nan)
    arriving = _quotient(now.arrived - begin.arrived, seconds) * tokens_per_sequence
    decoding = sum(one.decoding for one in recent) / len(recent)
    figures = CellFigures(
        targets=now.targets,
        drafts=now.drafts,
        running=now.running,
        waiting=now.waiting,
        growth=_steady_growth(readings),
        tokens_per_second=tokens_per_second,
        offered_tokens_per_second=max(tokens_per_second, 0.0 if math.isnan(arriving) else arriving),
        tokens_per_sequence=tokens_per_sequence,
        seconds_per_token=_quotient(decoding, tokens_per_second, math.nan),
        acceptance=now.acceptance,
        drafted_per_round=_quotient(now.drafted - rounds_begin.drafted, rounds),
        accepted_per_round=_quotient(now.accepted - rounds_begin.accepted, rounds),
        target_base=now.target_base,
        target_row=now.target_row,
        draft_pass=now.draft_pass,
        draft_row=now.draft_row,
        batch_size=batch_size,
        draft_length=draft_length,
        room=now.room,
        target_busy=sum(one.target_busy for one in recent) / len(recent),
        draft_busy=sum(one.draft_busy for one in recent) / len(recent),
    )
    return replace(figures, stretch=_stretch(figures, decoding))


def _stretch(figures: CellFigures, decoding: float) -> float:
    """How many times as long a token takes as the laws say, as far as the targets are to blame: while they work."""
    law = round_law(figures, figures.drafted_per_round)
    if law is None or not figures.targets or not math.isfinite(figures.seconds_per_token) or decoding <= 0:
        return 1.0
    expected = law.seconds(max(1.0, decoding / figures.targets)) / (1.0 + figures.accepted_per_round)
    measured = bounded_stretch(_quotient(figures.seconds_per_token, expected, 1.0))
    return 1.0 + (measured - 1.0) * figures.target_busy


def _steady_growth(readings: Sequence[Reading]) -> float:
    """Sequences a second that there are more, as far as both halves of the time agree: a step is no trend."""
    now = readings[-1]
    half = RATE_SECONDS / 2
    middle, begin = _at(readings, now.time - half), _at(readings, now.time - RATE_SECONDS)
    if begin.time > now.time - 0.9 * RATE_SECONDS:
        return 0.0
    counts = [one.running + one.waiting for one in (begin, middle, now)]
    return max(0.0, min(counts[1] - counts[0], counts[2] - counts[1])) / half


def _at(readings: Sequence[Reading], time: float) -> Reading:
    """The first one that is not before that time."""
    return next((one for one in readings if one.time >= time), readings[-1])


def _quotient(part: float, whole: float, otherwise: float = 0.0) -> float:
    return part / whole if whole > 0 else otherwise
