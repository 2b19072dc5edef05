"""Joined and fused decoder layers compute what transformers' own do, as exactly as bfloat16 lets either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from engine.cpu.fused_layers import FusedDecoderLayer, KernelDecoder
from engine.cpu.linear import KernelLinear
from engine.kv.pages import PagePool, PageTable
from engine.models import families
from engine.models.joined_layers import FusedRmsNorm, JoinedAttention, JoinedMlp
from engine.models.loading import load_target_engine
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner
from engine.settings import EngineSettings
from tests.support.cpu_kernels import compiled_kernels

VOCABULARY = 96
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "glm4": Glm4Config,
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}

# Head dimension and page size: the CPU kernels attend with the second.
SIZES = {"joined": (16, 8), "fused": (32, 16)}


@pytest.fixture(scope="module", params=sorted(SIZES))
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    compiled_kernels()
    return SIZES[request.param]


@pytest.fixture
def pool(sizes: tuple[int, int]) -> PagePool:
    return PagePool(8, sizes[1])


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = CONFIGS[request.param](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes[0],
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    path = tmp_path_factory.mktemp("models") / request.param
    model.save_pretrained(path)
    return path


def model_runner(folder: Path, pool: PagePool) -> ModelRunner:
    engine = load_target_engine(
        EngineSettings(str(folder), threads=1, kv_pages=pool.total_pages, page_size=pool.page_size, exact=False),
        lambda *_: None,
    )
    return engine._runner


def paged_logits(runner: ModelRunner, pool: PagePool, tokens: list[int], pieces: tuple[int, ...]) -> torch.Tensor:
    """Logits `[len(tokens), vocabulary]`, the tokens fed in pieces of these lengths."""
    table = PageTable()
    logits = []
    for piece in pieces:
        fed, tokens = tokens[:piece], tokens[piece:]
        pool.append(table, len(fed))
        logits.append(runner.run([BatchedSequence(table, fed, len(fed))]).logits.float())
    pool.free(table)
    return torch.cat(logits)


def test_logits_are_as_close_to_float32_as_those_of_transformers(folder: Path, pool: PagePool) -> None:
    tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        true, eager = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(input_ids=tokens[None]).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    ours = paged_logits(model_runner(folder, pool), pool, tokens.tolist(), (17, 1, 5, 1, 16))
    error, eager_error = ((logits - true).pow(2).mean().sqrt() for logits in (ours, eager))
    assert error < 1.5 * eager_error
    assert error < 0.1 * true.std()


def test_what_is_known_is_replaced(folder: Path, sizes: tuple[int, int], pool: PagePool) -> None:
    model = model_runner(folder, pool).model
    kinds = {type(module) for module in model.modules()}
    assert nn.Linear not in kinds
    assert KernelLinear in kinds
    replacements = {FusedDecoderLayer, KernelDecoder, JoinedAttention, JoinedMlp, FusedRmsNorm}
    if folder.name == "glm4":
        expected = {FusedRmsNorm}
    elif sizes == SIZES["fused"]:
        expected = {FusedDecoderLayer, KernelDecoder}
    else:
        expected = {JoinedAttention, JoinedMlp, FusedRmsNorm}
    assert kinds & replacements == expected


def test_layers_in_one_call_are_their_parts(folder: Path, sizes: tuple[int, int], pool: PagePool) -> None:
    runner = model_runner(folder, pool)
    decoder = runner.model.base_model
    if folder.name == "glm4" or sizes != SIZES["fused"]:
        assert not isinstance(decoder, KernelDecoder)
        return
    assert isinstance(decoder, KernelDecoder)
    tokens, pieces = list(range(40)), (17, 1, 5, 1, 16)
    whole = paged_logits(runner, pool, tokens, pieces)

    def layer_by_layer(hidden_states: torch.Tensor, *position_and_step: Any) -> None:
        for layer in decoder.layers:
            layer(hidden_states, *position_and_step)

    decoder.add_layers = layer_by_layer  # type: ignore[method-assign]
    assert torch.equal(paged_logits(runner, pool, tokens, pieces), whole)


@pytest.mark.parametrize("missing", [{"mlp": "LlamaMlpRenamed"}, {"module": "transformers.models.llama.moved"}])
def test_a_class_that_transformers_lacks_costs_its_family_alone(
    missing: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(families.FAMILIES, "llama", replace(families.FAMILIES["llama"], **missing))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 8}
    llama, qwen = (
        AutoModelForCausalLM.from_config(CONFIGS[name](num_hidden_layers=1, num_key_value_heads=1, **sizes))
        for name in ("llama", "qwen3")
    )
    assert families.families_of(llama) == []
    assert "llama models keep transformers' own layers" in caplog.text
    caplog.clear()
    (known,) = families.families_of(qwen)
    assert type(qwen.model.layers[0].mlp) is known.mlp
    assert caplog.text == ""
