"""The engines by themselves: models of folders and in memory, rows that fail singly, exact row counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.errors import UnsupportedModelError
from spool.engine.exactness.calibration_cache import read_calibration
from spool.engine.kv.pages import PageTable
from spool.engine.models.loading import draft_engine_of, load_draft_engine, load_target_engine, target_engine_of
from spool.engine.models.source import cache_folder
from spool.engine.settings import EngineSettings
from spool.engine.steps import ProposeRow, VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters
from tests.support.decoding import decoded
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, save_tiny_pair, tiny_model

GREEDY = SamplingParameters()
PROMPT = [5, 40, 77, 12, 3]


def silent(*_: object) -> None:
    pass


def settings(model: object = "tiny", **changes: object) -> EngineSettings:
    fields = {
        "dtype": "float32",
        "threads": 1,
        "page_size": 16,
        "kv_pages": 32,
        "exact": False,
        "max_num_batched_tokens": 96,
    } | changes
    return EngineSettings(str(model), **fields)  # type: ignore[arg-type]


def load(folder: Path, **changes: object) -> TargetEngine:
    return load_target_engine(settings(folder, **changes), silent)


def in_memory(folder: Path, attention: str = ATTENTION_NAME) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def verify(table: PageTable, tokens: list[int], drafts: list[int], history: list[int]) -> VerifyRow:
    return VerifyRow(table, tokens, drafts, True, history, len(history), GREEDY, logits_digests=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_tiny_pair("llama", tmp_path_factory.mktemp("models"), **TORCH_SHAPE)


@pytest.fixture(scope="module")
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[0]


# --- rows of a step ---------------------------------------------------------------------------------------------------


def test_a_row_without_pages_fails_alone(folder: Path) -> None:
    engine = load(folder, kv_pages=3)
    tables = [PageTable(), PageTable()]
    rows = [verify(table, prompt, [], prompt) for table, prompt in zip(tables, ([1] * 60, [2, 3]), strict=True)]
    failed, fine = engine.step(rows).rows
    assert failed.out_of_pages
    assert tables[0].length == 0
    assert len(fine.tokens) == 1
    engine.pool.check_conservation(tables)


def test_a_row_that_is_not_finite_fails_alone_and_spoils_no_page(folder: Path) -> None:
    model = in_memory(folder)
    engine = target_engine_of(model, settings(kv_pages=4), silent)
    poison, good = 7, PageTable()
    (expected,) = engine.step([verify(good, PROMPT, [], PROMPT)]).rows
    engine.pool.free(good)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    bad = PageTable()
    rows = [verify(bad, [poison] * 20, [], [poison] * 20), verify(good, PROMPT, [], PROMPT)]
    failed, fine = engine.step(rows).rows
    assert failed.error == "the target's logits are not finite"
    assert bad.length == 0
    assert fine.tokens == expected.tokens
    engine.pool.free(good)
    # Every page has had the chance to be reused: nothing of the poison is left on any.
    whole = [1, 2, 3, 4, 5, 6] * 10
    (outcome,) = engine.step([verify(PageTable(), whole, [], whole)]).rows
    assert outcome.error is None


def test_a_model_that_raises_leaves_tables_as_they_were(folder: Path) -> None:
    engine = load(folder)
    table = PageTable()
    engine.step([verify(table, [1, 2, 3], [], [1, 2, 3])])
    with pytest.raises(IndexError):
        engine.step([verify(table, [VOCABULARY + 1], [], [1, 2, 3, VOCABULARY + 1])])
    assert table.length == 3
    engine.pool.check_conservation([table])


# --- models in memory -------------------------------------------------------------------------------------------------


def test_models_in_memory_compute_what_those_of_their_folders_do(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    # Device and dtype are the model's own.
    of_memory = target_engine_of(in_memory(target), settings(dtype="bfloat16", device="cuda"), silent)
    description = of_memory.description
    assert (description.model_id, description.vocabulary_size) == ("tiny", VOCABULARY)
    assert (description.dtype, description.device, description.attention) == ("float32", "cpu", "CPU kernel")
    assert decoded(of_memory, [PROMPT], 8, [1, 2]) == decoded(load(target), [PROMPT], 8, [1, 2])
    row = (PROMPT, 5, PROMPT, len(PROMPT), GREEDY)
    proposals = [
        engine.step([ProposeRow(PageTable(), *row)]).rows[0].tokens
        for engine in (
            draft_engine_of(in_memory(draft), settings(), silent),
            load_draft_engine(settings(draft), silent),
        )
    ]
    assert proposals[0] == proposals[1]
    assert len(proposals[0]) == 5


def test_a_family_that_nobody_compared_is_refused_by_name() -> None:
    model = tiny_model("llama", **TORCH_SHAPE)
    model.set_attn_implementation(ATTENTION_NAME)
    model.config.model_type = "another"
    with pytest.raises(UnsupportedModelError, match="model_type is 'another', must be one of those"):
        target_engine_of(model, settings(), silent)


def test_sequences_end_where_the_settings_say(folder: Path) -> None:
    longest = load(folder, kv_pages=4096).description.max_sequence_length
    assert load(folder, max_model_len=40).description.max_sequence_length == 40
    with pytest.raises(UnsupportedModelError, match=f"max_model_len is {longest + 1}, must be at most {longest} for"):
        load(folder, max_model_len=longest + 1)


# --- exact mode -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibration_is_stored_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_tiny_pair("apertus", tmp_path)[0]
    (tmp_path / "cpu-kernels").symlink_to(cache_folder() / "cpu-kernels")
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path))
    first = load(folder, exact=True)
    (file,) = (tmp_path / "calibrations").iterdir()
    stored = read_calibration(file)
    assert stored is not None
    assert stored.row_counts == first.description.exact_row_counts
    monkeypatch.setattr("spool.engine.models.loading.calibrate", lambda *_: pytest.fail("calibrated again"))
    assert load(folder, exact=True).description == first.description
    file.write_text('{"rows": []}')
    assert read_calibration(file) is None
    with pytest.raises(pytest.fail.Exception):
        load(folder, exact=True, dtype="bfloat16")
