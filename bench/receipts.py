"""What receipts cost while tokens are generated, and what part of that time their replay takes. JSON on the last line.

python -m bench.receipts --temperature 0.8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from spool.deploy.config.loading import parse_override
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.models import prepare_models
from spool.deploy.offline.cell import running_cell
from spool.deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from spool.deploy.offline.prompts import load_prompts
from spool.deploy.offline.settings import SamplingSettings, configured
from spool.deploy.progress import Reporter
from spool.services.receipts.receipt import Receipt

# Rows of a step.
_BATCH = 8


async def generate(
    settings: SpoolConfig, jobs: list[Job], turns: int, reporter: Reporter, file: Path
) -> list[tuple[float, float]]:
    """Writes receipts; gives the seconds of each turn without digests of logits and with them."""
    config = settings.scheduling.scheduler_config(drafting=False)
    seconds: tuple[list[float], list[float]] = [], []
    found = [Completion() for _ in jobs]
    async with running_cell(settings, longest_lengths(jobs, config), reporter) as cell:
        for turn in range(turns):
            for digests in (False, True)[:: -1 if turn % 2 else 1]:
                warm_up = [replace(job, max_tokens=16) for job in jobs[:_BATCH]]
                plan = DecodingPlan(f"digests {digests}", config, frozenset(), False, digests, warm_up)
                keep = found.__setitem__ if digests else lambda *_: None
                seconds[digests].append((await decode(cell, plan, jobs, reporter, keep)).seconds)
        async with cell.service(config, drafting=False) as service:
            (target,) = service.workers.descriptions.values()
    with file.open("w", encoding="utf-8") as lines:
        for job, one in zip(jobs, found, strict=True):
            record = tuple(one.tokens), tuple(one.logits_digests), job.sampling
            lines.write(json.dumps(Receipt("", target.fingerprint, job.tokens, *record).to_json()) + "\n")
    return list(zip(*seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.receipts", description="Measures receipts and their replay.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--prompts", type=Path, help="JSON lines as for `spool generate`")
    parser.add_argument("--temperature", type=float, default=0.0)
    for name, default in (("count", 64), ("tokens", 256), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sampling = SamplingSettings(max_tokens=given.tokens, temperature=given.temperature)
    named = f"models.target={given.target}", "models.draft=none", f"scheduling.batch_size={_BATCH}"
    settings = configured([*map(parse_override, named)], compares=True)
    reporter = Reporter()
    with tempfile.TemporaryDirectory() as scratch:
        ready = prepare_models(settings, reporter)
        prompts = load_prompts(given.prompts, None)
        several = [replace(prompts[number % len(prompts)], index=number) for number in range(given.count)]
        jobs = make_jobs(several, ready.tokenizer, sampling, ready.max_positions)
        file = Path(scratch) / "receipts.jsonl"
        turns = asyncio.run(generate(settings, jobs, given.turns, reporter, file))
        command = [sys.executable, "-m", "spool.deploy.cli.main", "replay", file, "--target", given.target, "--json"]
        replayed = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    tokens = sum(job.max_tokens for job in jobs)
    plain, digested = (median(each) for each in zip(*turns, strict=True))
    costs = [seconds / without - 1 for without, seconds in turns]
    result = {
        "tokens": tokens,
        "tokens_per_second": {"without": tokens / plain, "with": tokens / digested},
        "cost_of_receipts": median(costs),
        "cost_in_turns": sorted(costs),
        "replay_seconds": replayed["seconds"],
        "replay_share": replayed["seconds"] / digested,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
