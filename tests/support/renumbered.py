"""A tiny model whose vocabulary is not that of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.command_line import CHARACTERS, save_tokenizer


def save_renumbered(source: Path, folder: Path, order: Sequence[int]) -> Path:
    """The model in `source` with the tokens `order` of `save_tokenizer`, in that order, and with two more rows than it
    has tokens, of which one always has the largest logit."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        rows = module.weight.detach()
        module.weight = torch.nn.Parameter(torch.cat([rows[list(order)], 99 * rows[:1], -99 * rows[:1]]))
    model.config.vocab_size = len(order) + 2
    model.save_pretrained(folder)
    save_tokenizer(folder, [CHARACTERS[number] for number in order])
    return folder
