"""Writes docs/performance.md and its figures from the results that lie in bench/results.

python -m bench.report
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.figure import Figure

from bench.gpu import page as gpu_page
from bench.gpu.results import KIND as GPU
from bench.offline.grid import System
from bench.offline.tables import category_columns, cell_columns
from bench.record import RESULTS, is_of_this_code
from bench.reporting import ahead_page, fleet_page, plan_page, plots
from bench.reporting.step_page import (
    PRICE_HEADINGS,
    STEP_HEADINGS,
    price_columns,
    price_sentence,
    step_columns,
    wire_sentence,
)
from bench.serving.run import load_columns
from deploy.cli.spelling import RENAMED_OPTIONS

ROOT = RESULTS.parents[1]
_INTRODUCTION = """\
# Performance

Written by `python -m bench.report` from the files in `bench/results/`, each of which holds the command that made it and
the machine it ran on. Figures of different machines do not compare; figures in one table do: cells of one file were
measured in turns, and a ratio is that of two measurements close to each other in time.
"""
_CELL_HEADINGS = (
    "system",
    "batch",
    "draft, γ",  # noqa: RUF001
    "exact",
    "tokens/s (least-most)",
    "x plain",
    "same output as batch 1",
    "tokens a round",
    "rows a group",
    "target at work",
    "waiting",
    "realigning",
    "scheduling",
    "draft time hidden",
)
_LOAD_HEADINGS = (
    "requests/s",
    "answered",
    "refused",
    "failed",
    "tokens/s",
    "good requests/s",
    "first token s, P50 / P90 / P99",
    "ms a further token, P50 / P90 / P99",
)
_VERSION_HEADINGS = (
    "instruction set",
    "target",
    "draft",
    "batch",
    "old",
    "new",
    "ratio of medians",
    "mean ratio of repeats",
    "old: tokens drafted",
    "new: tokens drafted",
)
_MEMORY_HEADINGS = (
    "process",
    "peak memory MiB",
    "over the run's tenths MiB",
    "KV bytes a token",
    "KV budget MiB",
    "of it used, mean",
    "most",
    "sequences held",
    "in last pages, about",
)

_DRAFT_HEADINGS = ("category", "answers", "tokens", "agreement", "tokens a round", "lookup alone", "combined")
_DRAFT_COLUMNS = ("agreement", "draft_tokens_per_round", "lookup_tokens_per_round", "combined_tokens_per_round")


class Report:
    """Collects the text; figures go to `figures` and are linked from the page in `docs`."""

    def __init__(self, results: Path, docs: Path) -> None:
        self._results = results
        self._docs = docs
        self._lines: list[str] = [_INTRODUCTION]
        self.figures: list[Path] = []

    def write(self) -> Path:
        """The page. Raises ValueError where a file in the results is not as it should be."""
        files = dict(_read_all(self._results))
        offline = {name: content for name, content in files.items() if content.get("kind") == "offline"}
        serve = {name: content for name, content in files.items() if content.get("kind") == "serve"}
        gpu = {name: content for name, content in files.items() if content.get("kind") == GPU}
        recorded = {name: content for name, content in files.items() if "kind" not in content}
        memory = {name: content for name, content in recorded.items() if name.startswith("memory")}
        drafts = {name: content for name, content in recorded.items() if name.startswith("draft")}
        steps = {name: content for name, content in recorded.items() if name.startswith("step_parts")}
        prices = {name: content for name, content in recorded.items() if name.startswith("exact_steps")}
        kernels = {name: content for name, content in recorded.items() if name.startswith("cpu_kernels")}
        versions = {name: content for name, content in recorded.items() if name.startswith("versions")}
        ahead = {name: content for name, content in recorded.items() if name in ahead_page.LINES}
        plans = {name: content for name, content in recorded.items() if name in plan_page.NAMES}
        fleets = {name: content for name, content in recorded.items() if fleet_page.is_day(name)}
        fleet_schedulers = {name: content for name, content in recorded.items() if name == fleet_page.SHARE}
        self._say(_ages(files))
        self._section("Decoding", offline, self._offline)
        self._section("Large pairs on one device", gpu, self._gpu)
        self._section("Serving", serve, self._serve)
        self._section("Linear layers on CPUs", kernels, self._kernels)
        self._section("Where a step's time goes", steps, self._steps)
        self._section("What exact mode costs", prices, self._prices)
        self._section("Drafting ahead", ahead, self._ahead)
        self._section("Planning", plans, self._plan)
        self._section("Fleet", fleets, self._fleet)
        self._section("One scheduler of a large cell", fleet_schedulers, self._scheduler_share)
        self._section("Versions against each other", versions, self._versions)
        self._section("Memory", memory, self._memory)
        self._section("Drafts", drafts, self._draft)
        shown = fleets | fleet_schedulers | ahead | plans | memory | drafts | steps | prices | kernels | versions
        self._others({name: content for name, content in recorded.items() if name not in shown})
        self._not_measured(offline, serve, memory, gpu)
        page = self._docs / "performance.md"
        page.write_text("\n".join(self._lines).rstrip() + "\n", encoding="utf-8")
        return page

    def _section(
        self, title: str, files: dict[str, dict[str, Any]], describe: Callable[[str, dict[str, Any]], None]
    ) -> None:
        if not files:
            return
        self._say(f"## {title}")
        for name, content in files.items():
            self._say(f"### {name}")
            self._say(_origin(content))
            describe(name, content)

    def _offline(self, name: str, content: dict[str, Any]) -> None:
        settings, cells = content["settings"], content["cells"]
        self._say(
            f"{settings['prompts']} prompts with {settings['prompt_tokens']} tokens in all, up to "
            f"{settings['sampling']['max_tokens']} new tokens each, temperature "
            f"{settings['sampling']['temperature']:g}, {_numbers(settings)}. Plain decoding and other systems had "
            f"{settings['plain_threads']} threads in one process, speculating workers "
            f"{settings['threads'] or 'an even share'} each (`auto` may lend those of one that is idle to the other). "
            f"{_windows(settings)} Prefill is part of every time. Medians of "
            f"{_range_of([cell['repeats'] for cell in cells])} repeats."
        )
        if len(content["sources"]) > 1:
            self._say("Measured over more than one version of the code.")
        for system, reason in content["left_out"].items():
            self._say(f"Left out: {system} ({reason}).")
        self._table(_CELL_HEADINGS, [cell_columns(cell) for cell in cells])
        rows = [
            [*cell_columns(cell)[:3], category, *category_columns(found)]
            for cell in _with_smallest_batch(plots.over_all(cells))
            for category, found in cell["categories"].items()
        ]
        if len({row[3] for row in rows}) > 1:
            headings = ("system", "batch", "draft, length", "category", "tokens a round", "agreement by place")
            self._table((*headings, "tokens/s of a sequence"), rows)
        if any(cell["ratio_to_plain"] for cell in cells):
            self._figure(name, "throughput", plots.ratio_over_batch_size, cells, "Throughput over plain decoding")
        if any(cell["statistics"] for cell in cells):
            self._figure(name, "time", plots.time_breakdown, cells, "Where the target's time went")
        if any(cell["statistics"].get("drafted") for cell in plots.over_all(cells)):
            self._figure(name, "accepted", plots.accepted_lengths, cells, "Accepted draft tokens a round")

    def _gpu(self, _name: str, content: dict[str, Any]) -> None:
        for text in gpu_page.introduction(content):
            self._say(text)
        if content["cells"]:
            self._table(gpu_page.HEADINGS, gpu_page.rows(content))
        for text in gpu_page.conclusion(content):
            self._say(text)

    def _serve(self, name: str, content: dict[str, Any]) -> None:
        settings = content["settings"]
        self._say(
            f"Poisson arrivals for {settings['seconds']:g} s at each rate, up to {settings['max_tokens']} tokens, "
            f"speculation {'on' if settings['speculation'] else 'off'}. A request is good if its first token came "
            f"within {settings['first_token_bound']:g} s of its arrival and the others took "
            f"{settings['token_bound'] * 1000:g} ms each at most, on average."
        )
        self._table(_LOAD_HEADINGS, [load_columns(load) for load in content["loads"]])
        for load in content["loads"]:
            if load["client_late_seconds"] > 0.5:
                self._say(f"At {load['rate']:g} requests/s the client was late by {load['client_late_seconds']:.1f} s.")
        self._figure(name, "latency", plots.latency_over_load, content["loads"], "Latency by load")

    def _kernels(self, _name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        for found in result["sets"]:
            self._say(
                f"**{found['isa']}**, {result['threads']} threads: memory is read at {found['read_gb_per_second']:.0f} "
                f"GB/s, and torch multiplies large float32 matrices at {found['float32_gflops']:.0f} GFLOP/s. "
                "Milliseconds for the linear layers of 30 decoder layers, by rows:"
            )
            times = found["milliseconds"]
            rows = list(next(iter(times.values())))
            self._table(("", *rows), [[name, *(f"{cell[row]:.1f}" for row in rows)] for name, cell in times.items()])
            for name, reason in found["left_out"].items():
                self._say(f"Left out: {name} ({reason}).")

    def _steps(self, _name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(wire_sentence(result))
        self._table(STEP_HEADINGS, [step_columns(step) for step in result["steps"]])

    def _prices(self, _name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(price_sentence(result))
        self._table(PRICE_HEADINGS, [price_columns(step) for step in result["steps"]])

    def _versions(self, _name: str, content: dict[str, Any]) -> None:
        cells = content["result"]["cells"]
        over_all = geometric_mean([cell["mean_ratio"] for cell in cells])
        self._say(
            f"Tokens a second of each repeat, the old version's and the new one's measured in turns. The mean over all "
            f"{len(cells)} cells is {over_all:.2f}."
        )
        self._table(_VERSION_HEADINGS, [_version_columns(cell) for cell in cells])

    def _ahead(self, name: str, content: dict[str, Any]) -> None:
        self._say("\n".join(ahead_page.LINES[name](content["result"])))
        if name == "ahead_break_even":
            self._figure(
                name, "ways", ahead_page.draw_break_even, content["result"]["points"], "Three ways to draft over plain"
            )

    def _plan(self, name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(plan_page.sentence(result))
        self._table(plan_page.HEADINGS, plan_page.rows(result))
        self._figure(name, "latency", plan_page.draw, result["loads"], "Latency by load, measured and predicted")

    def _fleet(self, name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(fleet_page.sentence(result))
        self._table(fleet_page.HEADINGS, fleet_page.rows(result))
        if result["close_up"]:
            self._table(fleet_page.ZONE_HEADINGS, fleet_page.zone_rows(result))
        self._say(fleet_page.check_sentence(result))
        self._table(fleet_page.CHECK_HEADINGS, fleet_page.check_rows(result))
        for kind, (field, fill, title) in fleet_page.FIGURES.items():
            if result[field]:
                self._figure(name, kind, fill, result[field], title)

    def _scheduler_share(self, _name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(fleet_page.share_sentence(result))
        self._table(fleet_page.SHARE_HEADINGS, fleet_page.share_rows(result))
        self._say("Where the core's time goes with 64 targets that draft, under a profiler:")
        self._table(fleet_page.PROFILE_HEADINGS, fleet_page.profile_rows(result))

    def _memory(self, _name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(
            f"{result['sequences']} sequences, {result['preemptions']} times one gave up its pages for another. "
            "Memory is the proportional set size."
        )
        self._table(_MEMORY_HEADINGS, [_memory_columns(*item) for item in result["processes"].items()])

    def _draft(self, _name: str, content: dict[str, Any]) -> None:
        result = content["result"]
        self._say(
            f"Draft `{result['draft']}`, at most {result['draft_length']} tokens a round, against greedy answers of "
            f"the target. Combined: where the last {result['lookup_match']} tokens stood in the sequence before, "
            "prompt lookup proposes, else the draft. Agreement is of single tokens after the target's own."
        )
        rows = [
            [name, str(found["answers"]), str(found["positions"]), *(f"{found[key]:.3f}" for key in _DRAFT_COLUMNS)]
            for name, found in result["categories"].items()
        ]
        self._table(_DRAFT_HEADINGS, rows)

    def _others(self, files: dict[str, dict[str, Any]]) -> None:
        if not files:
            return
        self._say("## Other results")
        rows = [
            [f"`{name}.json`", f"`{_as_called_now(content['command'])}`", content["date"]]
            for name, content in files.items()
        ]
        self._table(("file", "command", "date"), rows)

    def _not_measured(self, *kinds: dict[str, Any]) -> None:
        missing = list(not_measured(*kinds))
        if missing:
            self._say("## Not measured")
            self._say("\n".join(f"- {line}" for line in missing))

    def _say(self, text: str) -> None:
        self._lines.append(text + "\n")

    def _table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._say(markdown_table(headings, rows))

    def _figure(
        self,
        name: str,
        kind: str,
        fill: Callable[[Sequence[dict[str, Any]], Figure], None],
        content: Sequence[dict[str, Any]],
        title: str,
    ) -> None:
        path = plots.draw(self._docs / "figures" / f"{name}_{kind}.svg", partial(fill, content))
        self.figures.append(path)
        self._say(f"![{title}: {name}](figures/{path.name})")


def not_measured(
    offline: dict[str, Any], serve: dict[str, Any], memory: dict[str, Any], gpu: dict[str, Any]
) -> Iterator[str]:
    """What no file says anything about, in words."""
    cells = [cell for content in offline.values() for cell in content["cells"]]
    measured = {cell["point"]["system"] for cell in cells}
    missing = [system.value for system in System if system.value not in measured]
    if not offline:
        yield "The speed of decoding (`spool bench offline`)."
    elif missing:
        yield f"Decoding with {', '.join(missing)} (`spool bench offline`)."
    if cells and not any(cell["point"]["exact"] is False for cell in cells):
        yield "What exact mode costs: no cell was measured with `--exact off`."
    if not serve:
        yield "Latency under load (`spool bench serve`)."
    if not memory:
        yield "Memory (`python -m bench.memory`)."
    measured_gpu = [content for content in gpu.values() if content["cells"]]
    machines = [content["machine"] for content in (*offline.values(), *serve.values(), *memory.values(), *measured_gpu)]
    if not any(machine.get("gpus") for machine in machines):
        yield "Anything on a GPU ([`python -m bench.gpu`](benchmarks.md)): no figure on this page was taken on one."


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text left, figures right."""
    numeric = [all(_is_figure(row[column]) for row in rows) for column in range(len(headings))]
    lines = [list(headings), ["---:" if right else "---" for right in numeric], *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def _is_figure(text: str) -> bool:
    return not text or text[0].isdigit()


def _version_columns(cell: dict[str, Any]) -> list[str]:
    repeats = [" ".join(f"{value:g}" for value in cell[key]) for key in ("old", "new", "old_drafted", "new_drafted")]
    return [
        cell["cpu_isa"],
        cell["target"],
        cell["draft"],
        str(cell["batch_size"]),
        *repeats[:2],
        f"{cell['ratio_of_medians']:.2f}",
        f"{cell['mean_ratio']:.2f}",
        *repeats[2:],
    ]


def _memory_columns(name: str, found: dict[str, Any]) -> list[str]:
    def share(key: str) -> str:
        return f"{found[key]:.0%}" if found.get(key) is not None else ""

    return [
        name,
        f"{found['peak_pss_mib']:.0f}",
        " ".join(f"{size:.0f}" for size in found["pss_mib_by_tenth"]),
        str(found.get("kv_bytes_per_token", "")),
        str(found.get("kv_budget_mib", "")),
        share("mean_used_share"),
        share("peak_used_share"),
        f"{found['mean_sequences']:.1f}" if found.get("mean_sequences") is not None else "",
        share("partly_filled_share"),
    ]


def _ages(files: dict[str, dict[str, Any]]) -> str:
    """Which results were measured with code that changed since. Documents that quote one of them say so as well."""
    older = [f"`{name}`" for name, content in files.items() if not is_of_this_code(content)]
    if not older:
        return "All results were measured with the version of the code that this page belongs to."
    return f"Of the {len(files)} results, these {len(older)} were measured with older code: {', '.join(older)}."


def _as_called_now(command: str) -> str:
    """The command of a result with the present names of options that were renamed since."""
    if not command.startswith("spool "):
        return command
    return " ".join(RENAMED_OPTIONS.get(word, word) for word in command.split(" "))


def _origin(content: dict[str, Any]) -> str:
    machine = content["machine"]
    commands = content.get("commands") or [content["command"]]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers") if name in machine)
    gpus = f", {', '.join(machine['gpus'])}" if machine.get("gpus") else ""
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpus}; {versions}"
    return f"{content['date']}, on {where}:\n\n" + "\n".join(f"    {_as_called_now(command)}" for command in commands)


def _with_smallest_batch(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell of each way to speculate: with more sequences, `auto` drafts less, and the others agree as often."""
    found: dict[str, dict[str, Any]] = {}
    for cell in sorted(cells, key=lambda cell: cell["point"]["batch_size"]):
        if cell["point"]["draft"] is not None:
            found.setdefault(plots.way(cell["point"]), cell)
    return list(found.values())


def _windows(settings: dict[str, Any]) -> str:
    """How many sequences were in work at a time: with more of them than rows in a step, steps overlap the better."""
    if (batches := settings["window_batches"]) is not None:
        most = "one batch of sequences" if batches == 1 else f"{batches} batches of sequences"
    elif (window := settings["window"]) is not None:
        most = f"{window} sequences"
    else:
        most = "48 sequences, or four batches where that is more,"
    return (
        f"Up to {most} were in work at a time, each step for one batch; in plain decoding at batch 1 and in other "
        "systems never more than a batch."
    )


def _numbers(settings: dict[str, Any]) -> str:
    """The dtypes, and the instruction set where the file has it."""
    dtype, others = settings["dtype"], settings.get("peer_dtype", settings["dtype"])
    numbers = dtype if dtype == others else f"{dtype} (other systems: {others})"
    return f"{numbers}, instruction set {settings['cpu_isa']}" if "cpu_isa" in settings else numbers


def _range_of(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _read_all(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        missing = {"machine", "date"} - content.keys()
        if missing or not {"command", "commands"} & content.keys():
            raise ValueError(f"{path} says neither command nor machine, or not both: no figure goes without them")
        yield path.stem, content


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    asked = parser.parse_args(arguments)
    report = Report(asked.results, asked.docs)
    try:
        page = report.write()
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    for path in (page, *report.figures):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
