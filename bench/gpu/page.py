"""What the performance page says of a result: texts, and the rows of its table. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.settings import variant_name
from bench.offline.grid import System

HEADINGS = (
    "system",
    "batch",
    "window",
    "engine",
    "tokens/s",
    "x plain",
    "ms a target step",
    "of the streaming limit",
    "tokens a round",
    "rows a step",
    "target at work",
    "draft at work",
    "same output as batch 1",
)


def introduction(content: dict[str, Any]) -> Iterator[str]:
    settings = content["settings"]
    yield (
        f"A pair with random weights in the shape of {settings['shape']} (bench/synthetic_pair.py), "
        f"{settings['dtype']}, in one process on `{settings['device']}`, where the two take turns. Prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['max_tokens']} new tokens each, {settings['draft_length']} "
        "draft tokens a round at most. Prefill is part of tokens/s; the time of a target step is the median of those "
        "without prefill."
    )
    if "pair" in content:
        agreement = content["pair"]["found"]["agreement"]
        yield f"The draft proposes {agreement:.1%} of the target's tokens where it is given the target's text."
    if "streaming_limit" in content:
        limit = content["streaming_limit"]
        yield (
            "The streaming limit is a step that does nothing but read the target's weights: "
            f"{limit['weight_bytes'] / 1e9:.2f} GB at {limit['bytes_per_second'] / 1e9:.0f} GB/s, which a copy on the "
            f"device reached in the same run, are {limit['step_seconds'] * 1000:.2f} ms."
        )
    for what, reason in content["left_out"].items():
        yield f"Left out: {what} ({reason})."
    if not content["complete"] and not content["left_out"]:
        yield "The run was ended before all was measured."


def rows(content: dict[str, Any]) -> list[list[str]]:
    cells = content["cells"]
    plain = {_beside(cell): cell["tokens_per_second"] for cell in cells if cell["system"] == System.PLAIN.value}
    return [_columns(cell, plain.get(_beside(cell))) for cell in cells]


def conclusion(content: dict[str, Any]) -> Iterator[str]:
    for found in content["logits"]:
        yield (
            f"Logits, {variant_name(found['engine'])}, batch-1 plain decoding against speculation at batch "
            f"{found['batch_size']}: {found['equal_logits']} of {found['compared_logits']} bit-equal, "
            f"{found['equal_sequences']} of {found['sequences']} texts equal."
        )


def _beside(cell: dict[str, Any]) -> tuple[str, int]:
    """Cells that only differ in how they draft."""
    return variant_name(cell["engine"]), cell["batch_size"]


def _columns(cell: dict[str, Any], plain: float | None) -> list[str]:
    step, share, rounds = cell["target_step_seconds"], cell["streaming_share"], cell["committed_per_round"]
    return [
        cell["system"] if not cell["draft_length"] else f"{cell['system']}, {cell['draft_length']}",
        str(cell["batch_size"]),
        str(cell["window"]),
        variant_name(cell["engine"]),
        f"{cell['tokens_per_second']:.1f}",
        "" if plain is None else f"{cell['tokens_per_second'] / plain:.2f}",
        "" if step is None else f"{step * 1000:.2f}",
        "" if share is None else f"{share:.0%}",
        "" if rounds is None or not cell["drafted"] else f"{rounds:.2f}",
        "" if cell["rows_per_step"] is None else f"{cell['rows_per_step']:.1f}",
        f"{cell['target_share']:.0%}",
        f"{cell['draft_share']:.0%}",
        f"{cell['equal_outputs']} of {cell['compared_outputs']}",
    ]
