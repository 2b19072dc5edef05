"""The command line of `python -m bench.gpu all`: everything there is to find out about a GPU, in one folder.

Each part is a process of its own with a log of its own; one that fails or takes too long costs the others nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.device import check_device, default_device, describe_used
from bench.gpu.exactness_command import FAMILIES
from bench.gpu.results import write_json
from bench.record import origin
from engine.models.source import CACHE_VARIABLE

_DESCRIPTION = "Compiles, tests, compares and measures on one device."
_ROOT = Path(__file__).parents[2]
_TESTS = "tests/engine/test_gpu_engine.py"
_BATCH_SIZES = ("--batch-size", "1", "--batch-size", "8", "--batch-size", "32")


@dataclass(frozen=True, slots=True)
class Part:
    """`needs`: a Python package without which it is left out. `printed`: the file that takes its standard output."""

    name: str
    command: tuple[str, ...]
    needs: str = "torch"
    printed: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ended`: `passed`, `failed`, `out of time` or `left out`."""

    name: str
    ended: str
    reason: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """0 where every part passed or was left out for want of a package."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu all", description=_DESCRIPTION)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, logs and the pair")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--shape", default="qwen3-8b", help="of the pair, as of `measure`")
    parser.add_argument("--dtype", default="bfloat16", help="of the pair, as of `measure`")
    parser.add_argument("--seconds", type=float, default=600, help="for all parts together")
    parser.add_argument("--one-in", type=int, default=1, help="compile one variant in so many")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="whose exactness is tried; default: all")
    parser.add_argument("--tests", default=_TESTS, help="what pytest runs")
    parser.add_argument("measured", nargs="*", help="after --: arguments of `measure`")
    asked = parser.parse_args(arguments)
    device = asked.device or default_device()
    try:
        check_device(device)
    except ValueError as error:
        parser.error(str(error))
    folder: Path = asked.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + asked.seconds
    outcomes: list[Outcome] = []
    for part in parts(folder, device, asked):
        _tell(f"{part.name}: {' '.join(part.command)}")
        outcomes.append(_run(part, folder, deadline))
        _tell(f"{part.name}: {outcomes[-1].ended} after {outcomes[-1].seconds:.0f} s {outcomes[-1].reason}".rstrip())
        found = origin("python -m bench.gpu all", describe_used(device))
        write_json(folder / "summary.json", found | {"parts": [asdict(one) for one in outcomes]})
    print(folder / "summary.json")
    return 0 if all(one.ended in ("passed", "left out") for one in outcomes) else 1


def parts(folder: Path, device: str, asked: argparse.Namespace) -> Iterator[Part]:
    """Short ones first; the last takes what time is left, and keeps what it has."""
    own = ("-m", "bench.gpu")
    pair = (str(folder / "pair"), "--shape", asked.shape, "--dtype", asked.dtype, "--device", device)
    yield Part("compile", (*own, "compile", "--json", "--one-in", str(asked.one_in)), "triton", "compile.json")
    # By themselves: what tests/conftest.py prepares is for machines with all of Spool.
    yield Part("tests", ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", asked.tests), "pytest")
    families = [word for family in asked.family or () for word in ("--family", family)]
    yield Part("exactness", (*own, "exactness", "--device", device, *families, "-o", str(folder / "exactness.json")))
    yield Part("profile", (*own, "profile", *pair, "-o", str(folder / "profile.json")))
    sizes = () if "--batch-size" in asked.measured else _BATCH_SIZES
    yield Part("measure", (*own, "measure", *pair, *sizes, *asked.measured, "-o", str(folder / "measure.json")))


def _run(part: Part, folder: Path, deadline: float) -> Outcome:
    if importlib.util.find_spec(part.needs) is None:
        return Outcome(part.name, "left out", f"the Python package {part.needs} is not installed", 0.0)
    started = time.monotonic()
    environment = os.environ | {CACHE_VARIABLE: str(folder / "cache")}
    log = folder / f"{part.name}.log"
    with log.open("wb") as told, (folder / part.printed if part.printed else Path(os.devnull)).open("wb") as printed:
        try:
            ended = subprocess.run(
                [sys.executable, *part.command],
                cwd=_ROOT,
                env=environment,
                stdout=printed if part.printed else told,
                stderr=told,
                timeout=max(0.0, deadline - started),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(part.name, "out of time", f"see {log.name}", time.monotonic() - started)
    passed = ended.returncode == 0
    reason = "" if passed else f"exit code {ended.returncode}, see {log.name}"
    return Outcome(part.name, "passed" if passed else "failed", reason, time.monotonic() - started)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
