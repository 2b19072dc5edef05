"""How much faster a draft makes decoding on this CPU, by target size, batch and agreement. JSON on the last line.

    python -m bench.record speculation_gain -- python -m bench.speculation_gain

Targets of four sizes in 4 bits, each with a draft of a tenth of its weights in 8 bits, random weights that agree as
often as is asked for (bench/gpu/pair.py). Engines alone, greedy; each draft length has turns with plain decoding.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
from dataclasses import replace

import torch
from rich.console import Console

from bench.gpu.decoding import Stream, decode, free, prefill, prompts
from bench.gpu.pair import SHAPES, Pair
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.models.loading import draft_engine_of, target_engine_of
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine
from spool.services.launch.process_tuning import keep_loaded_objects

MODELS = ("smollm2-135m", "smollm2-360m", "smollm2-1.7b", "qwen3-4b")
BATCHES = (1, 2, 4, 8)
AGREEMENTS = (0.6, 0.8)
DRAFT_LENGTHS = (1, 2, 3, 4)
_PROMPT = 64


def measure(model: str, threads: int, tokens: int, turns: int, console: Console) -> list[dict[str, object]]:
    """Of one target: a line for each batch and agreement, with the best draft length and its gain."""

    def progress(message: str, _: float | None) -> None:
        console.print(f"[dim]{message}[/dim]", highlight=False)

    console.print(f"[bold]{model}[/bold]: weights")
    pair = Pair(SHAPES[model](), torch.device("cpu"), torch.bfloat16)
    pages = max(BATCHES) * (_PROMPT + 16 * tokens) // 16
    settings = EngineSettings(model, threads=threads, kv_pages=pages, prefix_cache=False)
    sizes = [sum(weight.numel() for weight in each.parameters()) for each in (pair.target, pair.draft)]
    target = target_engine_of(pair.target, replace(settings, quantization="int4"), progress)
    lines: list[dict[str, object]] = []
    for agreement in AGREEMENTS:
        pair.set_agreement(agreement)
        # Rounding takes the embedding away that the pair changes.
        rounded = copy.deepcopy(pair.draft)
        draft = draft_engine_of(rounded, replace(settings, quantization="int8"), progress)
        keep_loaded_objects()
        for batch in BATCHES:
            plain, gains = _gains(target, draft, batch, tokens, turns, pair.target.config.vocab_size)
            best = max(gains, key=lambda length: gains[length])
            line = {"model": model, "target": sizes[0], "draft": sizes[1], "batch": batch, "agreement": agreement}
            line |= {"plain_tokens_per_second": plain, "draft_length": best, "gain": gains[best], "gains": gains}
            console.print(f"  batch {batch}, agreement {agreement}: {gains[best]:.2f} with {best} drafted")
            lines.append(line)
    return lines


def _gains(
    target: TargetEngine, draft: DraftEngine, batch: int, tokens: int, turns: int, vocabulary: int
) -> tuple[float, dict[int, float]]:
    """Tokens a second of plain decoding, and how many times as many there are with each draft length: medians."""
    rates: dict[int, list[float]] = {length: [] for length in (0, *DRAFT_LENGTHS)}
    ratios: dict[int, list[float]] = {length: [] for length in DRAFT_LENGTHS}
    for _ in range(turns):
        for length in rates:
            streams = [Stream(prompt) for prompt in prompts(batch, _PROMPT, vocabulary)]
            prefill(target, draft if length else None, streams, _PROMPT)
            decode(target, draft, streams, 2, length)
            rates[length].append(decode(target, draft, streams, tokens, length).tokens_per_second)
            free(target, draft, streams)
            if length:
                ratios[length].append(rates[length][-1] / rates[0][-1])
    return statistics.median(rates[0]), {length: statistics.median(found) for length, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=12, help="rounds of each turn")
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    console, lines = Console(stderr=True), []
    for model in asked.models:
        lines += measure(model, asked.threads, asked.tokens, asked.turns, console)
        gc.collect()
    print(json.dumps({"threads": asked.threads, "rounds": asked.tokens, "turns": asked.turns, "lines": lines}))


if __name__ == "__main__":
    main()
