"""Families of models: tiny ones give the tokens of `model.generate`, and unsupported ones are refused with a reason."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PageTable
from spool.engine.models.compatibility import check_config
from spool.engine.models.families import DENSE_FAMILIES, PAGED_FAMILIES, SOLO_FAMILIES, SPARSE_FAMILIES
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters
from tests.support.decoding import decoded, generated
from tests.support.family_models import VOCABULARY, WINDOW, tiny_config, tiny_model

NEW_TOKENS = 12
LENGTHS = (2, 6, 11, 30)
PROMPTS = [[(7 * place + number) % VOCABULARY for place in range(length)] for number, length in enumerate(LENGTHS)]
WRONG_DRAFTS = (3, 5)
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
QUICK = ("gpt2", "phi", "bloom", "llama4_text", "qwen3_next")
"""One projection for query, key and value with learned positions; separate ones with partial rotation. One sequence at
a time: positions as a bias, chunks, and states beside attention."""


def load(folder: Path, exact: bool = False, max_model_len: int | None = None) -> TargetEngine:
    settings = EngineSettings(
        str(folder),
        "float32",
        threads=1,
        page_size=16,
        kv_pages=32,
        max_num_batched_tokens=32,
        max_model_len=max_model_len,
        exact=exact,
    )
    return load_target_engine(settings, lambda *_: None)


def tokens_of(outputs: list[list[tuple[int, int]]]) -> list[list[int]]:
    return [[token for token, _ in output] for output in outputs]


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.long)
        for family in sorted(PAGED_FAMILIES | SOLO_FAMILIES)
    ],
)
def test_a_paged_family_gives_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family))
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, exact=True)
    found = decoded(engine, PROMPTS, NEW_TOKENS, WRONG_DRAFTS)
    assert tokens_of(found) == [generated(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert found[-1:] == decoded(engine, PROMPTS[-1:], NEW_TOKENS)
    if family in SOLO_FAMILIES & {*QUICK}:
        assert tokens_of(decoded(load(tmp_path), PROMPTS, NEW_TOKENS, WRONG_DRAFTS)) == tokens_of(found)


def test_states_go_on_from_full_pages_on_any_worker(tmp_path: Path) -> None:
    tiny_model(tiny_config("qwen3_next")).save_pretrained(tmp_path)
    first, second = load(tmp_path, exact=True), load(tmp_path, exact=True)
    prompt = PROMPTS[-1]
    [[expected, *_]] = decoded(first, [prompt], 1)

    def goes_on(engine: TargetEngine, table: PageTable) -> None:
        row = VerifyRow(table, prompt[table.length :], (), True, prompt, len(prompt), SamplingParameters(), True)
        [outcome] = engine.step([row]).rows
        assert (*outcome.tokens, *outcome.logits_digests) == expected

    table, moved = PageTable(), PageTable()
    goes_on(first, table)
    # Within a page there are no states to go back to.
    assert [first.pool.truncate(table, length) for length in (30, 29)] == [30, 16]
    second.pool.take(moved, 16)
    second.kv_store.write_pages(moved.pages, first.kv_store.read_pages(table.pages))
    goes_on(second, moved)
    goes_on(first, table)


def test_states_neither_draft_nor_are_rounded(tmp_path: Path) -> None:
    tiny_model(tiny_config("mamba")).save_pretrained(tmp_path)
    settings = EngineSettings(str(tmp_path), "float32", kv_pages=64)
    with pytest.raises(UnsupportedModelError, match="mamba cannot draft"):
        load_draft_engine(settings, lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="kv_cache_dtype is 'int8', must be auto for mamba"):
        load_target_engine(replace(settings, kv_cache_dtype="int8"), lambda *_: None)


def test_a_decoder_that_sees_later_positions_is_refused(tmp_path: Path) -> None:
    config = tiny_config("bert")
    config.is_decoder = False
    tiny_model(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sees later positions"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["doge", "rembert", "rwkv"])
def test_other_families_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model_type is '{family}', must be one of those that docs/models"):
        check_config(tiny_config(family))


FACTORS = {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.0}


# Prompts of which `model.generate` picks the frequencies that all sequences of the engine have: those of its longest.
@pytest.mark.parametrize(
    ("family", "kind", "original", "max_model_len", "prompts"),
    [
        ("llama", "dynamic", None, None, PROMPTS),
        ("llama", "longrope", 32, 32, PROMPTS[:3]),
        ("phi3", "longrope", 8, None, PROMPTS[2:]),
    ],
)
def test_positions_do_not_depend_on_the_batch(
    family: str, kind: str, original: int | None, max_model_len: int | None, prompts: list[list[int]], tmp_path: Path
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope = LONGROPE | {"original_max_position_embeddings": original}
    config = tiny_config(family)
    positions = {"rope_parameters": rope, "original_max_position_embeddings": original}
    model = tiny_model(type(config)(**config.to_dict() | positions))
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, max_model_len=max_model_len)
    found = decoded(engine, prompts, NEW_TOKENS, WRONG_DRAFTS)
    assert tokens_of(found) == [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    alone, together = (decoded(engine, some, NEW_TOKENS) for some in (PROMPTS[:1], [PROMPTS[0], prompts[-1]]))
    assert tokens_of(alone) == tokens_of(together[:1])


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("phimoe", {"rope_parameters": LONGROPE | MSCALES}, "type longrope, which is supported in llama and phi3 only"),
        ("qwen2", {"rope_parameters": LONGROPE | {"rope_type": "dynamic"}}, "type dynamic, which is supported in"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "layers of type sliding_attention, which it does not"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8]}, "layers of 8 attention heads, must be of num_attention"),
    ],
)
def test_layers_that_no_test_has_tried_are_refused(family: str, changed: dict[str, Any], reason: str) -> None:
    config = tiny_config(family)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(type(config)(**config.to_dict() | changed))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi", "gemma2", "bloom"])
def test_models_that_see_later_positions_are_refused(family: str) -> None:
    config = tiny_config(family)
    check_config(type(config)(**config.to_dict() | {"is_causal": True}))
    with pytest.raises(UnsupportedModelError, match=f"{family} has is_causal False, only causal"):
        check_config(type(config)(**config.to_dict() | {"is_causal": False}))


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
@pytest.mark.parametrize("family", ["llama", "granite", "glm4", "olmo2", "gemma", "falcon"])
def test_windows_of_families_without_them_are_refused(family: str, field: str) -> None:
    config = tiny_config(family)
    for served in ({field: None}, {field: 4096}, {field: WINDOW, "use_sliding_window": False}):
        check_config(type(config)(**config.to_dict() | served))
    with pytest.raises(UnsupportedModelError, match=f"{family} has {field} {WINDOW}, which its layers do not have"):
        check_config(type(config)(**config.to_dict() | {field: WINDOW}))


@pytest.mark.parametrize("family", sorted(PAGED_FAMILIES | SOLO_FAMILIES))
def test_what_a_familys_configurations_have_is_not_refused(family: str) -> None:
    config = tiny_config(family)
    config.is_encoder_decoder = False
    check_config(config)


def test_the_page_of_models_lists_the_families() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paged, *solo = _lists(text.partition("**Refused**")[0])
    assert paged == PAGED_FAMILIES
    assert set[str]().union(*solo) == SOLO_FAMILIES
    dense, sparse, *_ = _lists(text.partition("## Fast families")[2])
    assert dense == DENSE_FAMILIES
    assert sparse == SPARSE_FAMILIES


def _lists(text: str) -> list[set[str]]:
    return [{*re.findall(r"[\w-]+", found)} for found in re.findall(r"(?:`[\w-]+`,\s+)+`[\w-]+`", text)]
