"""The command line of `python -m bench.gpu exactness`: bits of logits on one device, whatever shares a step."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bench.families.decoding import decode
from bench.families.tiny import VOCABULARY, tiny_config, tiny_model
from bench.gpu.device import check_device, default_device, describe_used
from bench.gpu.results import write_json
from bench.record import origin
from engine.errors import EngineError
from engine.models.loading import load_target_engine
from engine.settings import DTYPES, EngineSettings

_DESCRIPTION = "Exact mode on tiny models of wide layers: every family that has fused layers, in every dtype."
FAMILIES = ("llama", "qwen2", "qwen3")
# Wide enough for torch's sums over a row to change their order with the number of rows.
_WIDE = {"hidden_size": 1024, "intermediate_size": 1024, "head_dim": 64}
_PROMPTS = [[(7 * place + number) % VOCABULARY for place in range(5 + 9 * number)] for number in range(4)]
_NEW_TOKENS = 8
_DRAFTS = ((3,), (3, 5, 3, 5))


def main(arguments: Sequence[str]) -> int:
    """0 where exact mode has shapes in all cells and all logits are bit-equal; else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu exactness", description=_DESCRIPTION)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="once for each; default: all")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    asked = parser.parse_args(arguments)
    device = asked.device or default_device()
    try:
        check_device(device)
    except ValueError as error:
        parser.error(str(error))
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    cells = []
    for family in asked.family or FAMILIES:
        for dtype in DTYPES[1:]:
            cells.append({"family": family, "dtype": dtype} | _cell(family, dtype, device))
            print(f"{family}, {dtype}: {cells[-1]['found']}", file=sys.stderr, flush=True)
    whole = all(cell["equal"] for cell in cells)
    command = " ".join(
        ["python -m bench.gpu exactness --device", device, *(f"--family {f}" for f in asked.family or ())]
    )
    write_json(asked.output, origin(command, describe_used(device)) | {"whole": whole, "cells": cells})
    return 0 if whole else 1


def _cell(family: str, dtype: str, device: str) -> dict[str, Any]:
    config = tiny_config(family)
    for name, size in _WIDE.items():
        setattr(config, name, size)
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(config).to(getattr(torch, dtype)).save_pretrained(folder)
        settings = EngineSettings(
            folder, dtype, device=device, page_size=16, kv_pages=64, max_num_batched_tokens=64, exact=True
        )
        said: list[str] = []
        try:
            engine = load_target_engine(settings, lambda word, _: said.append(word))
        except EngineError as error:
            return {"equal": False, "found": str(error), "row_counts": []}
    plain = [decode(engine, [prompt], _NEW_TOKENS, ())[0] for prompt in _PROMPTS]
    compared = [decode(engine, _PROMPTS, _NEW_TOKENS, drafts) for drafts in _DRAFTS]
    equal = all(found == plain for found in compared)
    shapes = next(word for word in said if word.startswith("exact mode:"))
    return {
        "equal": equal,
        "found": f"{'bit-equal' if equal else 'logits differ'}; {shapes}",
        "row_counts": list(engine.description.exact_row_counts),
    }
