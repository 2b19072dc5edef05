"""What universal numerics cost on this CPU: steps of a target with weights in 16 bits, in turns with the same target
without them. In JSON: times of a step, and speeds beside the fast ones (docs/exactness.md, universal numerics).

    python -m bench.record numerics -- python -m bench.numerics
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from rich.progress import track

from bench.step_times import PAGES, step_times
from spool.engine.cpu.isa import AUTO, CPU_ISAS
from spool.engine.demo.build import build_demo_models
from spool.engine.models.loading import load_target_engine
from spool.engine.models.source import DemoPart
from spool.engine.settings import EngineSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model's folder; without it, the demo's")
    parser.add_argument("--cpu-isa", choices=CPU_ISAS, default=AUTO)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    folder = Path(options.target or build_demo_models(lambda *_: None, [DemoPart.TARGET])[DemoPart.TARGET])
    settings = {"quantization": "none", "cpu_isa": options.cpu_isa, "threads": options.threads, "kv_pages": PAGES}
    engines = {
        numerics: load_target_engine(EngineSettings(str(folder), numerics=numerics, **settings), lambda *_: None)
        for numerics in ("auto", "universal")
    }
    turns = [
        {numerics: step_times(engine) for numerics, engine in engines.items()}
        for _ in track(range(options.turns), "turns")
    ]
    found = {}
    for name in turns[0]["auto"]:
        ratios = sorted(turn["auto"][name] / turn["universal"][name] for turn in turns)
        times = {numerics: 1000 * median(turn[numerics][name] for turn in turns) for numerics in engines}
        spread = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        found[name] = {"milliseconds": times, "speed": median(ratios), "quartiles": spread}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
