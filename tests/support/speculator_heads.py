"""Drafters in the format of speculators and their target, whose weights are the same on every machine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from spool.engine.sampling.noise import noise_bits, top_bits
from tests.support.tiny_models import VOCABULARY, tiny_model

LAYERS = 4
PROMPTS = (3, 20, 37)
"""Their lengths: less than a page, and more than one and two."""
GOLDEN = Path(__file__).parents[1] / "engine" / "golden_speculators.json"
"""What the package itself proposes (tests/support/golden_speculators.py)."""


def fixed_target() -> PreTrainedModel:
    target = tiny_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(fixed_tensor(f"target.{name}", parameter.shape))
    return target


def fixed_tensor(name: str, shape: Sequence[int]) -> Tensor:
    """Multiples of 2^-25 near 1 for a norm, otherwise around 0; of offsets and masks of tokens, each second one."""
    if name in ("d2t", "t2d"):
        rows = shape[0] if name == "d2t" else VOCABULARY // 2
        tokens = torch.arange(rows) * VOCABULARY // rows
        return tokens - torch.arange(rows) if name == "d2t" else torch.isin(torch.arange(VOCABULARY), tokens)
    count = torch.Size(shape).numel()
    bits = top_bits(noise_bits(torch.tensor([zlib.crc32(name.encode())]), torch.arange(count)))
    numbers = ((bits >> 8) - (1 << 23)).view(*shape).float() * 2.0**-24
    return 1 + numbers * 0.5 if "norm" in name and len(shape) == 1 else numbers


def fixed_prompt(length: int) -> list[int]:
    return (top_bits(noise_bits(torch.tensor([length]), torch.arange(length))) % VOCABULARY).tolist()


def golden_cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def save_drafter(
    folder: Path,
    case: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """A drafter of the golden file, of whose configuration and tensors some are changed or, where they are None, left
    out; keys of the configuration's objects follow a dot."""
    fields = json.loads(json.dumps(case["config"]))
    for name, value in (config or {}).items():
        *path, last = name.split(".")
        inner = fields
        for one in path:
            inner = inner[one]
        inner[last] = value
        if value is None:
            del inner[last]
    stored: dict[str, Tensor | None] = {name: fixed_tensor(name, shape) for name, shape in case["tensors"].items()}
    stored |= tensors or {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file({name: one for name, one in stored.items() if one is not None}, folder / "model.safetensors")
    return folder
