"""How much of a GPU's speed is left once the scheduler, gRPC and the workers' own Python have had their part.

    python -m bench.control_plane --batch 1 8 64 256
    python -m bench.control_plane --batch 1 8 64 --drafting all

Real processes and real gRPC: a scheduler, a target or several, one draft worker with `--drafting workers`, and this
process as the gateway. With `--drafting ahead`, it proposes while targets verify, as on a device of its own; with
`targets`, the same draft is inside each target, on its device. `all` measures plain decoding and the three places in
turns, five times, and compares the medians.
Only the passes of the models are missing: a worker waits instead, as long as an 8B target and a 0.6B draft take on an
H200 (bench/core_speed.py). The ideal is the same scheduler core with the same workers in virtual time, where only
the passes take any; a draft worker takes turns with its target there, as all sequences are in one step. The figures are
JSON, on one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from bench.control_plane.scheduler import running
from bench.control_plane.worker import MAX_LENGTH
from bench.core_speed import Load, Pace, measure
from bench.record import describe_machine
from spool.scheduler.messages import Role
from spool.services.backend.interface import GenerationRequest
from spool.services.launch.launcher import WorkerLaunch
from spool.services.scheduler.telemetry.statistics import StatisticsSnapshot
from spool.services.scheduler_client.remote_stream import RemoteStream

NOWHERE, WORKERS, AHEAD, TARGETS = "nowhere", "workers", "ahead", "targets"
PLACES = (NOWHERE, WORKERS, AHEAD, TARGETS)

_PROMPT = (7,) * 32
_IDEAL_ROUNDS = 400
_TURNS = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of all streams together, and their share of the ideal. `scheduler_cpu` is the share of a core
    that the scheduler's process uses. `round_microseconds` tell where a round's time goes: see `Rounds`.
    `core_microseconds` are those of the core alone for each row decision, measured in virtual time. Of the rows that
    count on a proposal of a draft worker, so many had one `in_time`, and `ahead` of the request; `share_of_rounds` is
    that of the time for the passes of these very rounds, with those of proposals that were waited for."""

    targets: int
    batch: int
    drafting: str
    tokens_per_second: float
    ideal: float
    share: float
    scheduler_cpu: float
    round_microseconds: dict[str, float]
    core_microseconds: float
    in_time: float
    ahead: float
    share_of_rounds: float


def load_of(batch: int, drafting: str, agreement: float, targets: int) -> Load:
    return Load(
        pool=targets * batch,
        window=targets * batch,
        batch_size=batch,
        targets=targets,
        policy="auto",
        drafts=0,
        heads=int(drafting != NOWHERE),
        acceptance=agreement,
        longest_output=MAX_LENGTH // 2,
        warm_up=_IDEAL_ROUNDS,
        rows=2 * _IDEAL_ROUNDS * targets * batch,
    )


def launches_of(load: Load, pace: Pace, drafting: str, second: float) -> list[WorkerLaunch]:
    settings = {"pace": asdict(pace), "agreement": load.acceptance, "second": second, "batch": load.batch_size}
    settings |= {"inside": drafting == TARGETS, "ahead": drafting == AHEAD}
    roles = [*[Role.TARGET] * load.targets, *([Role.DRAFT] if drafting in (WORKERS, AHEAD) else [])]
    return [WorkerLaunch(role, settings, module="bench.control_plane.worker") for role in roles]


async def served(load: Load, pace: Pace, drafting: str, second: float, seconds: float) -> tuple[float, Any, Any, float]:
    """Tokens a second, the figures of the scheduler's process before and after, and the seconds between."""
    counts = [0] * load.pool

    async def read(index: int, stream: RemoteStream) -> None:
        async for emission in stream:
            counts[index] += len(emission.tokens)

    async with running(load.config(), launches_of(load, pace, drafting, second)) as (client, scheduler, _):
        request = GenerationRequest(_PROMPT, MAX_LENGTH - 64)
        streams = await asyncio.gather(*(client.submit(request) for _ in counts))
        readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
        marks = []
        for _ in range(2):  # the first half warms up
            await asyncio.sleep(seconds)
            scheduler.send(True)
            marks.append((await asyncio.to_thread(scheduler.recv), sum(counts), time.perf_counter()))
        for reader in readers:
            if reader.done():
                raise RuntimeError("a stream ended during the measurement: take a shorter one")
            reader.cancel()
    (before, tokens, began), (after, more, ended) = marks
    return (more - tokens) / (ended - began), before, after, ended - began


def compare(load: Load, pace: Pace, asked: argparse.Namespace, drafting: str) -> Figures:
    core = measure(load, pace, latency=0.0)
    ideal = core.emitted_tokens / core.virtual_seconds
    rate, (_, cpu_before, _), (of_a_round, cpu_after, counted), elapsed = asyncio.run(
        served(load, pace, drafting, asked.second, asked.seconds)
    )
    rows = max(1, counted.proposals_asked)
    return Figures(
        targets=load.targets,
        batch=load.batch_size,
        drafting=drafting,
        tokens_per_second=rate,
        ideal=ideal,
        share=rate / ideal,
        scheduler_cpu=(cpu_after - cpu_before) / elapsed,
        round_microseconds=of_a_round,
        core_microseconds=1e6 / core.rows_per_second,
        in_time=counted.proposals_in_time / rows,
        ahead=counted.proposals_ahead / rows,
        share_of_rounds=seconds_of_passes(counted, pace, drafting) / (load.targets * elapsed),
    )


def seconds_of_passes(counted: StatisticsSnapshot, pace: Pace, drafting: str) -> float:
    """Of targets, all together, with the drafting that they waited for: of every step inside, else of those of which
    no proposal was ahead."""
    steps, rows = counted.target_steps, max(1, counted.rounds)
    seconds = pace.target_step * steps + pace.target_row * (rows + counted.drafted)
    drafted = counted.drafted / rows if drafting == TARGETS else counted.drafted / max(1, counted.proposals_in_time)
    waited = 1.0
    if drafting != TARGETS:
        waited = (counted.proposals_in_time - counted.proposals_ahead) / max(1, counted.proposals_asked)
    return seconds + steps * waited * drafted * (pace.draft_pass + pace.draft_row * rows / max(1, steps))


def in_turns(batch: int, asked: argparse.Namespace, pace: Pace) -> dict[str, Any]:
    """The figures of each place with the median of the tokens a second, and what these are to each other."""
    found: dict[str, list[Figures]] = {place: [] for place in PLACES}
    for _ in range(_TURNS):
        for place in PLACES:
            load = load_of(batch, place, asked.agreement, asked.targets)
            found[place].append(compare(load, pace, asked, place))
    rates = {place: median(one.tokens_per_second for one in figures) for place, figures in found.items()}
    rows = [
        asdict(replace(found[place][-1], tokens_per_second=rate, share=rate / found[place][-1].ideal))
        | {"turns_tokens_per_second": [one.tokens_per_second for one in found[place]]}
        for place, rate in rates.items()
    ]
    ratios = {
        "workers_to_targets": rates[WORKERS] / rates[TARGETS],
        "ahead_to_targets": rates[AHEAD] / rates[TARGETS],
        "ahead_to_workers": rates[AHEAD] / rates[WORKERS],
        "workers_to_plain": rates[WORKERS] / rates[NOWHERE],
        "targets_to_plain": rates[TARGETS] / rates[NOWHERE],
    }
    return {"batch": batch, **ratios, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 64, 256], help="streams at a time, of each target"
    )
    parser.add_argument("--targets", type=int, default=1, help="each with so many streams; one draft worker")
    parser.add_argument("--drafting", choices=(*PLACES, "all"), default=NOWHERE, help="where the draft runs (nowhere)")
    parser.add_argument("--agreement", type=float, default=0.7, help="chance of a draft token to be accepted")
    parser.add_argument("--second", type=float, default=0.5, help="chance that what is rejected is its second choice")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement, after as long a warm-up")
    asked, pace = parser.parse_args(), Pace()
    if asked.drafting == "all":
        rows = [in_turns(batch, asked, pace) for batch in asked.batch]
    else:
        loads = [load_of(batch, asked.drafting, asked.agreement, asked.targets) for batch in asked.batch]
        rows = [asdict(compare(load, pace, asked, asked.drafting)) for load in loads]
    common = {"processor": describe_machine()["processor"], "pace": asdict(pace), "agreement": asked.agreement}
    common |= {"second": asked.second}
    print(json.dumps(common | {"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
