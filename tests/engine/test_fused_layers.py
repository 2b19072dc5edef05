"""Joined and fused decoder layers compute what transformers' own do, as exactly as bfloat16 lets either."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME, PagedStep
from spool.engine.cpu.fused_layers import FusedDecoderLayer, KernelDecoder
from spool.engine.cpu.linear import KernelLinear
from spool.engine.kv.pages import PagePool
from spool.engine.layers import families
from spool.engine.layers.joined_layers import FusedRmsNorm, JoinedAttention, JoinedMlp
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.vocabulary import Vocabulary
from tests.support.cpu_kernels import compiled_kernels
from tests.support.decoding import paged_logits
from tests.support.tiny_models import CONFIGS, VOCABULARY, tiny_model

FAMILIES = sorted([*CONFIGS, "qwen2"])
# Head dimensions: whole layers by kernel have the second.
SIZES = {"joined": 16, "fused": 32}
REPLACEMENTS = {FusedDecoderLayer, KernelDecoder, JoinedAttention, JoinedMlp, FusedRmsNorm}
OTHERS = {"gemma3_text": set(), "glm4": {FusedRmsNorm}, "qwen3_moe": {JoinedAttention, FusedRmsNorm}}
"""What there is of these in families that are not of the Llama kind, or have experts."""
PIECES = (17, 1, 5, 1, 16)


def random_model(family: str, head_dim: int) -> PreTrainedModel:
    """Biases and norms are random as well."""
    model = tiny_model(family, head_dim=head_dim)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.bfloat16()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_close_to_float32_as_those_of_transformers(family: str, size: str) -> None:
    eager = random_model(family, SIZES[size])
    model = copy.deepcopy(eager)
    tokens = torch.randint(VOCABULARY, (sum(PIECES),), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        of_eager = eager(input_ids=tokens[None]).logits[0].float()
        exact = eager.float()(input_ids=tokens[None]).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), compiled_kernels(), None)
    loaded.replace_layers()
    pool = PagePool(8, 16)
    runner = loaded.runner(pool, ())
    logits = paged_logits(runner, pool, tokens.tolist(), PIECES).float()
    error, eager_error = ((found - exact).pow(2).mean().sqrt() for found in (logits, of_eager))
    assert error < 1.5 * eager_error
    assert error < 0.1 * exact.std()

    kinds = {type(module) for module in model.modules()}
    assert nn.Linear not in kinds
    assert KernelLinear in kinds
    if family in OTHERS:
        assert kinds & REPLACEMENTS == OTHERS[family]
    elif size == "joined":
        assert kinds & REPLACEMENTS == {JoinedAttention, JoinedMlp, FusedRmsNorm}
    else:
        assert kinds & REPLACEMENTS == {FusedDecoderLayer, KernelDecoder}
        decoder: Any = model.base_model
        rotary = eager.base_model.rotary_emb

        def layer_by_layer(hidden_states: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> None:
            rotations = rotary(hidden_states, positions.unsqueeze(0))
            for layer in decoder.layers:
                layer(hidden_states.unsqueeze(0), rotations, step)

        # Layers in one call of the library give the bits of layers one by one.
        decoder.add_layers = layer_by_layer
        assert torch.equal(paged_logits(runner, pool, tokens.tolist(), PIECES).float(), logits)


def test_a_class_that_transformers_lacks_costs_its_family_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(families.FAMILIES, "llama", "Renamed")
    llama, qwen = (random_model(family, 16) for family in ("llama", "qwen3"))
    assert families.families_of(llama) == []
    assert "llama models keep transformers' own layers" in caplog.text
    caplog.clear()
    (known,) = families.families_of(qwen)
    assert type(qwen.model.layers[0].mlp) is known.mlp
    assert caplog.text == ""
