"""A draft made from a tiny target's text: it learns, and all but the trained layers are the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench.make_draft import HELD_OUT, Settings, Text, make_draft, read_texts
from spool.engine.models.draft_vocabulary import read_draft_vocabulary
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.command_line import write_lines
from tests.support.decoding import generated
from tests.support.tiny_chat import save_tiny_chat_model

pytestmark = pytest.mark.slow


def write_answers(folder: Path, target: Path) -> None:
    """Prompts, and what the target answers to them, in the form of `spool generate`."""
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = ModelTokenizer(target)
    prompts = [f"question {number * 7919 % 1000}" for number in range(4 * HELD_OUT)]
    write_lines(folder / "prompts.jsonl", *({"prompt": prompt} for prompt in prompts))
    answers = []
    for index, prompt in enumerate(prompts):
        answers.append({"index": index, "tokens": generated(model, tokenizer.encode(prompt), 40), "text": ""})
    write_lines(folder / "answers.jsonl", *answers)


def agreement(draft: Path, texts: list[Text]) -> float:
    """With plain transformers, all logits outside the draft's vocabulary left out."""
    model: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    vocabulary = read_draft_vocabulary(draft, model.config.vocab_size)
    assert vocabulary is not None
    right = []
    with torch.inference_mode():
        for text in texts:
            logits = model(torch.tensor([text.tokens])).logits[0, text.start - 1 : -1]
            proposed = vocabulary[logits[:, vocabulary].argmax(-1)]
            right += (proposed == torch.tensor(text.tokens[text.start :])).tolist()
    return sum(right) / len(right)


@pytest.mark.long
def test_a_draft_learns_from_what_its_target_wrote(tmp_path: Path) -> None:
    target = save_tiny_chat_model(tmp_path / "target")
    write_answers(tmp_path, target)
    texts = read_texts(tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", ModelTokenizer(target))
    settings = Settings(steps=40, tokens=600, learning_rate=5e-3, other_tokens=30)
    found = make_draft(target, texts, tmp_path / "out", 1, 1, 60, settings)

    draft = tmp_path / "out" / "draft"
    assert found["agreement"] > found["before"] + 0.05
    assert found["agreement"] == pytest.approx(agreement(draft, texts[::HELD_OUT]), abs=0.05)
    kept, whole = load_file(draft / "model.safetensors"), load_file(target / "model.safetensors")
    trained = load_file(tmp_path / "out" / "trained_layers.safetensors")
    assert trained.keys() == {name for name in kept if ".layers.1." in name or ".norm." in name}
    for name in kept.keys() - trained.keys():
        assert torch.equal(kept[name], whole[name].bfloat16())


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    target = save_tiny_chat_model(tmp_path / "target")
    write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"})
    (tmp_path / "answers.jsonl").write_text(json.dumps({"index": 1, "tokens": [3]}) + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl:1 is no answer"):
        read_texts(tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", ModelTokenizer(target))
    # U+2028 ends no line of JSON.
    good = json.dumps({"index": 0, "tokens": [3], "text": "\u2028"}, ensure_ascii=False) + "\n"
    (tmp_path / "answers.jsonl").write_text(good)
    with pytest.raises(ValueError, match=rf"answers\.jsonl has 1 answers, must have at least {HELD_OUT}"):
        read_texts(tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", ModelTokenizer(target))
