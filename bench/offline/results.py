"""Measurements of `python -m bench.offline`, and their summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.offline.grid import GridPoint
from spool.deploy.offline.decoding import Completion
from spool.deploy.offline.prompts import Prompt


@dataclass(slots=True)
class Domain:
    """Prompts of one category, and the verify passes of their sequences, with the tokens that these committed. The
    pass that reads a prompt does not count, nor does its token."""

    prompts: int = 0
    passes: int = 0
    tokens: int = 0

    def add(self, prompts: int, passes: int, tokens: int) -> None:
        self.prompts += prompts
        self.passes += passes
        self.tokens += tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per verify pass and sequence, as SPEED-Bench counts them: 1 for plain decoding."""
        return self.tokens / self.passes if self.passes else None


def by_domain(prompts: Iterable[Prompt], completions: Iterable[Completion]) -> dict[str, Domain]:
    """In the order in which the categories first come."""
    domains: dict[str, Domain] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        domains.setdefault(prompt.category, Domain()).add(1, completion.passes, completion.passed)
    return domains


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell, measured once.

    `different` has the numbers of the prompts whose output differs from that of batch-1 plain decoding by the same
    software; `exact_match` is the share of the other prompts, `like_spool` that of those whose output is the one of
    Spool's batch-1 plain decoding. `statistics` are the scheduler's, and `domains` say what verify passes have
    committed for the prompts of each category, "" for those without; both are empty for peers.
    """

    point: GridPoint
    repeat: int
    tokens: int
    seconds: float
    exact_match: float
    different: list[int]
    like_spool: float = 0.0
    statistics: dict[str, Any] = field(default_factory=dict)
    domains: dict[str, Domain] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One summary per cell, in the order in which the cells first appear.

    `ratio_to_plain` compares with plain decoding of the same repeat, so that whatever slows the machine for a while
    slows both. `statistics` are those of the last repeat. The acceptance lengths are over all passes of all repeats.
    """
    cells: dict[GridPoint, dict[int, Measurement]] = {}
    for one in measurements:
        cells.setdefault(one.point, {})[one.repeat] = one
    summaries = []
    for point, repeats in cells.items():
        plain = cells.get(point.baseline, {})
        ratios = [
            one.tokens_per_second / plain[repeat].tokens_per_second
            for repeat, one in repeats.items()
            if repeat in plain
        ]
        last = repeats[max(repeats)]
        summaries.append(
            {
                "name": str(point),
                "point": asdict(point),
                "repeats": len(repeats),
                "tokens_per_second": _spread([one.tokens_per_second for one in repeats.values()]),
                "ratio_to_plain": _spread(ratios) if ratios else None,
                "exact_match": min(one.exact_match for one in repeats.values()),
                "like_spool": min(one.like_spool for one in repeats.values()),
                **_acceptance(list(repeats.values())),
                "statistics": last.statistics,
            }
        )
    return summaries


def cell_line(cell: dict[str, Any]) -> str:
    """A cell in words: medians of the repeats, with minimum and maximum."""
    counts, ratio = cell["statistics"], cell["ratio_to_plain"]
    parts = [f"{_shown(cell['tokens_per_second'], 1)} tokens/s"]
    parts += [] if ratio is None else [f"{_shown(ratio, 2)} times plain"]
    parts.append(f"same output {cell['exact_match']:.1%}")
    if counts and counts["drafted"]:
        parts.append(f"{counts['committed_per_round']:.2f} tokens a round, accepted {counts['acceptance_rate']:.0%}")
    return f"{cell['name']}: {', '.join(parts)}"


def domain_line(cell: dict[str, Any]) -> str | None:
    """The acceptance length of each category in words; None of a cell that has at most one."""
    domains = cell["domains"]
    if len(domains) < 2:
        return None
    lengths = (f"{name or 'others'} {domain['acceptance_length'] or 0:.2f}" for name, domain in domains.items())
    return f"  acceptance length {cell['acceptance_length'] or 0:.2f}: {', '.join(lengths)}"


def _acceptance(repeats: Sequence[Measurement]) -> dict[str, Any]:
    domains: dict[str, Domain] = {}
    for one in repeats:
        for name, domain in one.domains.items():
            known = domains.setdefault(name, Domain(domain.prompts))
            known.add(0, domain.passes, domain.tokens)
    whole = Domain()
    for domain in domains.values():
        whole.add(domain.prompts, domain.passes, domain.tokens)
    shown = {
        name: {"prompts": one.prompts, "acceptance_length": one.acceptance_length} for name, one in domains.items()
    }
    return {"acceptance_length": whole.acceptance_length, "domains": shown}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "minimum": min(values), "maximum": max(values)}


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['minimum']:.{digits}f}-{spread['maximum']:.{digits}f})"
