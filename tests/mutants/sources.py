"""The modules whose mutants are made: their sources, trees and mutants, each parsed once."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.mutants.operators import Mutant, mutants_of

ROOT = Path(__file__).parents[2]

LOGIC = (
    "scheduler",
    "services/scheduler/epochs.py",
    "services/scheduler/outbox.py",
    "services/scheduler/server.py",
    "services/scheduler/service.py",
    "services/scheduler/session.py",
    "services/scheduler/workers",
    "services/scheduler_client/remote.py",
    "services/scheduler_client/remote_stream.py",
    "services/scheduler_client/session.py",
    "services/worker/executor.py",
    "services/worker/kv_fetch.py",
    "services/worker/kv_pages.py",
    "services/worker/queue.py",
    "services/worker/registration.py",
    "services/worker/sequences.py",
    "services/worker/server.py",
    "services/worker/step_streams.py",
)
"""Files and folders: the scheduler core, and what the services do between a client and a worker's engine."""


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Module:
    """One module of the product."""

    file: Path
    source: str = field(repr=False)

    @property
    def path(self) -> str:
        """Relative to the repository."""
        return str(self.file.relative_to(ROOT))

    @property
    def name(self) -> str:
        return ".".join(self.file.relative_to(ROOT).with_suffix("").parts)

    @cached_property
    def digest(self) -> str:
        return digest(self.source)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.file))

    @cached_property
    def mutants(self) -> list[Mutant]:
        return mutants_of(self.tree)

    def name_of(self, mutant: Mutant) -> str:
        """Unique among all mutants of all modules."""
        return f"{self.name}:{mutant.name}"


def modules_of(paths: tuple[str, ...]) -> list[Module]:
    """Of files and folders relative to the repository. FileNotFoundError for one that is not there."""
    files = []
    for path in paths:
        place = ROOT / path
        if not place.exists():
            raise FileNotFoundError(f"{place} does not exist")
        files += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    sources = [(file, file.read_text(encoding="utf-8")) for file in files]
    return [Module(file, source) for file, source in sources if source.strip()]
