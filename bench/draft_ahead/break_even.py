"""Where a draft on a device of its own pays, and where one on the target's device does, or none.

In virtual time, tokens a second of AUTO with drafts of up to eight tokens: *apart*, target and draft on devices of
their own, with a wire between; *together*, both on one device, in turns and without a wire, as servers do that draft
within one process; *ahead*, apart, and drafting ahead. Each as a multiple of plain decoding without a wire. Devices are
not counted: apart there are two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.draft_ahead.laws import LAWS, OUTCOMES, rate

LAW = "8B, 0.6B"
AGREEMENT = 0.7
AXES: dict[str, tuple[float, ...]] = {
    "batch size": (1, 2, 4, 8, 16, 32),
    "agreement": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "draft pass / verification": (0.02, 0.05, 0.1, 0.13, 0.2, 0.3, 0.5),
    "wire, ms": (0.02, 0.1, 0.2, 0.5, 1, 2, 5),
}
"""One is varied at a time; otherwise a stream alone, `AGREEMENT`, and the costs of `LAW`."""


def break_even(say: Callable[[str], None]) -> dict[str, Any]:
    points = []
    for axis, values in AXES.items():
        for value in values:
            costs, agreement, size = LAWS[LAW], AGREEMENT, 1
            match axis:
                case "batch size":
                    size = int(value)
                case "agreement":
                    agreement = value
                case "wire, ms":
                    costs = replace(costs, latency=value / 1000)
                case _:
                    costs = replace(costs, draft_base=costs.base * value)
            near = replace(costs, latency=0.0)
            plain = rate(near, agreement, batch_size=size, draft_length=0).rate
            rates = {
                "apart": rate(costs, agreement, batch_size=size).rate,
                "together": rate(replace(near, row_alone=near.row), agreement, batch_size=size).rate,
                "ahead": rate(costs, agreement, batch_size=size, outcomes=OUTCOMES).rate,
            }
            points.append({"axis": axis, "value": value, "plain": plain} | rates)
            say(f"{axis} {value:g}: " + ", ".join(f"{name} {each / plain:.2f}" for name, each in rates.items()))
    return {"law": LAW, "agreement": AGREEMENT, "outcomes": OUTCOMES, "points": points}
