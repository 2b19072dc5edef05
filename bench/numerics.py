"""What universal numerics cost on this CPU: steps of a target with weights in 16 bits, in turns with the same target
without them. In JSON: times of a step, and speeds beside the fast ones (docs/exactness.md, universal numerics).

    python -m bench.record numerics -- python -m bench.numerics
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

from rich.progress import track

from spool.engine.cpu.isa import AUTO, CPU_ISAS
from spool.engine.demo.build import build_demo_models
from spool.engine.kv.pages import PageTable
from spool.engine.models.loading import load_target_engine
from spool.engine.settings import EngineSettings
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.messages import Role
from spool.scheduler.sampling import SamplingParameters

_PROMPT = [(7 * place * place + 3) % 40_000 for place in range(512)]
_CHUNK, _HISTORY, _STEPS = 128, 100, 12
_BATCHES = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model's folder; without it, the demo's")
    parser.add_argument("--cpu-isa", choices=CPU_ISAS, default=AUTO)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    folder = Path(options.target or build_demo_models(lambda *_: None)[Role.TARGET])
    settings = {"quantization": "none", "cpu_isa": options.cpu_isa, "threads": options.threads, "kv_pages": 128}
    engines = {
        numerics: load_target_engine(EngineSettings(str(folder), numerics=numerics, **settings), lambda *_: None)
        for numerics in ("auto", "universal")
    }
    turns = [
        {numerics: _seconds(engine) for numerics, engine in engines.items()}
        for _ in track(range(options.turns), "turns")
    ]
    found = {}
    for name in turns[0]["auto"]:
        ratios = sorted(turn["auto"][name] / turn["universal"][name] for turn in turns)
        times = {numerics: 1000 * median(turn[numerics][name] for turn in turns) for numerics in engines}
        spread = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        found[name] = {"milliseconds": times, "speed": median(ratios), "quartiles": spread}
    print(json.dumps(found))


def _seconds(engine: TargetEngine) -> dict[str, float]:
    return {f"decoding, batch {batch}": _decoding(engine, batch) for batch in _BATCHES} | {"prefill": _prefill(engine)}


def _decoding(engine: TargetEngine, batch: int) -> float:
    tables = [PageTable() for _ in range(batch)]
    engine.step([_row(table, _PROMPT[:_HISTORY]) for table in tables])
    began = time.perf_counter()
    for step in range(_STEPS):
        engine.step([_row(table, _PROMPT[step : step + 1]) for table in tables])
    return _freed(engine, tables, (time.perf_counter() - began) / _STEPS)


def _prefill(engine: TargetEngine) -> float:
    table, began = PageTable(), time.perf_counter()
    for first in range(0, len(_PROMPT), _CHUNK):
        engine.step([_row(table, _PROMPT[first : first + _CHUNK])])
    return _freed(engine, [table], time.perf_counter() - began)


def _row(table: PageTable, tokens: list[int]) -> VerifyRow:
    return VerifyRow(table, tokens, (), True, tokens, len(tokens), SamplingParameters())


def _freed(engine: TargetEngine, tables: list[PageTable], seconds: float) -> float:
    for table in tables:
        engine.pool.free(table)
    return seconds


if __name__ == "__main__":
    main()
