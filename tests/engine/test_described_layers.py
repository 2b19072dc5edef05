"""Described layers compute what transformers' own do, in every family; wrong descriptions are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spool.engine.attention.paged_step import ATTENTION_NAME, PagedStep
from spool.engine.cpu.fused_layers import KernelDecoder
from spool.engine.cpu.isa import available_isas
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.layers import families
from spool.engine.layers.families import FAMILIES
from spool.engine.models.families import DENSE_FAMILIES, PAGED_FAMILIES, SPARSE_FAMILIES
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.loading import load_target_engine
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.passes.layout import BatchedSequence
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine
from tests.support.cpu_kernels import compiled_kernels
from tests.support.decoding import decoded, generated, paged_logits
from tests.support.family_models import KERNEL_SIZES, VOCABULARY, spread_model, tiny_config

QUICK = ("cohere2", "gemma3_text", "gpt_neox", "olmo2", "qwen3_moe")
ALL = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in sorted(FAMILIES)]
ISAS = [isa.name for isa in available_isas()[:1]] + ["avx2"] * (len(available_isas()) > 2)
"""The best set, and where that is another the one that most processors have."""
PROMPTS = [[(7 * place + number) % VOCABULARY for place in range(length)] for number, length in enumerate((2, 6, 30))]
NEW_TOKENS = 12
WRONG_DRAFTS = (3, 5)
PIECES = (17, 1, 5, 1, 16)


def load(folder: Path, dtype: str = "float32") -> TargetEngine:
    settings = EngineSettings(
        str(folder), dtype, threads=1, page_size=16, kv_pages=32, max_num_batched_tokens=32, exact=True
    )
    return load_target_engine(settings, lambda *_: None)


def test_the_table_has_the_families_that_are_listed() -> None:
    assert set(FAMILIES) == DENSE_FAMILIES | SPARSE_FAMILIES <= PAGED_FAMILIES
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("family", ALL)
def test_a_described_family_gives_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    model = spread_model(tiny_config(family, KERNEL_SIZES))
    model.save_pretrained(tmp_path)
    engine = load(tmp_path)
    found = decoded(engine, PROMPTS, NEW_TOKENS, WRONG_DRAFTS)
    assert [[token for token, _ in output] for output in found] == [
        generated(model, prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
    assert found[-1:] == decoded(engine, PROMPTS[-1:], NEW_TOKENS)


@pytest.mark.parametrize(
    ("isa", "family"),
    [
        pytest.param(isa, family, marks=[] if family in QUICK else pytest.mark.long if place else pytest.mark.slow)
        for place, isa in enumerate(ISAS)
        for family in sorted(FAMILIES)
    ],
)
def test_logits_are_as_close_to_float32_as_those_of_transformers(isa: str, family: str) -> None:
    exact = spread_model(tiny_config(family, KERNEL_SIZES))
    eager = copy.deepcopy(exact).bfloat16()
    exact = copy.deepcopy(eager).float()
    model = copy.deepcopy(eager)
    model.set_attn_implementation(ATTENTION_NAME)
    tokens = torch.randint(VOCABULARY, (sum(PIECES),), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        of_eager = eager(input_ids=tokens[None]).logits[0].float()
        expected = exact(input_ids=tokens[None]).logits[0]
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), compiled_kernels(torch.bfloat16, isa), None)
    loaded.replace_layers()
    pool = PagePool(8, 16)
    runner = loaded.runner(pool, ())
    logits = paged_logits(runner, pool, tokens.tolist(), PIECES).float()
    if family in DENSE_FAMILIES:
        # A rounding can choose another expert.
        error, eager_error = ((found - expected).pow(2).mean().sqrt() for found in (logits, of_eager))
        assert error < 1.5 * eager_error
        assert error < 0.2 * expected.std()

    decoder: Any = model.base_model
    assert isinstance(decoder, KernelDecoder)

    def operation_by_operation(hidden_states: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
        for layer in decoder.layers:
            layer.add(hidden_states, layer.attended(hidden_states, decoder.rotation(layer, positions, 64), step))

    # Layers in one call of the library give the bits of their operations one by one.
    decoder.add_layers = operation_by_operation
    assert torch.equal(paged_logits(runner, pool, tokens.tolist(), PIECES).float(), logits)
    del decoder.add_layers

    # A row has the same bits in any company.
    tables = [PageTable() for _ in range(3)]
    sequences = []
    for number, table in enumerate(tables):
        length = len(tokens) - 7 * number
        pool.append(table, length)
        sequences.append(BatchedSequence(table, tokens[:length].tolist(), 1))
    together = runner.run(sequences).logits.clone().float()
    ends = [len(tokens) - 7 * number - 1 for number in range(3)]
    assert torch.equal(together, logits[ends])


SWAPPED_NORMS = {"attention_post_norm": "post_feedforward_layernorm", "mlp_post_norm": "post_attention_layernorm"}


def planted(monkeypatch: pytest.MonkeyPatch, family: str, **wrong: Any) -> None:
    monkeypatch.setitem(families.FAMILIES, family, replace(FAMILIES[family], **wrong))


@pytest.mark.parametrize(
    ("family", "wrong", "what"),
    [
        ("glm4", {"interleaved": False}, "the attention of layer 0"),
        ("nanochat", {"backwards": False}, "the attention of layer 0"),
        ("gemma2", {"norm_offset": 0.0}, "the attention of layer 0"),
        ("gemma2", {"softcap": None}, "in layer 0, attention has scaling, window, cap"),
        ("hunyuan_v1_dense", {"head_norms_after_rotation": False}, "the attention of layer 0"),
        ("cohere2", {"rotated": lambda attention: True}, "the attention of layer 1"),
        ("gemma3_text", {"window": lambda attention: None}, "in layer 0, attention has scaling, window, cap"),
        ("gemma3_text", SWAPPED_NORMS, "the MLP or the norms of layer 0"),
        ("gpt_neox", {"parallel": lambda layer: False}, "the MLP or the norms of layer 0"),
        ("mixtral", {"interleaved": True}, "the attention of layer 0"),
        ("nanochat", {"embedding_norm": None}, "the embedding"),
    ],
)
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16"))]
)
def test_a_wrong_description_is_refused(
    family: str, wrong: dict[str, Any], what: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread_model(tiny_config(family, KERNEL_SIZES)).save_pretrained(tmp_path)
    planted(monkeypatch, family, **wrong)
    with pytest.raises(UnsupportedModelError, match=f"^{family} .*{what}|^{family}: {what}"):
        load(tmp_path, dtype)


@pytest.mark.parametrize(
    ("family", "wrong", "reason"),
    [
        ("llama", {"out": "output_projection"}, "no attribute 'output_projection'"),
        ("qwen3", {"head_norms": ("q_layernorm", "k_layernorm")}, "its entry does not know self_attn.k_norm.weight"),
        ("glm4", {"mlp_post_norm": None}, "its entry does not know post_mlp_layernorm.weight"),
        ("llama", {"softcap": "soft_cap"}, "no attribute 'soft_cap'"),
        ("llama", {"qkv": ("q_proj", "k_proj", "v_proj", "v_proj")}, "queries, keys and values have 320 dimensions"),
    ],
)
def test_modules_that_an_entry_does_not_know_cost_its_family_alone(
    family: str,
    wrong: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = spread_model(tiny_config(family, KERNEL_SIZES))
    model.save_pretrained(tmp_path)
    planted(monkeypatch, family, **wrong)
    engine = load(tmp_path)
    assert f"{family} keeps transformers' own layers, which are slower: " in caplog.text
    assert reason in caplog.text
    found = decoded(engine, PROMPTS, NEW_TOKENS)
    assert [[token for token, _ in output] for output in found] == [
        generated(model, prompt, NEW_TOKENS) for prompt in PROMPTS
    ]
