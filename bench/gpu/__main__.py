"""`python -m bench.gpu`: speed and exactness of Spool's engine on one GPU, the most important blocks first.

Every finding is written to FOLDER/findings.jsonl at once. A block that fails or takes too long does not affect the
others; if it leaves the device unusable, a new process continues with the next block.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from transformers.utils import logging as transformers_logging

from bench.gpu.device import (
    check_device,
    default_device,
    describe_gpu,
    product_rate,
    wait_for,
)
from bench.gpu.engines import Bench, Engines
from bench.gpu.exactness import exactness
from bench.gpu.findings import Block, Findings, run_block
from bench.gpu.pair import SHAPES
from bench.gpu.processes import killed_and_moved
from bench.gpu.products import measure_products
from bench.gpu.speed import inside, long_contexts, plain, sampled, speculation
from bench.record import describe_machine, installed_version, origin
from spool.engine.models.source import CACHE_VARIABLE

_PACKAGES = ("torch", "transformers", "triton", "numpy", "tokenizers")
# What a server needs beside torch and transformers; others come with these.
_SERVER_PACKAGES = ("grpc", "pydantic", "fastapi", "uvicorn", "httpx", "llguidance", "psutil")
_SERVED = "as served"


@dataclass(slots=True)
class Run:
    """`small`: sizes for a CPU, on which the script is tried. `folder` takes checkpoints for a while."""

    bench: Bench
    small: bool
    commit: str
    folder: Path

    def blocks(self) -> list[Block]:
        return [
            Block("device", 20, self.device),
            Block("served", 270, self.served),
            Block("speed", 150, self.speed),
            Block("exactness", 90, lambda: self.exactness(self.bench.engines(_SERVED), _SERVED, 64, 64)),
            Block("draft inside", 90, self.draft_inside),
            Block("larger passes", 90, self.larger_passes),
            Block("sampling and contexts", 60, self.more_speed),
            Block("attention", 60, self.attention),
            Block("products", 90, self.products),
            Block("exactness without graphs", 60, self.exactness_without_graphs),
            Block("processes", 120, self.processes),
        ]

    def device(self) -> None:
        bench, findings = self.bench, self.bench.findings
        about = origin(f"python -m bench.gpu --device {bench.device} --shape {bench.shape}")
        about["machine"] = describe_machine() | describe_gpu(bench.device)
        about["commit"] = self.commit or about["commit"]
        findings.add("origin", **about)
        findings.add("packages", **{name: installed_version(name) for name in _PACKAGES})
        findings.add(
            "bandwidth",
            read_gb_per_second=bench.read_bandwidth / 1e9,
        )
        findings.add("bfloat16 product", tera_operations_per_second=product_rate(bench.device) / 1e12)

    def served(self) -> None:
        if missing := [name for name in _SERVER_PACKAGES if find_spec(name) is None]:
            self.bench.findings.add("left out", reason=f"not installed: {', '.join(missing)} (bench/gpu/wheels.py)")
            return
        from bench.gpu.serving import PairServer

        PairServer(self.bench, self.small, self.folder).run()

    def draft_inside(self) -> None:
        name = "draft inside"
        inside(self.bench, self.bench.engines(name), name, self.batches, 4 if self.small else 40)

    def larger_passes(self) -> None:
        tokens, contexts = (256, (300,)) if self.small else (8192, (2048, 8192))
        name = f"passes of {tokens} tokens"
        long_contexts(self.bench, self.bench.engines(name, batched_tokens=tokens), name, contexts, (2,))

    def speed(self) -> None:
        engines = self.bench.engines(_SERVED)
        rounds = 4 if self.small else 40
        speeds = plain(self.bench, engines, _SERVED, self.batches, rounds)
        speculation(self.bench, engines, _SERVED, speeds, (0.8, 0.75, 0.7), (2, 3, 4, 5), rounds)
        # Once more, so that what changes from one moment to the next is seen.
        plain(self.bench, engines, f"{_SERVED}, again", self.batches, rounds)

    def more_speed(self) -> None:
        engines = self.bench.engines(_SERVED)
        sampled(self.bench, engines, _SERVED, self.batches, 4 if self.small else 24)
        contexts, batches = ((100,), (1, 2)) if self.small else ((2048, 8192), (1, 8))
        long_contexts(self.bench, engines, _SERVED, contexts, batches)

    def exactness_without_graphs(self) -> None:
        name = "without graphs"
        self.exactness(self.bench.engines(name, cuda_graphs=False), name, 8, 32)

    def exactness(self, engines: Engines, name: str, streams: int, tokens: int) -> None:
        if self.small:
            streams, tokens = 6, 10
        exactness(self.bench, engines, name, streams, tokens, min(32, streams))

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 4) if self.small else (1, 8, 32)

    def products(self) -> None:
        from spool.engine.cuda.library_products import sum_in_one_part
        from spool.engine.cuda.triton_product import loads_words, product

        bench = self.bench
        bench.drop()
        with torch.inference_mode():
            measure_products(bench.device, bench.findings, "cuBLAS", F.linear, bench.read_bandwidth)
            if bench.is_gpu:
                measure_products(bench.device, bench.findings, "own", product, bench.read_bandwidth)
                of_codes = partial(product, words=loads_words(bench.device))
                for bits in (8, 4):
                    name = f"own, {bits} bits"
                    measure_products(bench.device, bench.findings, name, of_codes, bench.read_bandwidth, bits)
                sum_in_one_part()
                measure_products(bench.device, bench.findings, "cuBLASLt", F.linear, bench.read_bandwidth, own=product)

    def attention(self) -> None:
        if not self.bench.is_gpu:
            self.bench.findings.add("left out", reason="the attention kernel is for GPUs")
            return
        from bench.gpu.attention import check_attention, check_last_pages, time_attention

        with torch.inference_mode():
            time_attention(self.bench.device, self.bench.findings, self.bench.read_bandwidth)
            check_attention(self.bench.device, self.bench.findings)
            self.bench.drop()
            check_last_pages(self.bench.device, self.bench.findings)

    def processes(self) -> None:
        self.bench.drop()
        killed_and_moved(self.bench)


def main(arguments: Sequence[str]) -> int:
    """0 where every block of this process came to its end, else 1."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for findings.jsonl")
    parser.add_argument("--seconds", type=float, default=480, help="for everything together")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--shape", choices=SHAPES, help="of the pair; default: qwen3-8b, tiny on a CPU")
    parser.add_argument("--only", action="append", metavar="BLOCK", help="leave the other blocks out; repeatable")
    parser.add_argument("--commit", default="", help="what is measured, where there is no repository to ask")
    parser.add_argument("--first", default="", metavar="BLOCK", help="leave out the blocks before this one")
    asked = parser.parse_args(arguments)
    device = asked.device or default_device()
    try:
        check_device(device)
    except ValueError as error:
        parser.error(str(error))
    os.environ.setdefault(CACHE_VARIABLE, str(asked.out / "cache"))
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    small = device == "cpu"
    findings = Findings(asked.out / "findings.jsonl", lambda line: print(line, flush=True))
    dtype = torch.float32 if small else torch.bfloat16
    bench = Bench(torch.device(device), dtype, asked.shape or ("tiny" if small else "qwen3-8b"), findings)
    blocks = Run(bench, small, asked.commit, asked.out / "pair").blocks()
    names = [block.name for block in blocks]
    unknown = {*(asked.only or names), *([asked.first] if asked.first else [])} - set(names)
    if unknown:
        parser.error(f"no block is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    left = blocks[names.index(asked.first) if asked.first else 0 :]
    whole = True
    for place, block in enumerate(left):
        if asked.only and block.name not in asked.only:
            continue
        seconds = asked.seconds - (time.monotonic() - started)
        whole = run_block(block, findings, seconds) and whole
        if not _usable(bench.device) and place + 1 < len(left):
            findings.add("the device is unusable in this process, another one goes on")
            seconds = asked.seconds - (time.monotonic() - started)
            # Of an option that is given twice, the last one counts.
            again = [*arguments, "--seconds", str(seconds), "--first", left[place + 1].name]
            os.execv(sys.executable, [sys.executable, "-m", "bench.gpu", *again])
    print(f"findings: {asked.out / 'findings.jsonl'}")
    return 0 if whole else 1


def _usable(device: torch.device) -> bool:
    """After some errors, every call to the device fails in the process that met them."""
    try:
        wait_for(device)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
