"""A served application whose groups of workers follow the load, while clients come by steps and go again.

Each client asks one request after the other, over HTTP or gRPC. Every second the workers in use and the sequences are
read from `/load`; at the end of each step the scheduler says what it decided. Every text must be that of plain decoding
before. Exit code 1 if one is not, or a request failed. Without `--config`, it is a pair of tiny models with random
weights that agree in `--agreement` of the tokens, with one to eight targets and one to three drafts, whose steps take
as long as on devices of their own (bench/pacing). With `--set ray.address=HOST:PORT` on a Ray that is there already.

    python -m bench.autoscaling
    python -m bench.autoscaling --agreement 0.1 --output autoscaling_poor_drafts.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.chaos.application import Application, ApplicationError, Watcher, served, watching
from bench.chaos.streams import (
    ConstantLoad,
    StreamRecord,
    cases,
    faults_of,
    plain_answers,
    streaming,
)
from bench.pacing import Pace, paced
from bench.record import write_result
from bench.serving.load import percentile
from bench.synthetic_pair import SHAPES, write_pair

_SAMPLE_SECONDS = 1.0
_BIN_SECONDS = 10.0
# A target as fast as a large model on a GPU of its own, and a draft that takes longer for every sequence.
PACE = Pace(target_step=0.08, target_token=0.001, draft_pass=0.01, draft_sequence=0.002)
_LAST_WAIT_SECONDS = 180.0


@contextmanager
def paced_pair(agreement: float, sequences: int, downscale_seconds: float) -> Iterator[Path]:
    """A configuration for a pair whose workers do not get slower by each other, on few cores as on many."""
    with tempfile.TemporaryDirectory(prefix="spool-pair-") as name, paced(PACE):
        folder = Path(name)
        pair = write_pair(folder, SHAPES["tiny"](), agreement)
        pace = {"upscale_delay_seconds": 5, "downscale_delay_seconds": downscale_seconds}
        worker = {"threads": 1, "kv_pages": 1024, "drain_seconds": 30}
        target = {**pace, "max_replicas": 8, "sequences_per_replica": sequences}
        configuration = {
            "models": {"target": pair.target, "draft": pair.draft, "served_model_name": "tiny", "dtype": "float32"},
            "scheduling": {"max_running": 96},
            "groups": {
                "target": {**worker, "autoscaling": target},
                "draft": {**worker, "autoscaling": {**pace, "max_replicas": 3}},
            },
            "ray": {"num_cpus": 24},
        }
        file = folder / "spool.yaml"
        file.write_text(json.dumps(configuration), encoding="utf-8")
        yield file


async def measure(application: Application, steps: Sequence[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises ApplicationError where the numbers do not come down in the end."""
    async with streaming(application) as client, watching(application) as watcher:
        asked = cases(arguments.cases, arguments.max_tokens)
        expected = await plain_answers(client, asked)
        begin = time.monotonic()
        samples: list[dict[str, float]] = []
        watch = asyncio.create_task(sample(watcher, samples, begin))
        records: list[StreamRecord] = []
        told, clients = [], []
        for count in steps:
            clients.append({"time": round(time.monotonic() - begin, 2), "clients": count})
            async with ConstantLoad(client, asked, count) as load:
                await asyncio.sleep(arguments.seconds)
                said = (await scheduler_status(application))["autoscaling"]
            records += load.records
            told.append({"clients": count, **said})
            print(f"{count} clients: {said['explanation']}", file=sys.stderr, flush=True)
        clients.append({"time": round(time.monotonic() - begin, 2), "clients": 0})
        await watcher.until(
            lambda load: len(load.workers["target"]) == len(load.workers["draft"]) == 1, "one each", _LAST_WAIT_SECONDS
        )
        await asyncio.sleep(2 * _SAMPLE_SECONDS)
        watch.cancel()
        await asyncio.wait([watch])
        end = await scheduler_status(application)
    answered = [record for record in records if record.answered]
    return {
        "requests": len(records),
        "answered": len(answered),
        "tokens": sum(record.tokens for record in answered),
        "refused": sum(record.refused for record in records),
        "wrong": faults_of(records, expected),
        "kv_moves": end["kv_moves"],
        "steps": clients,
        "decisions": told,
        "samples": samples,
        "latency": latencies(answered, begin),
        "by_step": by_step(clients, samples, answered, begin),
    }


async def scheduler_status(application: Application) -> dict[str, Any]:
    """What `spool status` says of the scheduler. While replicas start on the same cores, it may not answer at once.

    Raises TimeoutError where it does not answer at all.
    """
    async with asyncio.timeout(_LAST_WAIT_SECONDS):
        while (found := (await asyncio.to_thread(application.status))["cells"][0]) is None:
            pass
    return dict(found)


async def sample(watcher: Watcher, samples: list[dict[str, float]], begin: float) -> None:
    """Adds what is in use again and again, until cancelled."""
    while True:
        load = await watcher.load()
        if load is not None:
            seen = {name: float(len(load.workers[name])) for name in ("target", "draft")}
            counts = {"sequences": float(load.sequences), "waiting": float(load.waiting)}
            samples.append({"time": round(time.monotonic() - begin, 2), **seen, **counts})
        await asyncio.sleep(_SAMPLE_SECONDS)


def latencies(answered: Sequence[StreamRecord], begin: float) -> list[dict[str, float]]:
    """By the time at which streams ended: the 99th percentile of their seconds a token, and to the first one."""
    bins: dict[int, list[StreamRecord]] = {}
    for record in answered:
        bins.setdefault(int((record.ended - begin) // _BIN_SECONDS), []).append(record)
    return [{"time": (place + 0.5) * _BIN_SECONDS, **percentiles(found)} for place, found in sorted(bins.items())]


def percentiles(records: Sequence[StreamRecord]) -> dict[str, float]:
    tokens = [token_seconds(record) for record in records]
    first = [record.arrivals[0] - record.began for record in records]
    return {
        "streams": len(records),
        "token_seconds_p50": round(percentile(tokens, 50), 4),
        "token_seconds_p99": round(percentile(tokens, 99), 4),
        "first_token_seconds_p99": round(percentile(first, 99), 3),
    }


def token_seconds(record: StreamRecord) -> float:
    """Mean seconds of a token after what came first."""
    return (record.arrivals[-1] - record.arrivals[0]) / max(record.tokens - 1, 1)


def by_step(
    steps: Sequence[Mapping[str, float]],
    samples: Sequence[Mapping[str, float]],
    answered: Sequence[StreamRecord],
    begin: float,
) -> list[dict[str, float]]:
    """Of each number of clients: replicas at its end, and latencies of the streams that ended in its second half."""
    found = []
    for step, following in pairwise(steps):
        middle = (step["time"] + following["time"]) / 2
        late = [one for one in answered if middle <= one.ended - begin < following["time"]]
        last = [one for one in samples if one["time"] <= following["time"]][-1]
        replicas = {"targets": last["target"], "drafts": last["draft"]}
        found.append({"clients": step["clients"], **replicas, **(percentiles(late) if late else {"streams": 0})})
    return found


def table(result: Mapping[str, Any]) -> str:
    """For docs/autoscaling.md."""
    lines = [
        "| clients | targets | drafts | ms a token, p50 | p99 | s to the first token, p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["by_step"]:
        if not row["streams"]:
            continue
        milliseconds = [f"{1000 * row[f'token_seconds_{percent}']:.0f}" for percent in ("p50", "p99")]
        cells = [f"{row['clients']:.0f}", f"{row['targets']:.0f}", f"{row['drafts']:.0f}", *milliseconds]
        cells.append(f"{row['first_token_seconds_p99']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--config", type=Path, help="a spool.yaml with groups.target.autoscaling")
    found.add_argument("--set", action="append", default=[], dest="overrides", metavar="FIELD=VALUE")
    found.add_argument("--steps", type=int, nargs="+", default=[1, 4, 16, 64, 16, 4, 1], metavar="CLIENTS")
    found.add_argument("--seconds", type=float, default=30.0, help="of each step")
    found.add_argument("--agreement", type=float, default=0.7, help="of the tiny pair")
    found.add_argument("--sequences-per-replica", type=int, default=8, help="that fill a target of the tiny pair")
    found.add_argument("--downscale-seconds", type=float, default=20.0, help="delay of the tiny pair")
    found.add_argument("--cases", type=int, default=16, help="different requests")
    found.add_argument("--max-tokens", type=int, default=64)
    found.add_argument("--output", type=Path, default=Path("autoscaling.json"))
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises ApplicationError."""
    with ExitStack() as stack:
        config = arguments.config or stack.enter_context(
            paced_pair(arguments.agreement, arguments.sequences_per_replica, arguments.downscale_seconds)
        )
        application = stack.enter_context(served(config, arguments.overrides))
        return asyncio.run(measure(application, arguments.steps, arguments))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        result = run(arguments)
    except ApplicationError as error:
        print(f"autoscaling: {error}", file=sys.stderr)
        return 1
    command = f"python -m bench.autoscaling {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    write_result(arguments.output, command, result)
    print(table(result))
    return 1 if result["wrong"] or result["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
