"""Pairs with random weights agree as often as asked, checked token by token with plain transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.synthetic_pair import SHAPES, mean_accepted, write_pair
from services.text.tokenizer import ModelTokenizer


def agreement_token_by_token(target_folder: str, draft_folder: str) -> float:
    """The target writes eight texts greedily; at each token the draft is asked what it would have written."""
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target_folder, draft_folder))
    generator = torch.Generator().manual_seed(99)
    agreed = total = 0
    with torch.inference_mode():
        texts = torch.randint(target.config.vocab_size, (8, 20), generator=generator)
        for _ in range(40):
            chosen = target(texts).logits[:, -1].argmax(-1)
            agreed += int((draft(texts).logits[:, -1].argmax(-1) == chosen).sum())
            total += len(texts)
            texts = torch.cat([texts, chosen[:, None]], dim=1)
    return agreed / total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "dtype"), [(0.4, torch.bfloat16), pytest.param(0.8, torch.float32, marks=pytest.mark.long)]
)
def test_agreement_is_as_asked(tmp_path: Path, asked: float, dtype: torch.dtype) -> None:
    pair = write_pair(tmp_path, SHAPES["tiny"](), asked, seed=5, dtype=dtype)
    found = agreement_token_by_token(pair.target, pair.draft)
    assert abs(found - asked) < 0.1
    assert abs(found - pair.agreement) < 0.1
    tokenizer = ModelTokenizer(Path(pair.target))
    assert tokenizer.vocabulary_digest == ModelTokenizer(Path(pair.draft)).vocabulary_digest
    tokens = tokenizer.encode("What is this?")
    assert tokenizer.decode(tokens) == "What is this?"
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("family", ["vicuna-7b", "glm4-9b"])
def test_other_families_load_too(tmp_path: Path, family: str) -> None:
    small = {"vocab_size": 300, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    shape = SHAPES[family]()
    for config in (shape.target, shape.draft):
        for name, value in (small | {"num_attention_heads": 4, "num_key_value_heads": 2}).items():
            setattr(config, name, value)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:1]
    pair = write_pair(tmp_path, shape, 0.6)
    assert abs(pair.agreement - 0.6) < 0.1
    for folder in (pair.target, pair.draft):
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]


def test_accepted_tokens_are_counted_round_by_round() -> None:
    # Rounds of two drafts: both accepted and a bonus token; none accepted; one accepted; too little text is left.
    agreed = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1]])
    assert mean_accepted(agreed, 2) == pytest.approx((2 + 0 + 1) / 3)


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_agreements_that_cannot_be_are_refused(tmp_path: Path, agreement: float) -> None:
    with pytest.raises(ValueError, match=r"must be between 0\.05 and 0\.99"):
        write_pair(tmp_path, SHAPES["tiny"](), agreement)
