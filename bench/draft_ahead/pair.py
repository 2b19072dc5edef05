"""The demo pair, target and draft on a core each: a stream at a time, every way over the same two workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median, stdev
from typing import Any

from bench.draft_ahead.prompts import read_prompts
from bench.draft_ahead.streams import one_at_a_time
from engine.models.source import resolve_model
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch

_LENGTHS = (1, 2)
_AHEAD = ((1, 8), (1, 12), (1, 16))


async def measured_pair(
    questions: Path, count: int, tokens: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tokens a second of each way; raises RuntimeError where an output is not that of plain decoding.

    The ratio is that of the best way ahead and the best ordinary one, by their medians: the geometric mean over the
    repeats, each of which measures all ways in turn, and its standard error.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    launches = [
        WorkerLaunch(role, {"model": str(resolve_model("demo", role).folder), "threads": 1}, threads=1, cpus=(core,))
        for role, core in zip((Role.TARGET, Role.DRAFT), cores, strict=True)
    ]
    configs = {"plain": _config(0)}
    configs |= {f"ordinary, {length}": _config(length) for length in _LENGTHS}
    configs |= {f"ahead, {length}, {outcomes}": _config(length, outcomes) for length, outcomes in _AHEAD}
    prompts = read_prompts(questions, count)
    rates: dict[str, list[float]] = {name: [] for name in configs}
    found: dict[str, float] = {}
    step_ms: dict[str, list[float]] = {name: [] for name in configs}
    outputs: list[tuple[int, ...]] = []
    for repeat in range(repeats):
        async for name, streams in one_at_a_time(launches, configs, prompts, tokens):
            outputs = outputs or streams.outputs
            if streams.outputs != outputs:
                raise RuntimeError(f"{name} gave other outputs than plain decoding")
            rates[name].append(streams.rate)
            found[name] = streams.share_found
            step_ms[name].append(streams.target_step * 1000)
            say(f"{repeat + 1}: {name}: {streams.rate:.1f} tokens a second, found {streams.share_found:.2f}")
    ways: list[dict[str, Any]] = [
        {
            "way": name,
            "rate": median(each),
            "least": min(each),
            "most": max(each),
            "found": found[name],
            "target_step_ms": median(step_ms[name]),
        }
        for name, each in rates.items()
    ]
    ordinary, ahead = (
        max((name for name in rates if name.startswith(kind)), key=lambda name: median(rates[name]))
        for kind in ("ordinary", "ahead")
    )
    ratios = [fast / slow for fast, slow in zip(rates[ahead], rates[ordinary], strict=True)]
    return {
        "prompts": len(prompts) - 1,
        "prompt_tokens": sum(map(len, prompts[1:])),
        "tokens": tokens,
        "repeats": repeats,
        "ways": ways,
        "equal_outputs": True,
        "best": [ordinary, ahead],
        "ratio": geometric_mean(ratios),
        "ratio_error": stdev(ratios) / len(ratios) ** 0.5,
    }


def _config(draft_length: int, outcomes: int = 0) -> SchedulerConfig:
    return SchedulerConfig(
        batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=draft_length, draft_ahead=outcomes
    )
