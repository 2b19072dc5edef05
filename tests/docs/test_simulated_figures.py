"""Figures of simulations in the documents are those of the records that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from tests.docs.figures import check, record, result


def test_fault_schedules() -> None:
    found = record("fault_schedules")
    failed = [int(failure.split()[1]) for failure in found["failures"]]
    missed = [seed for seed in failed if seed != 8822]
    check(
        "docs/testing.md",
        f"SEEDS={found['schedules']}",
        f"{found['sequences'] / 1e6:.0f} million sequences with {found['tokens'] / 1e6:.1f} million tokens",
        f"at least {min(found['faults'].values())} faults of each kind, and {found['fenced_replies']:,} refusals",
        f"{found['structured_schedules']:,} schedules had requests with a grammar",
        f"and {found['structured']:,} such outputs were complete",
        f"In {len(failed)} schedules a rule was broken",
        f"(seeds {', '.join(map(str, missed[:-1]))} and {missed[-1]})",
    )
    kinds = ["was not sent, although everything was planned" in failure for failure in found["failures"]]
    assert kinds == [seed in missed for seed in failed]


def test_schedules_with_drafts_that_prepare() -> None:
    found = record("ahead_schedules")
    check(
        "docs/testing.md",
        f"SEEDS={found['schedules']}",
        f"in {found['ahead_schedules']:,} of {found['schedules']:,} schedules drafts prepared for outcomes, with "
        f"{found['ahead_rows']:,} rows, and {found['prepared_rounds']:,} rounds began with what was prepared",
    )
    assert not found["failures"]


def test_a_day_of_a_fleet() -> None:
    day = result("fleet")
    totals, plan, seconds = day["totals"], day["plan"], [f"{one:.0f} s" for one in day["processor_seconds"].values()]
    peak = totals["peak_targets"] * plan["gpus"] / (plan["cells"] * plan["targets_per_cell"])
    used = [100 * totals["gpu_hours"] / gpus / 24 for gpus in (peak, plan["gpus"])]
    times = [row["token_ms"] for row in day["day"]]
    assert not any(row["waiting"] for row in [*day["day"], *day["close_up"]])
    check(
        "docs/fleet.md",
        f"{totals['arrived'] / 1e9:.2f} billion requests arrived; all but the {totals['open']:,.0f} that were open",
        f"Tokens took {min(times):.1f} to {max(times):.1f} ms",
        f"The day took {totals['gpu_hours']:,.0f} GPU-hours. That is {used[1]:.0f} % of what all GPUs would take",
        f"{totals['gpu_hours']:,.0f} GPU-hours are {used[0]:.0f} % of what that takes",
        f"measuring the speeds took {seconds[0]} of processor time",
        f"{seconds[1]}, and the simulated day {seconds[2]}",
        f"The busiest cell of the day makes {totals['peak_rows_per_cell']:,.0f} row decisions a second",
    )


def test_the_loss_of_a_zone() -> None:
    day = result("fleet")
    begin, end = day["plan"]["zone_loss"]["time"], day["plan"]["zone_loss"]["time"] + 1800
    before, first, last = (
        mean([row["token_ms"] for row in day["close_up"] if since <= row["time"] < until])
        for since, until in ((begin - 900, begin), (begin, begin + 180), (begin + 600, end))
    )
    totals = day["totals"]
    assert totals["node_faults"] == 2
    check(
        "docs/fleet.md",
        f"{totals['zone_resubmitted']:,.0f} sequences moved to the other zones",
        f"tokens took {first:.1f} ms instead of {before:.1f} ms",
        f"the other zones then held {last:.1f} ms",
        f"KV of {totals['recomputed_tokens'] / 1e6:.1f} million tokens was computed again in the whole day, "
        f"{100 * totals['recomputed_tokens'] / totals['prefilled_tokens']:.3f} % of all prefilled tokens",
        f"two nodes and {totals['scheduler_faults']} schedulers failed",
    )


def test_the_fluid_beside_the_core() -> None:
    phases = result("fleet")["check"]["phases"]
    rate, first, held = (
        max(abs(100 * phase["error"][name]) for phase in phases) for name in ("tokens/s", "first token", "sequences")
    )
    check(
        "docs/fleet.md",
        f"Tokens a second differ by {rate:.1f} % at most, the mean time to the first token by {first:.1f} %, and "
        f"sequences in the cell by {held:.1f} %",
    )


def changes(day: Sequence[Mapping[str, float]], name: str) -> float:
    """All changes of a number over the day, added up, as a multiple of its maximum."""
    values = [row[name] for row in day]
    return sum(abs(after - before) for before, after in pairwise(values)) / max(values)


def test_numbers_of_targets_that_oscillate() -> None:
    loose, tight = (result(name)["day"] for name in ("fleet_loose_goal", "fleet"))
    demand = {f"{changes(day, 'requests'):.1f}" for day in (loose, tight)}
    assert len(demand) == 1
    check(
        "docs/fleet.md",
        f"{changes(loose, 'asked'):.1f} times that number's maximum with the goal of 10 ms, and "
        f"{changes(tight, 'asked'):.1f} times with the goal of 6 ms",
        f"add up to {demand.pop()} times its maximum on both days",
    )


def test_the_share_of_a_scheduler() -> None:
    loads = {
        (one["load"]["targets"], one["load"]["window"], one["load"]["draft_length"]): one
        for one in result("fleet_scheduler")["loads"]
    }
    drafting, plain, single = (
        loads[load]["microseconds_a_row"] for load in ((64, 4096, 4), (64, 4096, 0), (1, 512, 4))
    )
    check(
        "docs/fleet.md",
        f"a row decision took {drafting['median']:.0f} µs of processor time ({drafting['least']:.0f} to "
        f"{drafting['most']:.0f}) and {plain['median']:.0f} µs without drafting",
        f"100,000 a second would take {loads[64, 4096, 4]['core_share']:.0f} cores",
        f"a row takes {single['median']:.0f} µs ({single['least']:.0f} to {single['most']:.0f})",
    )


def errors(loads: Sequence[Mapping[str, Any]], part: str) -> list[float]:
    """Of predicted times, in percent of those measured: to the first token, and for each further one."""
    return [100 * load["error"][f"{kind} {part}"] for load in loads for kind in ("first token", "token")]


def test_plans_beside_workers_that_follow_a_law() -> None:
    loads = result("plan_error")["loads"]
    median, tail = (max(map(abs, errors(loads, part))) for part in ("p50", "p99"))
    busy = 100 * max(load["predicted"]["target_busy"] for load in loads)
    check(
        "docs/planning.md",
        f"at most {median:.0f} % at the median and {tail:.0f} % at the 99th percentile, with a target that is busy for "
        f"{busy:.0f} % of the time at most",
    )


def test_plans_beside_the_demo_pair() -> None:
    found = result("plan_error_demo")
    median, tail = ([-min(of), max(of)] for of in (errors(found["loads"], "p50"), errors(found["loads"], "p99")))
    assert min(*median, *tail) > 0
    check(
        "docs/planning.md",
        f"the predicted medians are between {median[0]:.0f} % too short and {median[1]:.0f} % too long",
        f"those at the 99th percentile between {tail[0]:.0f} % too short and {tail[1]:.0f} % too long",
        f"differ from its fit by {100 * found['profile']['target']['law']['error']:.0f} % at the median",
    )
