"""The same streams as in virtual time, through a real scheduler, gRPC, and worker processes that keep to a law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from bench.draft_ahead.laws import AGREEMENTS, LAWS, LONGEST, OUTCOMES, PACED, rate
from bench.draft_ahead.streams import one_at_a_time
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch


async def in_real_time(tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Ordinary speculation with the length that is best in virtual time, and drafting ahead.

    Plain decoding tells what a wire takes here, each way: half of what a token takes beyond its step.
    """
    found = []
    for law, costs in LAWS.items():
        for agreement in AGREEMENTS:
            ordinary = {length: rate(costs, agreement, draft_length=length).rate for length in range(1, LONGEST + 1)}
            best = max(ordinary, key=ordinary.__getitem__)
            launches = [
                WorkerLaunch(role, {"costs": asdict(costs), "agreement": agreement}, threads=1, module=PACED)
                for role in (Role.TARGET, Role.DRAFT)
            ]
            configs = {
                "plain": SchedulerConfig(batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=0),
                "ordinary": SchedulerConfig(batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=best),
                "ahead": SchedulerConfig(batch_size=1, max_running=1, draft_length=LONGEST, draft_ahead=OUTCOMES),
            }
            prompts = [(number,) * 5 for number in range(3)]
            streams = {name: each async for name, each in one_at_a_time(launches, configs, prompts, tokens)}
            ratio = streams["ahead"].rate / streams["ordinary"].rate
            wire = (1 / streams["plain"].rate - costs.base - costs.row) / 2
            virtual = [
                rate(law_here, agreement, outcomes=OUTCOMES).rate / rate(law_here, agreement, draft_length=best).rate
                for law_here in (costs, replace(costs, latency=wire))
            ]
            found.append(
                {
                    "law": law,
                    "agreement": agreement,
                    "ordinary_length": best,
                    "ordinary": streams["ordinary"].rate,
                    "ahead": streams["ahead"].rate,
                    "found": streams["ahead"].share_found,
                    "wire_seconds": wire,
                    "ratio": ratio,
                    "ratio_in_virtual_time": virtual[0],
                    "ratio_in_virtual_time_with_this_wire": virtual[1],
                }
            )
            say(
                f"{law}, {agreement}: {ratio:.3f} times ordinary speculation, in virtual time {virtual[0]:.3f}, "
                f"with this wire {virtual[1]:.3f}"
            )
    return {"tokens": tokens, "outcomes": OUTCOMES, "streams": found}
