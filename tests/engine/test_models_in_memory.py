"""Engines of models that exist in memory: the same as of their folders, but for what a folder alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention.paged_step import ATTENTION_NAME
from engine.errors import UnsupportedModelError
from engine.kv.pages import PageTable
from engine.models.loading import draft_engine_of, load_draft_engine, load_target_engine, target_engine_of
from engine.settings import EngineSettings
from engine.steps import ProposeRow, VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, save_tiny_pair

PROMPT = [5, 40, 77, 12, 3]
GREEDY = SamplingParameters()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_tiny_pair("llama", tmp_path_factory.mktemp("models"))


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(**({"model": "tiny", "threads": 1, "kv_pages": 8, "max_num_batched_tokens": 16} | changes))


def in_memory(folder: Path, attention: str = ATTENTION_NAME) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def silent(message: str, fraction: float | None) -> None:
    pass


def decoded(engine: TargetEngine) -> list[tuple[int, int]]:
    """Tokens and digests of their logits."""
    table, fed, history, found = PageTable(), PROMPT, list(PROMPT), []
    for _ in range(8):
        (row,) = engine.step([VerifyRow(table, fed, [1, 2], True, history, len(PROMPT), GREEDY, True)]).rows
        assert row.error is None
        found += zip(row.tokens, row.logits_digests, strict=True)
        fed, history = row.tokens[-1:], [*history, *row.tokens]
    return found


def test_a_target_in_memory_computes_what_that_of_its_folder_does(folders: tuple[Path, Path]) -> None:
    engine = target_engine_of(in_memory(folders[0]), settings(), silent)
    assert engine.description.model_id == "tiny"
    assert engine.description.vocabulary_size == VOCABULARY
    assert engine.description.exact_row_counts
    assert decoded(engine) == decoded(load_target_engine(settings(model=str(folders[0]), dtype="float32"), silent))


def test_a_draft_in_memory_proposes_what_that_of_its_folder_does(folders: tuple[Path, Path]) -> None:
    proposals = []
    for engine in (
        draft_engine_of(in_memory(folders[1]), settings(), silent),
        load_draft_engine(settings(model=str(folders[1]), dtype="float32"), silent),
    ):
        (row,) = engine.step([ProposeRow(PageTable(), PROMPT, 5, PROMPT, len(PROMPT), GREEDY)]).rows
        proposals.append(row.tokens)
    assert proposals[0] == proposals[1]
    assert len(proposals[0]) == 5


def test_device_and_dtype_are_the_models_own(folders: tuple[Path, Path]) -> None:
    engine = target_engine_of(in_memory(folders[0]), settings(dtype="bfloat16", device="cuda"), silent)
    assert (engine.description.dtype, engine.description.device) == ("float32", "cpu")


def test_what_attends_is_described(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path, **TORCH_SHAPE)
    description = target_engine_of(in_memory(folder), settings(), silent).description
    assert (description.attention, description.graphed_row_counts) == ("matrix products", ())


def test_another_implementation_of_attention_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=f"attn_implementation is 'eager', must be '{ATTENTION_NAME}'"):
        target_engine_of(in_memory(folders[0], "eager"), settings(), silent)


def test_a_part_of_a_model_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, must be 1"):
        target_engine_of(in_memory(folders[0]), settings(tensor_parallel_size=2), silent)


def test_kv_on_a_gpu_must_have_a_size(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_memory(folders[0])
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    for engine_of in (target_engine_of, draft_engine_of):
        with pytest.raises(ValueError, match="kv_pages and kv_memory_bytes are None, one must be set"):
            engine_of(model, settings(kv_pages=None), silent)


def test_what_folders_are_refused_for_is_refused(folders: tuple[Path, Path]) -> None:
    model = in_memory(folders[0])
    model.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(UnsupportedModelError, match="layers of type sliding_attention"):
        draft_engine_of(model, settings(), silent)
