"""What became of each mutant: kept line by line, so that a run that was ended goes on, and counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.checks import STAGES, Check, stage_of
from tests.mutants.operators import Mutant
from tests.mutants.sources import Module, digest

SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`end`: how `killer`, a check, has killed the mutant ("failed", "time", "hang" or "crash"), or "survived".

    `module` and `checks` are digests: of the mutated module, and of the check that killed or of all that did not.
    """

    mutant: str
    line: int
    end: str
    killer: str
    seconds: float
    module: str
    checks: str

    @property
    def killed(self) -> bool:
        return self.end != SURVIVED


def digest_of(checks: Sequence[Check]) -> str:
    return digest(" ".join(f"{check.name} {check.digest}" for check in sorted(checks, key=lambda check: check.name)))


class Outcomes:
    """In a file to which one line is appended for each; the last one of a mutant counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._by_mutant: dict[str, Outcome] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                outcome = Outcome(**json.loads(line))
                self._by_mutant[outcome.mutant] = outcome

    def add(self, outcome: Outcome) -> None:
        self._by_mutant[outcome.mutant] = outcome
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    def valid(self, mutant: str, module: Module, checks: Sequence[Check]) -> Outcome | None:
        """What is known of a mutant, unless its module has changed, or the checks that killed it or could not."""
        outcome = self._by_mutant.get(mutant)
        if outcome is None or outcome.module != module.digest:
            return None
        relevant = [check for check in checks if check.name == outcome.killer] if outcome.killed else checks
        return outcome if outcome.checks == digest_of(relevant) else None


Judged = Sequence[tuple[Module, Mutant, Outcome]]


def summary(modules: Sequence[Module], judged: Judged, equivalents: Mapping[str, str], seed: int) -> dict[str, Any]:
    """The figures of a run: by stage, by module, and the names of those that live."""
    made = sum(len(module.mutants) for module in modules)
    counted = [outcome for _, _, outcome in judged if outcome.mutant not in equivalents]
    killed = sum(outcome.killed for outcome in counted)
    by_module: dict[str, dict[str, Any]] = {}
    for module in modules:
        own = [outcome for place, _, outcome in judged if place is module]
        rest = [outcome for outcome in own if outcome.mutant not in equivalents]
        dead = Counter(stage_of(outcome.killer) for outcome in rest if outcome.killed)
        by_module[module.path] = {
            "made": len(module.mutants),
            "run": len(own),
            "killed_by": {stage: dead[stage] for stage in STAGES},
            "survived": sum(not outcome.killed for outcome in rest),
            "equivalent": len(own) - len(rest),
        }
    return {
        "seed": seed,
        "seconds_of_each_stage": STAGES,
        "made": made,
        "run": len(judged),
        "equivalent": len(judged) - len(counted),
        "killed": killed,
        "survived": len(counted) - killed,
        "share_killed": share(killed, len(counted)),
        **({"confidence_95": interval(killed, len(counted))} if len(judged) < made and counted else {}),
        "killed_by": {stage: sum(found["killed_by"][stage] for found in by_module.values()) for stage in STAGES},
        "ends": dict(Counter(outcome.end for outcome in counted).most_common()),
        "processor_seconds": round(sum(outcome.seconds for _, _, outcome in judged)),
        "by_module": {path: found for path, found in by_module.items() if found["made"]},
        "survivors": [outcome.mutant for outcome in counted if not outcome.killed],
        "equivalents": {o.mutant: equivalents[o.mutant] for _, _, o in judged if o.mutant in equivalents},
    }


def share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def interval(killed: int, run: int) -> list[float]:
    """Wilson's, for the share of all mutants by a random sample of them."""
    from scipy.stats import binomtest

    low, high = binomtest(killed, run).proportion_ci(0.95, method="wilson")
    return [round(float(low), 4), round(float(high), 4)]
