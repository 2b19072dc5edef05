"""What the page of figures says of `python -m bench.fleet` and its scheduler's share, and the plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DAY, SHARE = "fleet", "fleet_scheduler"
HEADINGS = ("", "")
CHECK_HEADINGS = ("requests/s a target", "", "sequences", "tokens/s", "first token, mean ms")
SHARE_HEADINGS = (
    "targets",
    "drafts",
    "running",
    "batch",
    "draft length",
    "µs a row (least-most)",
    "rows an event",
    "cores",
)
PROFILE_HEADINGS = ("module of `scheduler/`", "share of its time")
_HOUR = 3600.0
_CHECKED = (("sequences", 1.0, ".1f"), ("tokens/s", 1.0, ".0f"), ("first token", 1000.0, ".1f"))


def is_day(name: str) -> bool:
    return name.startswith(DAY) and name != SHARE


def sentence(result: Mapping[str, Any]) -> str:
    plan = result["plan"]
    return (
        f"{plan['gpus']:,} GPUs in {plan['cells']} cells of {plan['targets_per_cell']} targets at most with a draft "
        f"for each four, in {plan['zones']} zones. Autoscaling is to hold {1000 * plan['token_seconds']:g} ms a token; "
        f"prompts of {result['lengths']['prompt']:g} tokens and answers of {result['lengths']['output']:g} on average. "
        f"{_loss(plan['zone_loss'])}"
    )


def _loss(loss: Mapping[str, Any] | None) -> str:
    if loss is None:
        return "No zone is lost."
    return f"One zone is lost at {_clock(loss['time'])} for {loss['seconds'] / 60:g} minutes."


def _clock(seconds: float) -> str:
    return f"{int(seconds // _HOUR):02}:{int(seconds % _HOUR // 60):02}"


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    totals, plan = result["totals"], result["plan"]
    hours = plan["seconds"] / _HOUR
    whole, peak = (
        plan["gpus"] * hours,
        totals["peak_targets"] * plan["gpus"] / (plan["cells"] * plan["targets_per_cell"]),
    )
    used = totals["gpu_hours"]
    busiest = max(result["day"], key=lambda row: row["requests"])
    return [
        ["requests that arrived", f"{totals['arrived']:,.0f}"],
        ["finished; still open at midnight", f"{totals['finished']:,.0f}; {totals['open']:,.0f}"],
        ["requests a second at the peak", f"{busiest['requests']:,.0f}"],
        ["tokens committed", f"{totals['committed_tokens']:.4g}"],
        ["tokens of KV computed again after faults", f"{totals['recomputed_tokens']:.3g} ({_share(totals)})"],
        ["sequences resubmitted to another cell", f"{totals['resubmitted']:,.0f}"],
        ["of these at the loss of the zone", f"{totals['zone_resubmitted']:,.0f}"],
        ["nodes lost; schedulers lost", f"{totals['node_faults']}; {totals['scheduler_faults']}"],
        ["GPU-hours", f"{used:,.0f}"],
        ["of those of a fleet kept at its peak before the loss", f"{used / (peak * hours):.0%} of {peak * hours:,.0f}"],
        ["of those of all GPUs all day", f"{used / whole:.0%} of {whole:,.0f}"],
        ["row decisions a second, busiest cell", f"{totals['peak_rows_per_cell']:,.0f}"],
        ["autoscaling decisions", f"{totals['decisions']:,}"],
        [
            "processor seconds: speeds, check, day",
            ", ".join(f"{one:.0f}" for one in result["processor_seconds"].values()),
        ],
    ]


def _share(totals: Mapping[str, Any]) -> str:
    return f"{totals['recomputed_tokens'] / totals['prefilled_tokens']:.2%} of all prefilled"


def zone_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The quarter of an hour before the zone was lost, the time without it in three parts, and the time after it."""
    loss = result["plan"]["zone_loss"]
    begin, end = loss["time"], loss["time"] + loss["seconds"]
    parts = {
        "15 minutes before": (begin - 900, begin),
        "first 3 minutes without": (begin, begin + 180),
        "minutes 3 to 10": (begin + 180, begin + 600),
        "then, until it is back": (begin + 600, end),
        "first 3 minutes with it": (end, end + 180),
        "then": (end + 180, end + 1800),
    }
    found = []
    for name, (first, last) in parts.items():
        part = [row for row in result["close_up"] if first <= row["time"] < last]
        if part:
            found.append([name, *_zone_columns(part)])
    return found


ZONE_HEADINGS = ("", "requests/s", "asked for", "up", "waiting, most", "ms a token", "first token p50, s", "p99, most")


def _zone_columns(part: Sequence[Mapping[str, float]]) -> list[str]:
    def mean(name: str) -> float:
        return sum(row[name] for row in part) / len(part)

    return [
        f"{mean('requests'):,.0f}",
        f"{mean('asked'):,.0f}",
        f"{mean('up'):,.0f}",
        f"{max(row['waiting'] for row in part):,.0f}",
        f"{mean('token_ms'):.1f}",
        f"{mean('first_token_p50'):.3f}",
        f"{max(row['first_token_p99'] for row in part):.3f}",
    ]


def check_sentence(result: Mapping[str, Any]) -> str:
    return (
        f"The fluid beside the core, event by event: {result['check']['targets']} targets with one draft, the same "
        "arrivals, steps of load one after the other:"
    )


def check_rows(result: Mapping[str, Any]) -> list[list[str]]:
    found = []
    for phase in result["check"]["phases"]:
        for kind in ("events", "fluid"):
            values = [f"{phase[kind][name] * factor:{form}}" for name, factor, form in _CHECKED]
            found.append([f"{phase['rate']:g}", kind, *values])
        errors = [f"{phase['error'][name]:+.1%}" for name, _, _ in _CHECKED]
        found.append([f"{phase['rate']:g}", "difference", *errors])
    return found


def draw_day(samples: Sequence[Mapping[str, float]], figure: Figure) -> None:
    """Demand and capacity, and targets, over the hours of the day."""
    samples = samples[::3]
    panels = figure.subplots(2, 1, sharex=True)
    hours = [row["time"] / _HOUR for row in samples]
    _draw_load(panels[0], hours, samples)
    _draw_targets(panels[1], hours, samples)
    panels[1].set_xlabel("hour of the day")
    _finish(panels)


def draw_latency(samples: Sequence[Mapping[str, float]], figure: Figure) -> None:
    """Seconds to the first token, and milliseconds a token, over the hours of the day."""
    panels = figure.subplots(2, 1, sharex=True)
    hours = [row["time"] / _HOUR for row in samples]
    _draw_first_token(panels[0], hours, samples)
    panels[1].plot(hours, [row["token_ms"] for row in samples], label="mean")
    panels[1].set_ylabel("ms a token")
    panels[1].set_xlabel("hour of the day")
    _finish(panels)


def draw_zone(samples: Sequence[Mapping[str, float]], figure: Figure) -> None:
    """The same around the loss of the zone, with what was computed anew; every third sample."""
    samples = samples[::3]
    figure.set_figheight(7.0)
    panels = figure.subplots(4, 1, sharex=True)
    hours = [row["time"] / _HOUR for row in samples]
    _draw_load(panels[0], hours, samples)
    _draw_targets(panels[1], hours, samples)
    _draw_first_token(panels[2], hours, samples)
    panels[3].plot(hours, [row["recomputed"] / 1e6 for row in samples], label="computed again")
    panels[3].set_ylabel("million tokens/s")
    panels[3].set_xlabel("hour of the day")
    _finish(panels)


def _draw_load(axes: Axes, hours: Sequence[float], samples: Sequence[Mapping[str, float]]) -> None:
    for name in ("demand", "committed", "capacity"):
        axes.plot(hours, [row[name] / 1e6 for row in samples], linewidth=0.9, label=name)
    axes.set_ylabel("million tokens/s")


def _draw_targets(axes: Axes, hours: Sequence[float], samples: Sequence[Mapping[str, float]]) -> None:
    for name, label in (("asked", "asked for"), ("up", "up")):
        axes.plot(hours, [row[name] for row in samples], linewidth=0.9, label=label)
    axes.set_ylabel("targets")


def _draw_first_token(axes: Axes, hours: Sequence[float], samples: Sequence[Mapping[str, float]]) -> None:
    for name in ("p99", "p50"):
        axes.plot(hours, [row[f"first_token_{name}"] for row in samples], linewidth=0.9, label=name)
    axes.set_ylabel("s to the first token")


def _finish(panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6, framealpha=0.6)


def share_sentence(result: Mapping[str, Any]) -> str:
    goal, rate = result["goal_share"], result["rows_per_second"]
    return (
        "One scheduler core, `SchedulerCore.handle` alone, seconds of the processor, medians of "
        f"{result['repeats']} repeats. *Cores*: what {rate:,} row decisions a second would take; the goal for a cell "
        f"of 64 targets is {goal:g} at most, {goal / rate * 1e6:g} µs a row."
    )


def share_rows(result: Mapping[str, Any]) -> list[list[str]]:
    found = []
    for one in result["loads"]:
        load, micros = one["load"], one["microseconds_a_row"]
        found.append(
            [
                *(str(load[name]) for name in ("targets", "drafts", "window", "batch_size", "draft_length")),
                f"{micros['median']:.1f} ({micros['least']:.1f}-{micros['most']:.1f})",
                f"{one['rows_an_event']:.1f}",
                f"{one['core_share']:.2f}",
            ]
        )
    return found


def profile_rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [[f"`{name}`", f"{share:.0%}"] for name, share in result["profile"].items()]


Fill = Callable[[Sequence[dict[str, Any]], Figure], None]
FIGURES: Mapping[str, tuple[str, Fill, str]] = {
    "day": ("day", draw_day, "Load and targets over the day"),
    "latency": ("day", draw_latency, "Latency over the day"),
    "zone": ("close_up", draw_zone, "Around the loss of a zone"),
}
"""By the figure's kind: the field of the record that it shows, who draws it, and its title."""
