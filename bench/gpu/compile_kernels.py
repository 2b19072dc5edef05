"""The command line of `python -m bench.gpu compile`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.gpu.kernel_builds import ARCHITECTURES, DTYPES, Build, build, variants

_DESCRIPTION = "Compiles the GPU kernels for every shape of the supported models; needs no GPU."


def main(arguments: Sequence[str]) -> int:
    """0 where all variants compile, spill no more than `MAX_SPILLED` and fit into shared memory; else 1. A line on
    standard error for each architecture, dtype and head dimension as soon as it is done."""
    asked = _parser().parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("bench.gpu: TRITON_INTERPRET is 1, with which Triton compiles nothing; unset it", file=sys.stderr)
        return 1
    wanted = list(variants(tuple(asked.architecture or ARCHITECTURES)))[:: asked.one_in]
    builds: list[Build] = []
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        for _, group in itertools.groupby(pool.map(build, wanted), _group):
            done = list(group)
            builds += done
            _tell(f"{len(builds):4} of {len(wanted)}: {_line(done)}")
            for one in done:
                if one.fault:
                    _tell(f"  {one.variant}: {one.fault}")
    faults = sum(bool(one.fault) for one in builds)
    _tell(f"{len(builds)} variants, {faults} of no use")
    if asked.json:
        print(json.dumps({"faults": faults, "builds": [one.to_json() for one in builds]}))
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu compile", description=_DESCRIPTION)
    parser.add_argument(
        "--architecture", type=int, action="append", choices=sorted(ARCHITECTURES), help="90 for sm_90; default: all"
    )
    parser.add_argument("--one-in", type=_positive, default=1, help="compile one variant in so many; default: all")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count(), help="processes; default: one for each core")
    parser.add_argument("--json", action="store_true", help="every variant as JSON, on one line of standard output")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _group(one: Build) -> tuple[int, str, int]:
    return one.variant.architecture, one.variant.dtype, one.variant.head_dim


def _line(builds: Sequence[Build]) -> str:
    """Of one architecture, dtype and head dimension: the largest numbers, and the lowest occupancy."""
    architecture, dtype, head_dim = _group(builds[0])
    return (
        f"sm_{architecture}, {DTYPES[dtype][0]}, head_dim {head_dim}: at most {max(one.registers for one in builds)} "
        f"registers, {max(one.spilled for one in builds)} bytes spilled, "
        f"{max(one.shared_memory for one in builds) / 1024:.1f} KiB of shared memory, "
        f"occupancy from {min(one.occupancy for one in builds):.0%}"
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
