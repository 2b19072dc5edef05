"""What exact mode costs: steps of two engines in turns, one exact and one not. JSON on the last line.

    python -m bench.exact_steps --target demo --threads 2

Throughput of two runs differs by what else the machine does meanwhile; steps next to each other in time differ less,
and many pairs of them say how far to trust their ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bench.step_parts import SHAPES, Batch
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from engine.target import TargetEngine

_WARM_UP = 10


@dataclass(frozen=True)
class ExactPrice:
    """`ratio` is the geometric mean, over pairs, of an exact step's time over the other's; `error` its standard error.

    Times are medians in milliseconds, of the whole step.
    """

    sequences: int
    rows_each: int
    exact_ms: float
    other_ms: float
    ratio: float
    error: float

    @classmethod
    def of(cls, shape: tuple[int, int], exact: Sequence[float], other: Sequence[float]) -> ExactPrice:
        """Of seconds of at least two pairs of steps, pair by pair."""
        logarithms = [math.log(one / two) for one, two in zip(exact, other, strict=True)]
        return cls(
            *shape,
            statistics.median(exact) * 1000,
            statistics.median(other) * 1000,
            math.exp(statistics.mean(logarithms)),
            statistics.stdev(logarithms) / math.sqrt(len(logarithms)),
        )


def price(engines: tuple[TargetEngine, TargetEngine], shape: tuple[int, int], pairs: int) -> ExactPrice:
    """Of at least two pairs of steps of `shape`, sequences and rows of each, on an exact engine and another; who goes
    first alternates."""
    batches = [Batch(engine, *shape) for engine in engines]
    for batch in batches:
        for _ in range(_WARM_UP):
            batch.step()
    taken: list[list[float]] = [[], []]
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            started = time.perf_counter()
            batches[which].step()
            taken[which].append(time.perf_counter() - started)
    for batch in batches:
        batch.free()
    return ExactPrice.of(shape, *taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=200)
    arguments = parser.parse_args()
    settings = EngineSettings(arguments.target, dtype=arguments.dtype, threads=arguments.threads, kv_pages=1024)
    exact, other = (
        load_target_engine(replace(settings, exact=exact), lambda message, _: print(message, file=sys.stderr))
        for exact in (True, False)
    )
    prices = []
    for shape in SHAPES:
        prices.append(price((exact, other), shape, arguments.pairs))
        print(f"{shape[0]} x {shape[1]} rows: {prices[-1].ratio:.3f} +- {prices[-1].error:.3f}", file=sys.stderr)
    print(json.dumps({"threads": arguments.threads, "pairs": arguments.pairs, "steps": [asdict(p) for p in prices]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
