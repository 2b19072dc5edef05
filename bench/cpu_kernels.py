"""Linear layers of a small model on this CPU: Spool's kernels, torch and oneDNN. JSON on the last line.

    python -m bench.record cpu_kernels -- python -m bench.cpu_kernels --threads 2

For each instruction set that the processor has, in a process of its own that limits torch and oneDNN as well: how many
milliseconds the linear layers of 30 decoder layers take (the demo target's; each has weights of its own, which come
from memory), how fast memory is read, and how fast torch multiplies large float32 matrices.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from engine.cpu.isa import AUTO, available_isas, chosen_isa, library_limits
from engine.cpu.kernels import load_cpu_kernels
from engine.cpu.linear import PrepackedLinear

ROWS = (1, 2, 4, 8, 16, 32, 64, 192)
LAYERS = 30
# Inputs and outputs of a layer: joined query, key and value; output; joined gate and up; down.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
_SECONDS_PER_CELL = 0.6
_READ_BYTES = 1 << 29
_LARGE = 1536

SPOOL = ("spool bfloat16", "spool float16", "spool float32")
OTHERS = ("torch bfloat16", "oneDNN bfloat16, prepacked", "torch float32")


def measure(threads: int, console: Console) -> dict[str, Any]:
    """In this process, on the instruction set that its environment names."""
    torch.set_num_threads(threads)
    found: dict[str, Any] = {
        "isa": chosen_isa(AUTO).name,
        "torch": torch.backends.cpu.get_cpu_capability(),
        "read_gb_per_second": _read_speed() / 1e9,
        "float32_gflops": _multiply_speed() / 1e9,
        "milliseconds": {},
        "left_out": {},
    }
    with torch.inference_mode():
        for name in (*SPOOL, *OTHERS):
            console.print(f"{found['isa']}: {name}", highlight=False)
            try:
                layers = [_layer(name, inputs, outputs) for _ in range(LAYERS) for inputs, outputs in SHAPES]
                found["milliseconds"][name] = {rows: _pass_milliseconds(layers, name, rows) for rows in ROWS}
            except (RuntimeError, AttributeError) as error:
                found["left_out"][name] = " ".join(str(error).split())[:200]
    return found


def _read_speed() -> float:
    """Bytes a second, the best of a few."""
    data = torch.ones(_READ_BYTES // 4)
    return max(_READ_BYTES / _seconds(data.sum) for _ in range(8))


def _multiply_speed() -> float:
    """Operations a second, two for a product and its sum."""
    left, right = torch.randn(2, _LARGE, _LARGE)
    return max(2 * _LARGE**3 / _seconds(lambda: left @ right) for _ in range(8))


def _layer(name: str, inputs: int, outputs: int) -> Callable[[Any], Any]:
    """A function of rows `[rows, inputs]`. Raises RuntimeError or AttributeError if this machine does not have it."""
    weight = torch.randn(outputs, inputs) / inputs**0.5
    if name in SPOOL:
        dtype = getattr(torch, name.split()[1])
        kernels = load_cpu_kernels(dtype, lambda *_: None)
        if kernels is None:
            raise RuntimeError("no C compiler")
        panels = kernels.to_panels(weight.to(dtype))
        return lambda rows: kernels.linear(rows, panels, None, outputs)
    if name.startswith("oneDNN"):
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise RuntimeError("oneDNN has no products of bfloat16 here")
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        linear.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        return PrepackedLinear(linear)
    weight = weight.to(getattr(torch, name.split()[1]))
    return lambda rows: torch.nn.functional.linear(rows, weight)


def _pass_milliseconds(layers: Sequence[Callable[[Any], Any]], name: str, rows: int) -> float:
    dtype = getattr(torch, name.replace(",", "").split()[1])
    inputs = {size: torch.randn(rows, size).to(dtype) for size, _ in SHAPES}

    def run_layers() -> None:
        for place, layer in enumerate(layers):
            layer(inputs[SHAPES[place % len(SHAPES)][0]])

    run_layers()
    samples: list[float] = []
    while sum(samples) < _SECONDS_PER_CELL or len(samples) < 3:
        samples.append(_seconds(run_layers))
    return statistics.median(samples) * 1000


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads that compute")
    parser.add_argument("--here", action="store_true", help="measure in this process, as its environment says")
    asked = parser.parse_args()
    console = Console(stderr=True)
    if asked.here:
        print(json.dumps(measure(asked.threads, console)), flush=True)
        return 0
    sets = []
    for isa in available_isas():
        environment = os.environ | library_limits(isa.name) | {"OMP_NUM_THREADS": str(asked.threads)}
        command = [sys.executable, "-m", "bench.cpu_kernels", "--here", "--threads", str(asked.threads)]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1]
        )
        sets.append(json.loads(done.stdout.strip().splitlines()[-1]))
        console.print_json(data=sets[-1])
    print(json.dumps({"threads": asked.threads, "sets": sets}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
