"""What the page of figures says of `python -m bench.plan_error`, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

NAMES = ("plan_error", "plan_error_demo")
HEADINGS = ("requests/s", "", "tokens/s", "first token p50, ms", "p99", "token p50, ms", "p99")
_LATENCIES = (("first_token", "p50"), ("first_token", "p99"), ("token", "p50"), ("token", "p99"))


def sentence(result: Mapping[str, Any]) -> str:
    return _demo_sentence(result) if result.get("workers") == "demo" else _paced_sentence(result)


def _demo_sentence(result: Mapping[str, Any]) -> str:
    plan, profile, loads = result["plan"], result["profile"], result["loads"]
    (target,), (draft,) = plan["target"]["measured"], plan["draft"]["measured"]
    requests = sorted({load["measured"]["requests"] for load in loads})
    return (
        f"The demo pair, a core each: {_law(target)} on the target, {_law(draft)} on the draft; predicted to within "
        f"{profile['target']['law']['error']:.1%} and {profile['draft']['law']['error']:.1%} a step, at the median. "
        f"Acceptance {plan['acceptance']:g}. All of this is from the profile that was made before, none of it from the "
        f"loads. {requests[0]} to {requests[-1]} requests at each rate, prompts of {result['longest_prompt']} tokens "
        f"at most, answers of {result['output_tokens']:g} on average. The target was busy for "
        f"{_shares(loads, 'measured')} of the time, by the prediction for {_shares(loads, 'predicted')}."
    )


def _law(costs: Mapping[str, Any]) -> str:
    blocks = f" in blocks of {costs['block_tokens']}" if costs["block_tokens"] > 1 else ""
    return f"{costs['step_seconds'] * 1000:.1f} ms a pass and {costs['token_seconds'] * 1000:.2f} ms a token{blocks}"


def _shares(loads: Sequence[Mapping[str, Any]], kind: str) -> str:
    return ", ".join(f"{load[kind]['target_busy']:.0%}" for load in loads)


def _paced_sentence(result: Mapping[str, Any]) -> str:
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
        rate = f"{load['rate']:.3g}"
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
