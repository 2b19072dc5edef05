"""The command line of `python -m bench.gpu measure`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from transformers.utils import logging as transformers_logging

from bench.gpu.device import check_device, default_device, describe_used
from bench.gpu.measure import measure
from bench.gpu.pair import PairError, ensure_pair
from bench.gpu.results import ResultFile
from bench.gpu.settings import GpuBenchSettings
from bench.record import origin
from engine.errors import EngineError, one_line
from engine.settings import DTYPES

_DESCRIPTION = "Decodes with a synthetic pair on one device: speed, its distance to the device's limit, and equality."
_REST = "the rest"
_DEFAULTS = {field.name: field.default for field in fields(GpuBenchSettings)}
_NUMBERS = {
    "seed": "of weights and prompts",
    "draft_length": "tokens proposed a round, under `auto` at most",
    "prompt_tokens": "of each prompt",
    "max_tokens": "new tokens of each sequence",
    "sequences_per_row": "sequences decoded for each row of a batch, one after the other",
    "compared": "sequences whose output and logits are compared with batch-1 plain decoding",
    "logits_batch_size": "batch of the speculation whose logits are compared",
    "logits_tokens": "new tokens of each sequence there",
    "prefill_chunk": "prompt tokens that ride along with a step",
}


def parse(arguments: Sequence[str]) -> tuple[Path, Path, GpuBenchSettings]:
    """Folder of the pair, file of the results, settings. Raises ValueError naming field, value and limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu measure", description=_DESCRIPTION)
    parser.add_argument("folder", type=Path, help="of the pair; made where it is not there")
    parser.add_argument("--shape", required=True, help="see bench/synthetic_pair.py: qwen3-8b, vicuna-7b, ...")
    parser.add_argument("--agreement", type=float, default=0.7, help="share of draft tokens that are the target's")
    parser.add_argument("--batch-size", type=int, action="append", required=True, help="rows; repeat for several")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--dtype", choices=DTYPES, default=_DEFAULTS["dtype"], help="of weights and KV")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file, written after every cell")
    for name, text in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=_DEFAULTS[name], help=text)
    asked = parser.parse_args(arguments)
    device = asked.device or default_device()
    check_device(device)
    settings = GpuBenchSettings(
        shape=asked.shape,
        agreement=asked.agreement,
        batch_sizes=tuple(asked.batch_size),
        device=device,
        dtype=asked.dtype,
        **{name: getattr(asked, name) for name in _NUMBERS},
    )
    return asked.folder, asked.output, settings


def main(arguments: Sequence[str]) -> int:
    """0 where all was measured, else 1. The reason is told in one line, and in the file where there is one by then;
    what nobody expects is raised as well."""
    transformers_logging.set_verbosity_error()
    try:
        folder, output, settings = parse(arguments)
        results = ResultFile(output, origin(shown(arguments), describe_used(settings.device)), settings.to_json())
    except ValueError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 1
    started = time.monotonic()

    def progress(message: str, _fraction: float | None) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {message}", file=sys.stderr, flush=True)

    try:
        results.set("pair", ensure_pair(folder, settings, progress))
        measure(settings, folder, results, progress)
    except (EngineError, PairError) as error:
        results.leave_out(_REST, str(error))
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 1
    except BaseException as error:
        results.leave_out(_REST, one_line(error))
        raise
    print(output)
    return 0 if results.whole else 1


def shown(arguments: Sequence[str]) -> str:
    """The command that results carry; where files lie on one machine is no part of it."""
    short = [os.path.basename(one.rstrip("/")) if os.path.isabs(one) else one for one in arguments]
    return shlex.join(["python", "-m", "bench.gpu", "measure", *short])
