"""Memory of a draft and a target worker at work, and how much of their KV budget gets used. JSON on the last line.

More sequences than the pages hold are under way, so that pages are what they wait for.

    python -m bench.memory --target demo --draft demo
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import psutil

from engine.settings import EngineSettings
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from scheduler.statistics import Snapshot
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint

_SAMPLE_SECONDS = 0.5
_STEP_SECONDS = 600.0
_SCHEDULER = "scheduler"


@dataclass
class MemorySamples:
    """What was seen while the sequences ran. `pss` are each process's proportional set sizes, in bytes, in time.

    `used_pages` are shares of each worker's pages, at moments when sequences waited for a place.
    """

    pss: dict[str, list[int]] = field(default_factory=dict)
    used_pages: dict[str, list[float]] = field(default_factory=dict)
    sequences: dict[str, list[int]] = field(default_factory=dict)

    def add(self, processes: Mapping[str, psutil.Process], snapshot: Snapshot) -> None:
        for name, process in processes.items():
            self.pss.setdefault(name, []).append(process.memory_full_info().pss)
        if not snapshot.waiting:
            return
        for worker in snapshot.workers:
            share = 1 - worker.free_pages / worker.total_pages
            self.used_pages.setdefault(worker.worker_id, []).append(share)
            self.sequences.setdefault(worker.worker_id, []).append(worker.sequences)


def summarise(samples: MemorySamples, descriptions: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for each process; those of pages only for workers that have pages.

    `partly_filled_share` is what of the budget half-filled last pages cost, half a page a sequence on average;
    `pss_mib_by_tenth` are medians over each tenth of the time, which tell whether memory grows.
    """
    processes: dict[str, dict[str, Any]] = {}
    for name, pss in samples.pss.items():
        processes[name] = {"peak_pss_mib": _mib(max(pss)), "pss_mib_by_tenth": _by_tenth(pss)}
        description = descriptions.get(name)
        if description is None or not description.kv_bytes_per_token:
            continue
        budget = description.total_pages * description.page_size
        used = samples.used_pages.get(name, [])
        held = samples.sequences.get(name, [])
        processes[name] |= {
            "kv_bytes_per_token": description.kv_bytes_per_token,
            "kv_budget_tokens": budget,
            "kv_budget_mib": _mib(budget * description.kv_bytes_per_token),
            "samples_under_load": len(used),
            "mean_used_share": statistics.mean(used) if used else None,
            "peak_used_share": max(used, default=None),
            "mean_sequences": statistics.mean(held) if held else None,
            "partly_filled_share": statistics.mean(held) * description.page_size / 2 / budget if held else None,
        }
    return processes


def _by_tenth(sizes: Sequence[int]) -> list[float]:
    edges = [len(sizes) * tenth // 10 for tenth in range(11)]
    parts = [sizes[first:last] for first, last in pairwise(edges)]
    return [_mib(statistics.median(part)) for part in parts if part]


def _mib(size: float) -> float:
    return round(size / 2**20, 1)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    longest = arguments.prompt_tokens + arguments.max_tokens
    page_size = EngineSettings(arguments.target).page_size
    settings = EngineSettings(
        arguments.target,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
        kv_pages=arguments.at_once * -(-longest // page_size),
        prefix_cache=False,
    )
    launches = [WorkerLaunch(Role.TARGET, asdict(settings), threads=arguments.threads)]
    if arguments.draft != "none":
        launches.append(
            WorkerLaunch(Role.DRAFT, asdict(settings) | {"model": arguments.draft}, threads=arguments.threads)
        )
    config = SchedulerConfig(
        batch_size=arguments.batch_size,
        max_running=max(2 * arguments.at_once, arguments.batch_size),
        max_queued_sequences=arguments.sequences,
        draft_length=0 if arguments.draft == "none" else 4,
    )
    samples = MemorySamples()
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(config, scheduler_epoch=1, link_options=LinkOptions(60, _STEP_SECONDS)) as service,
    ):
        workers = launcher.workers
        await service.add_workers([WorkerEndpoint(w.worker_id, w.role, w.address) for w in workers])
        processes = {worker.worker_id: psutil.Process(worker.process_id) for worker in workers}
        processes[_SCHEDULER] = psutil.Process(os.getpid())
        vocabulary = min(description.vocabulary_size for description in service.descriptions.values())
        started = time.monotonic()
        work = asyncio.gather(*(_collect(service, prompt, arguments) for prompt in _prompts(arguments, vocabulary)))
        while not work.done():
            samples.add(processes, service.core.snapshot())
            await asyncio.wait([work], timeout=_SAMPLE_SECONDS)
        tokens = sum(await work)
        seconds = time.monotonic() - started
        return {
            "sequences": arguments.sequences,
            "tokens": tokens,
            "seconds": seconds,
            "preemptions": service.core.snapshot().preemptions,
            "processes": summarise(samples, service.descriptions),
        }


async def _collect(service: SchedulerService, prompt: Sequence[int], arguments: argparse.Namespace) -> int:
    return len(await service.submit(prompt, arguments.max_tokens).collect())


def _prompts(arguments: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Of random lengths: pages are seldom full to the last place."""
    rng = random.Random(arguments.seed)
    return [
        [rng.randrange(vocabulary) for _ in range(rng.randint(1, arguments.prompt_tokens))]
        for _ in range(arguments.sequences)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo", help="a model, ngram or none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=12, help="sequences of full length that the pages hold")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
