"""A head trained on a tiny target's text: it learns, and proposes when served what it proposed when it was trained."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.make_head.checkpoint import load_checkpoint, save_checkpoint
from bench.make_head.head import TrainedHead
from bench.make_head.prompts import own_prompts
from bench.make_head.texts import Text, digest, write_texts
from bench.make_head.training import PASSES, Settings, Trainer
from spool.engine.demo.convert import assemble_head, expanded_model
from spool.engine.models.drafting_head import head_architecture
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.decoding import generated
from tests.support.eagle_heads import ReferenceEagle
from tests.support.tiny_chat import save_tiny_chat_model

pytestmark = pytest.mark.slow

LAYERS = [1, 2, 3]
VOCABULARY = list(range(3, 250))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("make-head") / "target")


def trained(target: Path, texts: list[Text], settings: Settings) -> tuple[Trainer, list[float], list[float]]:
    """With how often it was right before and after."""
    torch.manual_seed(0)
    model = expanded_model(target, torch.float32).eval().requires_grad_(False)
    trainer = Trainer(model, TrainedHead(model, LAYERS), VOCABULARY)
    seen = trainer.see(texts, 2000, "reading")
    before = trainer.right(seen, 2000)
    trainer.train(seen, settings, random.Random(1), "learning")
    return trainer, before, trainer.right(seen, 2000)


def greedy_texts(target: Path, count: int) -> list[Text]:
    model, tokenizer = expanded_model(target, torch.float32), ModelTokenizer(target)
    prompts = [tokenizer.encode(f"question {number * 7919 % 1000}") for number in range(count)]
    return [Text([*prompt, *generated(model, prompt, 40)], len(prompt)) for prompt in prompts]


def test_it_learns_and_is_exported_as_heads_are_published(target: Path, tmp_path: Path) -> None:
    texts = greedy_texts(target, 24)
    trainer, before, after = trained(target, texts, Settings(batch_tokens=400, learning_rate=5e-3, epochs=40))
    assert len(after) == PASSES
    assert after[0] > before[0] + 0.1

    records = [{"part": 1, "digest": digest(texts)}]
    save_checkpoint(trainer.head, records, VOCABULARY, tmp_path / "checkpoint")
    again, *known_of_it = load_checkpoint(expanded_model(target, torch.float32), tmp_path / "checkpoint")
    assert (again.feature_layers, *known_of_it) == (LAYERS, records, VOCABULARY)
    assemble_head(target, tmp_path / "head", tmp_path / "checkpoint")
    assert head_architecture(tmp_path / "head") == "LlamaForCausalLMEagle3"
    # What it is when it is served: every token of the proposal, as the head is chained.
    reference = ReferenceEagle(tmp_path / "head", expanded_model(target, torch.float32))
    for text in texts[:6]:
        known = list(text.tokens[: text.start + 5])
        assert reference.proposal(known, PASSES) == chained(again, target, known)


def chained(head: TrainedHead, target: Path, known: list[int]) -> list[int]:
    """What the head proposes after these tokens, by the passes that it is trained with."""
    model = expanded_model(target, torch.float32)
    vocabulary, found = torch.tensor(VOCABULARY), list[int]()
    with torch.no_grad():
        states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in LAYERS], -1)
        for number in range(PASSES):
            embedded: Tensor = model.get_input_embeddings()(torch.tensor([[*known[1:], *found]]))
            hidden = head(features, embedded, number + 1)[-1][0, -1]
            logits = model.get_output_embeddings().weight[vocabulary].bfloat16().float() @ hidden
            found.append(int(vocabulary[logits.argmax()]))
    return found


@pytest.mark.long
def test_texts_are_written_again_and_not_twice(target: Path, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(target)
    asked = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(6)]
    first, again = (write_texts(str(target), tokenizer, asked, 3, tmp_path / name) for name in "ab")
    assert digest(first) == digest(again)
    assert [text.start for text in first] == [len(tokenizer.encode_chat(one["messages"])) for one in asked]
    # Stopped amid an answer, it goes on.
    answers = tmp_path / "a" / "sampled.answers.jsonl"
    answers.write_text("".join(f"{line}\n" for line in answers.read_text().splitlines()[:1]))
    assert digest(write_texts(str(target), tokenizer, asked, 3, tmp_path / "a")) == digest(first)
    assert json.loads((tmp_path / "a" / "greedy.prompts.jsonl").read_text().splitlines()[2]) == asked[2]


def test_a_model_without_turns_of_chatml_needs_prompts(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give prompts"):
        own_prompts("tiny", ModelTokenizer(target), 1, tmp_path, 4)
