"""Lets one of three targets hang, in its step and then as a whole process (SIGSTOP), and measures the speed of the
others: the tokens a second that they compute, and those of the sequences that were with them before; and the shares of
what these were. Sequences of a target that is lost take turns with theirs, where batches have no room for all at once.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from bench.control_plane.scheduler import running
from bench.control_plane.worker import MAX_LENGTH
from bench.core_speed import Pace
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import Role
from spool.services.backend.interface import GenerationRequest
from spool.services.launch.launcher import WorkerLaunch
from spool.services.scheduler_client.remote_stream import RemoteStream

_TARGETS, _DRAFTS = 3, 2
_BATCH = 8
_PACE = Pace(target_step=0.025, target_row=0.0001, draft_pass=0.005)
_SHARE = 0.9
_PROMPT = (7,) * 32
_WARM_UP_SECONDS, _RECOVERY_SECONDS = 3.0, 3.0


@dataclass
class Reader:
    """What a stream got: the time of each delivery, and its tokens, of which each is the target that computed it."""

    times: list[float] = field(default_factory=list)
    tokens: list[Sequence[int]] = field(default_factory=list)

    async def read(self, stream: RemoteStream) -> None:
        async for emission in stream:
            if emission.tokens:
                self.times.append(time.monotonic())
                self.tokens.append(emission.tokens)

    @property
    def target(self) -> int:
        """Who computed the last one; -1: there is none."""
        return self.tokens[-1][-1] if self.tokens else -1

    def between(self, begin: float, end: float) -> Counter[int]:
        """Tokens by target."""
        return Counter(chain(*self.tokens[bisect_left(self.times, begin) : bisect_left(self.times, end)]))


def launches(agreement: float) -> list[WorkerLaunch]:
    common = {
        "pace": asdict(_PACE),
        "agreement": agreement,
        "second": 0.5,
        "batch": _BATCH,
        "inside": False,
        "ahead": False,
    }
    module = "bench.chaos.hanging_worker"
    targets = [WorkerLaunch(Role.TARGET, {**common, "number": n}, module=module) for n in range(_TARGETS)]
    return [*targets, *(WorkerLaunch(Role.DRAFT, common, module=module) for _ in range(_DRAFTS))]


async def measure(policy: str, agreement: float, seconds: float, streams: int) -> list[dict[str, Any]]:
    config = SchedulerConfig(batch_size=_BATCH, max_running=_BATCH, policy=Policy(policy), draft_length=4)
    async with running(config, launches(agreement)) as (client, _, launcher):
        request = GenerationRequest(_PROMPT, MAX_LENGTH - 64)
        submitted = await asyncio.gather(*(client.submit(request) for _ in range(_TARGETS * streams)))
        readers = [Reader() for _ in submitted]
        tasks = [asyncio.create_task(one.read(stream)) for one, stream in zip(readers, submitted, strict=True)]
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
    spans = (2 * begin - end, begin), (begin, end)
    by_targets = [[sum(one.between(*span)[number] for one in readers) for number in others] for span in spans]
    by_sequences = [sum(one.between(*span).total() for one in chain(*others.values())) for span in spans]
    before, during = map(sum, by_targets)
    return {
        "sequences_on_others": [len(found) for found in others.values()],
        "sequences_that_moved": sum(one.target != 0 for one in readers) - sum(map(len, others.values())),
        "tokens_per_second_before": before / (end - begin),
        "tokens_per_second": during / (end - begin),
        "share": during / before,
        "shares_of_targets": [after / earlier for earlier, after in zip(*by_targets, strict=True)],
        "share_of_their_sequences": by_sequences[1] / by_sequences[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=[policy.value for policy in Policy])
    parser.add_argument("--agreement", type=float, default=0.7, help="chance of a draft token to be accepted")
    parser.add_argument("--seconds", type=float, default=6.0, help="before a fault, and of it")
    parser.add_argument("--streams", type=int, default=4, help=f"of each target; batches have room for {_BATCH}")
    asked = parser.parse_args()
    rows = [
        row
        for policy in asked.policy
        for row in asyncio.run(measure(policy, asked.agreement, asked.seconds, asked.streams))
    ]
    print(json.dumps({"pace": asdict(_PACE), "agreement": asked.agreement, "streams": asked.streams, "rows": rows}))
    return 0 if all(row["share"] >= _SHARE for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
