"""Lets one of three targets hang, in its step and then as a whole process (SIGSTOP), and measures the speed of the
sequences on the others: the tokens a second of those, and their share of what they were before.

    python -m bench.record hung_target -- python -m bench.chaos.hung_target

Workers take time and compute nothing (bench/control_plane/worker.py), five times as slow as on a GPU, so that a process
that stands still leaves nothing to the others that they lacked before. Two draft workers propose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from bench.control_plane.scheduler import running
from bench.control_plane.worker import MAX_LENGTH
from bench.core_speed import Pace
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.backend.interface import GenerationRequest
from services.launch.launcher import WorkerLaunch
from services.scheduler_client.remote_stream import RemoteStream

_TARGETS, _DRAFTS = 3, 2
_STREAMS_EACH, _BATCH = 4, 8
"""Where a target is lost, its sequences have room in the batches of the others."""
_PACE = Pace(target_step=0.025, target_row=0.0001, draft_pass=0.005)
_SHARE = 0.9
_PROMPT = (7,) * 32
_WARM_UP_SECONDS, _RECOVERY_SECONDS = 3.0, 3.0


@dataclass
class Reader:
    """What a stream got: the time of each delivery, its tokens, and the target that computed the last one."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    target: int = -1

    async def read(self, stream: RemoteStream) -> None:
        async for emission in stream:
            if emission.tokens:
                self.times.append(time.monotonic())
                self.tokens.append(len(emission.tokens))
                self.target = emission.tokens[-1]

    def between(self, begin: float, end: float) -> int:
        counts = [0, *accumulate(self.tokens)]
        return counts[bisect_left(self.times, end)] - counts[bisect_left(self.times, begin)]


def launches(agreement: float) -> list[WorkerLaunch]:
    common = {"pace": asdict(_PACE), "agreement": agreement, "batch": _BATCH, "inside": False}
    module = "bench.chaos.hanging_worker"
    targets = [WorkerLaunch(Role.TARGET, {**common, "number": n}, module=module) for n in range(_TARGETS)]
    return [*targets, *(WorkerLaunch(Role.DRAFT, common, module=module) for _ in range(_DRAFTS))]


async def measure(policy: str, agreement: float, seconds: float) -> list[dict[str, Any]]:
    config = SchedulerConfig(batch_size=_BATCH, max_running=_BATCH, policy=Policy(policy), draft_length=4)
    async with running(config, launches(agreement)) as (client, _, launcher):
        request = GenerationRequest(_PROMPT, MAX_LENGTH - 64)
        streams = await asyncio.gather(*(client.submit(request) for _ in range(_TARGETS * _STREAMS_EACH)))
        readers = [Reader() for _ in streams]
        tasks = [asyncio.create_task(one.read(stream)) for one, stream in zip(readers, streams, strict=True)]
        await asyncio.sleep(_WARM_UP_SECONDS)
        found = []
        for kind, (hang, go_on) in {
            "step hangs": (signal.SIGUSR1, signal.SIGUSR1),
            "process is stopped": (signal.SIGSTOP, signal.SIGCONT),
        }.items():
            figures = await _hang(launcher.workers[0].process_id, readers, (hang, go_on), seconds)
            found.append({"policy": policy, "fault": kind} | figures)
            await asyncio.sleep(_RECOVERY_SECONDS)
        for task in tasks:
            if task.done():
                raise RuntimeError("a stream ended during the measurement: take a shorter one")
            task.cancel()
    return found


async def _hang(
    process_id: int, readers: list[Reader], signals: tuple[signal.Signals, signal.Signals], seconds: float
) -> dict[str, Any]:
    """Target 0 is the one that hangs."""
    await asyncio.sleep(seconds)
    others = {number: [one for one in readers if one.target == number] for number in range(1, _TARGETS)}
    begin = time.monotonic()
    os.kill(process_id, signals[0])
    await asyncio.sleep(seconds)
    end = time.monotonic()
    os.kill(process_id, signals[1])
    before, during = (
        [sum(one.between(start, start + end - begin) for one in others[number]) for number in others]
        for start in (2 * begin - end, begin)
    )
    return {
        "sequences_on_others": [len(found) for found in others.values()],
        "sequences_that_moved": sum(one.target != 0 for one in readers) - sum(map(len, others.values())),
        "tokens_per_second_before": sum(before) / (end - begin),
        "tokens_per_second": sum(during) / (end - begin),
        "share": sum(during) / sum(before),
        "shares_of_targets": [after / earlier for earlier, after in zip(before, during, strict=True)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=[policy.value for policy in Policy])
    parser.add_argument("--agreement", type=float, default=0.7, help="chance of a draft token to be accepted")
    parser.add_argument("--seconds", type=float, default=6.0, help="before a fault, and of it")
    asked = parser.parse_args()
    rows = [row for policy in asked.policy for row in asyncio.run(measure(policy, asked.agreement, asked.seconds))]
    print(json.dumps({"pace": asdict(_PACE), "agreement": asked.agreement, "rows": rows}))
    return 0 if all(row["share"] >= _SHARE for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
