"""What several ranks cost on one CPU: steps of one rank and of several in turns, a thread each. JSON on the last line.

    python -m bench.cpu.ranks --ranks 2

The model has random weights and nearly the demo target's shape. `exchanges` are the milliseconds that rank 0 spends in
each kind of exchange in a step, waiting for slower ranks included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.step_parts import SHAPES, Batch
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from engine.target import TargetEngine
from services.worker.gang import Gang

_STEPS = 60
_EXCHANGES = {"tell": "orders", "total": "sums", "side_by_side": "logits"}


def write_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


class Exchanges:
    """Seconds that rank 0 of an engine spends in each kind of exchange."""

    def __init__(self, engine: TargetEngine) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        lead = engine._runner.lead
        if lead is not None:
            for name, kind in _EXCHANGES.items():
                setattr(lead.ranks, name, self._timed(getattr(lead.ranks, name), kind))

    def _timed(self, exchange: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = exchange(*arguments)
            self.seconds[kind] += time.perf_counter() - started
            return result

        return timed


def measured(engine: TargetEngine, exchanges: Exchanges, shape: tuple[int, int]) -> dict[str, Any]:
    """Median milliseconds of a step of `shape`, sequences and rows of each, and what exchanges take of it."""
    batch = Batch(engine, *shape)
    for _ in range(_STEPS // 6):
        batch.step()
    exchanges.seconds.clear()
    seconds = []
    for _ in range(_STEPS):
        started = time.perf_counter()
        batch.step()
        seconds.append(time.perf_counter() - started)
    batch.free()
    found = {kind: 1000 * total / _STEPS for kind, total in exchanges.seconds.items()}
    return {"step": 1000 * statistics.median(seconds), "exchanges": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        engines = {}
        for ranks in (1, arguments.ranks):
            settings = EngineSettings(folder, threads=1, kv_pages=1024, exact=False, tensor_parallel_size=ranks)
            start = Gang(settings).start if ranks > 1 else None
            engine = load_target_engine(settings, lambda *_: None, start)
            engines[ranks] = (engine, Exchanges(engine))
        steps = []
        for shape in SHAPES:
            taken = {ranks: measured(engine, exchanges, shape) for ranks, (engine, exchanges) in engines.items()}
            steps.append({"sequences": shape[0], "rows_each": shape[1], "ranks": taken})
            print(f"{shape[0]} x {shape[1]} rows: {taken}", file=sys.stderr)
    print(json.dumps({"steps": steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
