"""Families of models: which are served, and that those that would be served wrong are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.families.tiny import tiny_config, tiny_model
from bench.families.trial import Verdict, try_family
from bench.record import RESULTS
from engine.errors import UnsupportedModelError
from engine.models.compatibility import PROVED_FAMILIES
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "families.json").read_text(encoding="utf-8"))
    return found


def load(folder: Path) -> None:
    load_target_engine(EngineSettings(str(folder), "float32", threads=1, kv_pages=4, exact=False), lambda *_: None)


def save_llama(folder: Path, **changes: Any) -> None:
    """With a configuration that says something else."""
    tiny_model(tiny_config("llama")).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_families_that_are_trusted_are_those_that_were_compared(kept: dict[str, Any]) -> None:
    verdicts = {row["family"]: row["verdict"] for row in kept["result"]["families"]}
    assert {family for family, verdict in verdicts.items() if verdict in ("exact", "runs")} == PROVED_FAMILIES
    assert sum(verdict != "untried" for verdict in verdicts.values()) >= 40
    assert "wrong" not in verdicts.values()


# Of every kind: fused and joined layers, learned positions, partial rotation, no attention interface, a mask of its
# own, another shape of keys, no attention at all. Mixtral takes longer than all others together; other tests serve the
# experts of qwen3_moe.
FAMILIES = ("gpt2", "bloom", "doge", "qwen2", "phi", "gptj", "olmo", "deepseek_v3", "opt", "mamba", "stablelm")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("mixtral", marks=pytest.mark.long)])
def test_a_family_is_still_what_it_was(family: str, kept: dict[str, Any]) -> None:
    verdicts = {row["family"]: row["verdict"] for row in kept["result"]["families"]}
    assert try_family(family).verdict.value == verdicts[family]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_company_are_refused(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    config = LlamaConfig(**tiny_config("llama").to_dict() | {"rope_parameters": rope})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"rotary positions of type {kind}, which depend on the other"):
        load(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="weights quantised by gptq"):
        load(tmp_path)


def test_a_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, model_type="nobodys")
    with pytest.raises(UnsupportedModelError, match="transformers cannot load"):
        load(tmp_path)


def test_a_family_nobody_compared_is_compared_when_it_is_loaded() -> None:
    """BERT attends to later positions as well, which paged attention does not."""
    assert "bert" not in PROVED_FAMILIES
    trial = try_family("bert")
    assert trial.verdict is Verdict.REFUSED
    assert "computes other logits on paged KV than by itself" in trial.reason
