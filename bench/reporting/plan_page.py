"""What the page of figures says of `python -m bench.plan_error`, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

NAME = "plan_error"
HEADINGS = ("requests/s", "", "tokens/s", "first token p50, ms", "p99", "token p50, ms", "p99")
_LATENCIES = (("first_token", "p50"), ("first_token", "p99"), ("token", "p50"), ("token", "p99"))


def sentence(result: Mapping[str, Any]) -> str:
    return (
        f"{result['requests_each']} requests at each rate, costs of {result['law']}, acceptance {result['agreement']}; "
        f"one target, one draft, and the scheduler on the cores of one machine. Beyond its own time a step takes "
        f"{result['step_overhead_seconds'] * 1000:.2f} ms there, and {result['row_overhead_seconds'] * 1e6:.0f} µs a "
        "row: measured before, with plain decoding, and given to the simulation."
    )


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Measured, predicted and their difference, for each rate."""
    found = []
    for load in result["loads"]:
        rate = f"{load['rate']:g}"
        for kind in ("measured", "predicted"):
            one = load[kind]
            times = [f"{one[name][part] * 1000:.1f}" for name, part in _LATENCIES]
            found.append([rate, kind, f"{one['tokens_per_second']:.0f}", *times])
        error = load["error"]
        parts = [f"{error[name.replace('_', ' ') + ' ' + part]:+.1%}" for name, part in _LATENCIES]
        found.append([rate, "difference", f"{error['tokens/s']:+.1%}", *parts])
    return found


def draw(loads: Sequence[Mapping[str, Any]], figure: Figure) -> None:
    rates = [load["rate"] for load in loads]
    panels = figure.subplots(1, 2)
    for panel, name, title in zip(panels, ("first_token", "token"), ("first token, ms", "token, ms"), strict=True):
        for part, color in (("p50", "tab:blue"), ("p99", "tab:orange")):
            for kind, line in (("measured", "o-"), ("predicted", "x--")):
                times = [load[kind][name][part] * 1000 for load in loads]
                panel.plot(rates, times, line, color=color, label=f"{part} {kind}")
        panel.set_xlabel("requests a second")
        panel.set_ylabel(title)
        panel.set_ylim(bottom=0)
        panel.legend()
