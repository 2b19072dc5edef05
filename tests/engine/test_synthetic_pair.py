"""A pair with random weights agrees as often as asked, by transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.synthetic_pair import write_pair
from services.text.tokenizer import ModelTokenizer


@pytest.mark.parametrize("asked", [0.4, 0.8])
def test_agreement_is_as_asked(tmp_path: Path, asked: float) -> None:
    write_pair(tmp_path, "tiny", asked)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16) for name in ("target", "draft")
    )
    models: list[Any] = [target, draft]
    ids = torch.tensor([[number] for number in range(0, 512, 2)])
    with torch.inference_mode():
        texts = models[0].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        chosen = [model(texts).logits.argmax(-1)[:, :-1] for model in models]
    assert torch.equal(chosen[0], texts[:, 1:])
    assert abs((chosen[1] == texts[:, 1:]).float().mean().item() - asked) < 0.1
    tokenizers = [ModelTokenizer(tmp_path / name) for name in ("target", "draft")]
    assert tokenizers[0].vocabulary_digest == tokenizers[1].vocabulary_digest
    assert tokenizers[0].decode(tokenizers[0].encode("What is this?")) == "What is this?"
