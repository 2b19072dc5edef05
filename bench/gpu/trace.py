"""Where the device's time goes in a step: its kernels by torch's profiler, how many, and the gaps between them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.device import wait_for
from bench.gpu.findings import Findings

STEPS = 4
_SHOWN = 15


def trace(device: torch.device, findings: Findings, what: str, step: Callable[[], object], folder: Path) -> None:
    """Of several steps in a row: kernels and copies on the device alone, not the calls that launched them. The trace
    lies in `folder`."""
    step()
    wait_for(device)
    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            step()
        wait_for(device)
    plain = folder / "trace.json"
    found.export_chrome_trace(str(plain))
    content = plain.read_bytes()
    plain.unlink()
    (folder / f"trace-{what.replace(' ', '-').replace(',', '')}.json.gz").write_bytes(gzip.compress(content))
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if device.type == "cuda" else ("cpu_op",)
    events = [event for event in json.loads(content)["traceEvents"] if event.get("cat") in kinds]
    findings.add(f"kernels, {what}", **summary(events))


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of events with `name`, `ts` and `dur` in microseconds, on one stream or several: the share of the largest names
    in the busy time; `gap_ms` is the time between the first start and the last end in which none of them ran."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    busy, end, gaps = 0.0, None, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        spent[event["name"]] += event["dur"]
        calls[event["name"]] += 1
        busy += event["dur"]
        if end is not None:
            gaps += max(0.0, event["ts"] - end)
        end = max(end or 0.0, event["ts"] + event["dur"])
    return {
        "kernels_per_step": len(events) / STEPS,
        "busy_ms": busy / 1000 / STEPS,
        "gap_ms": gaps / 1000 / STEPS,
        "largest": [
            {"name": name[:120], "share": time / busy, "calls": calls[name] / STEPS}
            for name, time in spent.most_common(_SHOWN)
        ],
    }
