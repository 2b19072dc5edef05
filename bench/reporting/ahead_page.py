"""What the page of figures says of `python -m bench.draft_ahead`, and its plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

_WAYS = ("apart", "together", "ahead")


def laws_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Virtual time: the real scheduler core, steps that cost what a law says, wires of 0.2 ms each way. A stream "
        "alone, ordinary speculation with the draft length that is best for it; tokens a second:"
    )
    yield ""
    yield "| law | agreement | plain | ordinary (length) | ahead | ahead / ordinary | verdicts found |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for one in result["streams"]:
        yield (
            f"| {one['law']} | {one['agreement']} | {one['plain']:.0f} | {one['ordinary']:.0f} "
            f"({one['ordinary_length']}) | {one['ahead']:.0f} | {one['ratio']:.2f} | {one['found']:.0%} |"
        )
    sizes = sorted({one["batch_size"] for one in result["batches"]})
    yield ""
    yield "`auto` with drafting ahead over `auto` without, by batch size:"
    yield ""
    yield f"| law | agreement |{''.join(f' {size} |' for size in sizes)}"
    yield f"| --- | ---: |{' ---: |' * len(sizes)}"
    ratios = {
        (one["law"], one["agreement"], one["batch_size"]): one["ahead"] / one["ordinary"] for one in result["batches"]
    }
    for law, agreement in dict.fromkeys((one["law"], one["agreement"]) for one in result["batches"]):
        cells = "".join(f" {ratios[law, agreement, size]:.3f} |" for size in sizes)
        yield f"| {law} | {agreement} |{cells}"


def paced_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "The same streams through a scheduler, gRPC and two worker processes that sleep for as long as the law says, "
        "all on the cores of one machine, so that wires take longer than in virtual time; tokens a second:"
    )
    yield ""
    yield (
        "| law | agreement | ordinary (length) | ahead | verdicts found | wire each way, ms | ahead / ordinary "
        "| in virtual time with this wire | with 0.2 ms |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for one in result["streams"]:
        yield (
            f"| {one['law']} | {one['agreement']} | {one['ordinary']:.0f} ({one['ordinary_length']}) "
            f"| {one['ahead']:.0f} | {one['found']:.0%} | {one['wire_seconds'] * 1000:.2f} | {one['ratio']:.2f} "
            f"| {one['ratio_in_virtual_time_with_this_wire']:.2f} | {one['ratio_in_virtual_time']:.2f} |"
        )


def pair_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"The demo pair, target and draft on a core each, a stream at a time: {result['prompts']} prompts with "
        f"{result['prompt_tokens']} tokens in all, {result['tokens']} new tokens each, greedy, without the time to the "
        f"first token; medians of {result['repeats']} repeats. All outputs equal those of plain decoding."
    )
    yield ""
    yield "| draft length, outcomes | tokens/s (least-most) | verdicts found | the target's step, ms |"
    yield "| --- | ---: | ---: | ---: |"
    for way in result["ways"]:
        found = f"{way['found']:.0%}" if way["found"] else ""
        rate = f"{way['rate']:.1f} ({way['least']:.1f}-{way['most']:.1f})"
        yield f"| {way['way']} | {rate} | {found} | {way['target_step_ms']:.1f} |"
    yield ""
    yield (
        f"`{result['best'][1]}` over `{result['best'][0]}`, repeat by repeat: {result['ratio']:.3f}, standard error "
        f"{result['ratio_error']:.3f}."
    )


def ranks_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Greedy answers of {result['tokens']} tokens to {result['prompts']} prompts, {result['positions']} positions: "
        f"the draft's first choice is the target's token in {result['agreement_of_all']:.0%}. Of the "
        f"{result['surest']} positions at which the draft is surest, and right in {result['agreement']:.0%}, it errs "
        f"in {result['missed']}. In how many of these the target's token is its second choice, its third, and so on:"
    )
    yield ""
    ranks = range(2, 2 + len(result["ranks"]))
    yield f"|{''.join(f' {rank} |' for rank in ranks)} later |"
    yield f"|{' ---: |' * (1 + len(ranks))}"
    yield f"|{''.join(f' {share:.1%} |' for share in (*result['ranks'], result['later']))}"


def turnaround_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"From the bytes of a verdict to those of the next verification, within the scheduler's process, between steps "
        f"of worker processes that sleep like {result['law']} at an agreement of {result['agreement']}; microseconds, "
        "medians. *Reading*: bytes to the core's messages. *Telling*: those who count. *Applying* and *planning*: the "
        "core. *Delivering*: the output to its stream. *Writing*: the step to bytes."
    )
    yield ""
    parts = list(result["ways"][0]["parts"])
    yield f"| | verdicts | all | P90 |{''.join(f' {part} |' for part in parts)}"
    yield f"| --- |{' ---: |' * (3 + len(parts))}"
    for way in result["ways"]:
        cells = "".join(f" {way['parts'][part]:.0f} |" for part in parts)
        yield f"| {way['way']} | {way['verdicts']} | {way['median']:.0f} | {way['p90']:.0f} |{cells}"


def break_even_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Virtual time, {result['law']}, one quantity varied at a time from a stream alone at an agreement of "
        f"{result['agreement']}, as multiples of plain decoding without a wire. *Apart*: target and draft on devices "
        "of their own. *Together*: on one device, in turns, without a wire, like servers that draft within one "
        "process. *Ahead*: apart, drafting ahead. Apart and ahead take two devices, together takes one."
    )


def draw_break_even(points: Sequence[dict[str, Any]], figure: Figure) -> None:
    axes = dict.fromkeys(point["axis"] for point in points)
    for place, (panel, axis) in enumerate(zip(figure.subplots(1, len(axes), sharey=True), axes, strict=True)):
        shown = [point for point in points if point["axis"] == axis]
        values = [point["value"] for point in shown]
        for name in _WAYS:
            panel.plot(values, [point[name] / point["plain"] for point in shown], label=name)
        panel.axhline(1.0, color="black", linewidth=0.8)
        if axis != "agreement":
            panel.set_xscale("log")
        panel.set_xticks(values, [f"{value:g}" for value in values], fontsize=6)
        panel.minorticks_off()
        panel.set_xlabel(axis)
        if not place:
            panel.set_ylabel("tokens a second / plain decoding")
            panel.legend()


LINES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "ahead_laws": laws_lines,
    "ahead_paced": paced_lines,
    "ahead_pair": pair_lines,
    "ahead_ranks": ranks_lines,
    "ahead_turnaround": turnaround_lines,
    "ahead_break_even": break_even_lines,
}
"""By the record's name."""
