"""Linear layers made of weights or of other linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn

from spool.engine.quantization.layers import QuantizedLinear, joined_quantized
from spool.engine.quantization.weights import INPUT_MULTIPLE


def apart(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, with room between them. On a CPU, torch then computes functions of them one by one: in a vector
    some have other bits, and which ones fill a vector depends on how many there are."""
    return F.pad(numbers.unsqueeze(-1), (0, 1))[..., 0]


def summed_parts(inputs: int, ranks: int = 1) -> int:
    """In how many parts a rank sums the `inputs` that it has of a layer, where so many ranks share them. All ranks
    together have four, which are added in pairs, so that one, two and four ranks compute the same."""
    return 4 // ranks if ranks in (1, 2, 4) and inputs * ranks % (4 * INPUT_MULTIPLE) == 0 else 1


def with_outputs(layer: nn.Linear | QuantizedLinear, which: torch.Tensor) -> nn.Linear | QuantizedLinear:
    """The layer of some outputs, in the order of `which` (int64), -1 for one that is always zero. The same layer where
    that is its own order."""
    if torch.equal(which, torch.arange(layer.out_features)):
        return layer
    device = (layer.codes if isinstance(layer, QuantizedLinear) else layer.weight).device
    zeros, which = (which < 0).nonzero().flatten().to(device), which.clamp(min=0).to(device)
    with torch.no_grad():
        bias = None if layer.bias is None else layer.bias[which].index_fill_(0, zeros, 0)
        if isinstance(layer, QuantizedLinear):
            assert not len(zeros), "a quantised layer has no zero outputs"
            return QuantizedLinear(layer.quantized.rows(which), bias)
        return linear_of(layer.weight[which].index_fill_(0, zeros, 0), bias)


def with_inputs(layer: nn.Linear, which: torch.Tensor) -> nn.Linear:
    """The layer whose inputs are those of `which` (int64), -1 for one that changes nothing. The same layer where these
    are its own."""
    if torch.equal(which, torch.arange(layer.in_features)):
        return layer
    with torch.no_grad():
        weight = layer.weight[:, which.clamp(min=0)].index_fill_(1, (which < 0).nonzero().flatten(), 0)
    return linear_of(weight, layer.bias)


def joined(layers: Sequence[nn.Linear | QuantizedLinear]) -> nn.Linear | QuantizedLinear:
    """One layer whose outputs are those of `layers`, one after the other. They have a bias all or none; where some are
    quantised and some are not, the whole is expanded."""
    if len(layers) == 1:
        return layers[0]
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if len(quantized) == len(layers):
        return joined_quantized(quantized)
    dtype = next(layer.weight.dtype for layer in layers if isinstance(layer, nn.Linear))
    with torch.no_grad():
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return linear_of(torch.cat([_plain_weight(layer, dtype) for layer in layers]), bias)


def _plain_weight(layer: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    return layer.quantized.expanded().to(dtype) if isinstance(layer, QuantizedLinear) else layer.weight


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """The layer of a weight `[out, in]`, which is not copied."""
    linear = nn.Linear(1, 1, bias=bias is not None)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
