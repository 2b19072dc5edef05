"""What ranks have of plain and of quantised weights, put together again: the whole, number for number."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from engine.errors import UnsupportedModelError
from engine.parallel.shards import parts_of, whole_model
from engine.quantization.rounding import rounded
from engine.quantization.weights import QuantizedWeight, Weight

HEAD_DIM = 32
Weights = dict[str, Weight]


def config_of(heads: int, kv_heads: int, inner: int, head_dim: int = HEAD_DIM) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97,
        hidden_size=288,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=True,
        mlp_bias=True,
    )


def plain_weights(config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The first rows have numbers that scales of float16 do not hold, the others ordinary ones."""
    torch.manual_seed(3)
    weights = {name: torch.randn(parameter.shape) for name, parameter in whole_model(config).named_parameters()}
    for weight in weights.values():
        weight[:3] *= 1e-9
    return weights


def quantized(weights: dict[str, torch.Tensor], bits: int) -> Weights:
    return {name: rounded(weight, bits) if weight.dim() == 2 else weight for name, weight in weights.items()}


def divided(config: LlamaConfig, weights: Weights | dict[str, torch.Tensor], size: int) -> list[Weights]:
    """By ranks."""
    whole = whole_model(config)
    return [dict(parts_of(weights.items(), whole, rank, size, "model.safetensors")) for rank in range(size)]


def numbers(weight: Weight) -> torch.Tensor:
    return weight.expanded() if isinstance(weight, QuantizedWeight) else weight


# Heads, KV heads, inner size and ranks: all divide; ranks that share KV heads; a rest of heads.
@pytest.mark.parametrize(("heads", "kv_heads", "inner", "size"), [(4, 2, 128, 2), (4, 2, 128, 4), (9, 3, 192, 2)])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_parts_are_the_whole(heads: int, kv_heads: int, inner: int, size: int, bits: int | None) -> None:
    config = config_of(heads, kv_heads, inner)
    plain = plain_weights(config)
    weights = plain if bits is None else quantized(plain, bits)
    parts = divided(config, weights, size)
    for name, weight in weights.items():
        whole, own = numbers(weight), [part[name] for part in parts]
        assert all(isinstance(each, QuantizedWeight) == isinstance(weight, QuantizedWeight) for each in own)
        assert len({each.shape for each in own}) == 1
        if "norm" in name:
            assert all(torch.equal(numbers(each), whole) for each in own)
            continue
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert torch.equal(sum(map(numbers, own)), whole)
            continue
        if name.split(".")[-2] in ("k_proj", "v_proj") and size > kv_heads:
            own = own[:: size // kv_heads]
        dimension = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        together = torch.cat([numbers(each) for each in own], dim=dimension)
        there, rest = together.tensor_split([whole.shape[dimension]], dim=dimension)
        assert torch.equal(there, whole)
        assert not rest.any()


@pytest.mark.parametrize("bits", [4, 8])
def test_parts_are_rounded_as_the_whole(bits: int) -> None:
    config = config_of(9, 3, 192)
    plain = plain_weights(config)
    for rounded_first, cut_first in zip(
        divided(config, quantized(plain, bits), 2), divided(config, plain, 2), strict=True
    ):
        for name, part in rounded_first.items():
            if isinstance(part, QuantizedWeight):
                of_part = rounded(numbers(cut_first[name]), bits)
                for field in ("codes", "scales", "minimums"):
                    assert torch.equal(getattr(part, field), getattr(of_part, field)), name


def test_a_layer_whose_groups_would_be_cut_is_expanded() -> None:
    config = config_of(4, 4, 96, head_dim=8)
    weights = quantized(plain_weights(config), 4)
    parts = divided(config, weights, 2)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        own = [part[name] for part in parts]
        assert all(isinstance(each, torch.Tensor) for each in own)
        assert torch.equal(torch.cat([numbers(each) for each in own], dim=1), numbers(weights[name]))
    assert isinstance(parts[0]["model.layers.0.mlp.up_proj.weight"], QuantizedWeight)


def test_a_weight_of_another_shape_is_refused() -> None:
    config = config_of(4, 2, 128)
    weights = quantized(plain_weights(config_of(8, 2, 128)), 4)
    with pytest.raises(
        UnsupportedModelError, match=r"q_proj\.weight has the shape \[256, 288\], must have \[128, 288\]"
    ):
        divided(config, weights, 2)
