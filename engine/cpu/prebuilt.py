"""The libraries in a wheel: setup.py writes them with a manifest, and a host that has installed the wheel needs no
compiler.

Like what it imports, free of torch and of installed packages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from spool.engine.cpu.compiler import ELEMENTS, CompilationError, Flavour, digest, find_compiler
from spool.engine.cpu.isa import builds_for

COMPILED = Path(__file__).with_name("compiled")
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled library. `identity` names its sources, the compiler, its options and the dtype; hexadecimal digits."""

    path: Path
    identity: str


def prebuilt_library(flavour: Flavour) -> Library | None:
    """The wheel's; None where Spool was installed without it. Raises CompilationError if it is not what was built."""
    entry = _manifest(COMPILED / MANIFEST).get(flavour.name)
    if entry is None:
        return None
    path = COMPILED / entry["file"]
    if not path.is_file() or digest(path) != entry["sha256"]:
        raise CompilationError(f"{path} is missing or damaged, {MANIFEST} names other content: install the wheel again")
    return Library(path, entry["identity"])


def build_libraries(folder: Path, machine: str, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Compiles for all builds of `machine`, or for those that are named, on all cores. Raises CompilationError."""
    builds = [build for build in builds_for(machine) if not names or build.name in names]
    if unknown := set(names) - {build.name for build in builds}:
        known = ", ".join(build.name for build in builds_for(machine))
        raise CompilationError(f"no build of {machine} is called {', '.join(sorted(unknown))}; there are {known}")
    compiler = find_compiler()
    if not compiler.compiles_for(machine):
        raise CompilationError(f"{' '.join(compiler.command)} does not compile for {machine}: set CC")
    flavours = [Flavour(*which) for which in product(builds, ELEMENTS, (False, True))]
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        # Many are the same to the compiler, for without products of pairs a build is universal anyway.
        texts = threads.map(lambda each: (each.build.options, compiler.preprocessed(each)), flavours)
        first: dict[object, Flavour] = {}
        same = {flavour: first.setdefault(text, flavour) for flavour, text in zip(flavours, texts, strict=True)}
        chosen = first.values()
        work = {threads.submit(compiler.compile, one, folder / f"{one.name}.so"): one for one in chosen}
        for number, done in enumerate(as_completed(work), 1):
            done.result()
            say(f"CPU kernels for {machine}: {number} of {len(chosen)}, {work[done].name}")
    # Code for unlike processors may turn out the same, too: one file is enough.
    digests = {one: digest(folder / f"{one.name}.so") for one in chosen}
    files = {sha256: f"{one.name}.so" for one, sha256 in reversed(digests.items())}
    for path in folder.iterdir():
        if path.name not in files.values():
            path.unlink()
    manifest = {
        flavour.name: {
            "file": files[digests[one]],
            "identity": compiler.identity(flavour),
            "sha256": digests[one],
        }
        for flavour, one in same.items()
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="ascii")


def _manifest(path: Path) -> dict[str, dict[str, str]]:
    try:
        found: dict[str, dict[str, str]] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return found
