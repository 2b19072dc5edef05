"""The engines on a GPU: graphs and the Triton kernel are in use, and no bit depends on what shares a pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spool.engine.kv.pages import PageTable
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.engine.steps import ProposeRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters
from tests.support.decoding import decoded, generated
from tests.support.tiny_models import CONFIGS, VOCABULARY, WIDE_SHAPE, save_tiny_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

GREEDY = SamplingParameters()
PROMPTS = [[(7 * place + number) % VOCABULARY for place in range(9 + 13 * number)] for number in range(5)]
NEW_TOKENS = 24


def load(folder: Path, said: list[str] | None = None, **changes: object) -> TargetEngine:
    """`said` takes what the engine reports while loading."""
    settings = {"dtype": "bfloat16", "device": "cuda", "kv_pages": 64, "max_num_batched_tokens": 128}
    words = [] if said is None else said
    return load_target_engine(EngineSettings(str(folder), **(settings | changes)), lambda word, _: words.append(word))


def outputs(engine: TargetEngine, drafts: int) -> list[list[tuple[int, int]]]:
    """Each round verifies `drafts` tokens, mostly wrong ones."""
    return decoded(engine, PROMPTS, NEW_TOKENS, [3] * drafts)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_logits_are_the_same_with_drafts_and_without_graphs(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = save_tiny_pair(family, tmp_path, **WIDE_SHAPE)
    said: list[str] = []
    engine = load(folder, said)
    # A kernel or graphs that are of no use are left out with a warning.
    assert "attention by kernels" in next(word for word in said if word.startswith("exact mode:"))
    assert engine.description.graphed_row_counts
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings if record.name.startswith("engine.")] == []
    plain = outputs(engine, 0)
    assert outputs(engine, 3) == plain
    assert outputs(load(folder, cuda_graphs=False), 3) == plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_codes_are_multiplied_and_give_the_same_logits_with_drafts(
    tmp_path: Path, quantization: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = save_tiny_pair("qwen3", tmp_path, **WIDE_SHAPE)
    engine = load(folder, quantization=quantization)
    assert engine.description.quantization == quantization
    assert "quantised weights are expanded" not in caplog.text
    plain = outputs(engine, 0)
    assert outputs(engine, 3) == plain
    assert plain != outputs(load(folder), 0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_quantized_kv_gives_the_same_logits_with_drafts_and_without_graphs(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = save_tiny_pair(family, tmp_path, **WIDE_SHAPE)
    engine = load(folder, kv_cache_dtype="int8")
    assert engine.description.kv_cache_dtype == "int8"
    assert "attention by matrix products" not in caplog.text
    plain = outputs(engine, 0)
    assert outputs(engine, 3) == plain
    assert outputs(load(folder, kv_cache_dtype="int8", cuda_graphs=False), 3) == plain
    assert plain != outputs(load(folder), 0)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder, draft_folder = save_tiny_pair("llama", tmp_path, **WIDE_SHAPE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    found = outputs(load(folder, dtype="float32"), 2)
    assert [[token for token, _ in output] for output in found] == [
        generated(model, prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    draft = load_draft_engine(
        EngineSettings(str(draft_folder), dtype="float32", device="cuda", kv_pages=64), lambda message, fraction: None
    )
    row = draft.step([ProposeRow(PageTable(), PROMPTS[1], 4, PROMPTS[1], len(PROMPTS[1]), GREEDY)]).rows[0]
    assert len(row.tokens) == 4
