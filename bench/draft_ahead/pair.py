"""The demo pair, target and draft on a core each: a stream at a time, every way over the same two workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.draft_ahead.prompts import read_prompts
from bench.draft_ahead.streams import one_at_a_time
from engine.models.source import resolve_model
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch

_LENGTHS = (1, 2)
_AHEAD = ((1, 4), (2, 4), (2, 8))


async def measured_pair(
    questions: Path, count: int, tokens: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tokens a second of each way, a median of the repeats, and whether all outputs are those of plain decoding."""
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
    outputs: list[tuple[int, ...]] = []
    for repeat in range(repeats):
        async for name, streams in one_at_a_time(launches, configs, prompts, tokens):
            outputs = outputs or streams.outputs
            if streams.outputs != outputs:
                raise RuntimeError(f"{name} gave other outputs than plain decoding")
            rates[name].append(streams.rate)
            found[name] = streams.share_found
            say(f"{repeat + 1}: {name}: {streams.rate:.1f} tokens a second, found {streams.share_found:.2f}")
    ways: list[dict[str, Any]] = [
        {"way": name, "rate": median(each), "least": min(each), "most": max(each), "found": found[name]}
        for name, each in rates.items()
    ]
    best = {
        kind: max((way for way in ways if way["way"].startswith(kind)), key=lambda way: way["rate"])
        for kind in ("ordinary", "ahead")
    }
    return {
        "prompts": len(prompts) - 1,
        "prompt_tokens": sum(map(len, prompts[1:])),
        "tokens": tokens,
        "repeats": repeats,
        "ways": ways,
        "equal_outputs": True,
        "ratio": best["ahead"]["rate"] / best["ordinary"]["rate"],
    }


def _config(draft_length: int, outcomes: int = 0) -> SchedulerConfig:
    return SchedulerConfig(
        batch_size=1, max_running=1, policy=Policy.RAGGED, draft_length=draft_length, draft_ahead=outcomes
    )
