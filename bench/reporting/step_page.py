"""What the page of figures says of `python -m bench.step_parts` and `python -m bench.exact_steps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARTS = ("linear layers", "attention", "writing KV", "other operations", "dispatch")
STEP_HEADINGS = ("sequences x rows", "ms a step", *_PARTS, "preparing", "choosing")

PRICE_HEADINGS = ("sequences x rows", "ms a step, exact", "not exact", "exact / not", "standard error")


def step_columns(step: Mapping[str, Any]) -> list[str]:
    parts = [f"{step['parts'][name]:.1f}" for name in _PARTS]
    around = [f"{step[name]:.2f}" for name in ("prepare", "sample")]
    return [f"{step['sequences']} x {step['rows_each']}", f"{step['step']:.1f}", *parts, *around]


def wire_sentence(result: Mapping[str, Any]) -> str:
    wire = result["wire"]
    return (
        f"Milliseconds of the target's steps on {result['threads']} threads, by operation. Beyond them a step takes "
        f"{wire['round_trip']:.2f} ms (P99 {wire['round_trip_p99']:.2f}) on the wire where nothing is queued ahead: "
        f"encoding ({wire['of_it_encoding']:.2f}), gRPC both ways, decoding; a request of {wire['request_bytes']:.0f} "
        f"bytes. A copy in memory moves {result['copy_gb_per_second']:.0f} GB/s."
    )


def price_sentence(result: Mapping[str, Any]) -> str:
    return (
        f"Steps of the target on {result['threads']} threads, {result['pairs']} of an exact engine and as many of "
        "another in turns. Times are medians, the ratio is the geometric mean of pairs."
    )


def price_columns(step: Mapping[str, Any]) -> list[str]:
    times = [f"{step[name]:.2f}" for name in ("exact_ms", "other_ms")]
    return [f"{step['sequences']} x {step['rows_each']}", *times, f"{step['ratio']:.3f}", f"{step['error']:.3f}"]
