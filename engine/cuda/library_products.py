"""Products of many rows by cuBLASLt, where it gives the bits of Spool's own product, which takes longer there.

It does where it adds up the inner dimension in one part, in order. Which of its kernels does follows from the shape and
the number of rows, so each is tried: for each that agrees in every bit, rows keep theirs in any company.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn

from spool.engine.cuda.triton_product import Multiply, TritonLinear, product
from spool.engine.errors import one_line
from spool.engine.passes.device import current
from spool.engine.quantization.weights import QuantizedWeight

logger = logging.getLogger(__name__)

# Spool's own is as fast up to there.
_OWN_ROWS = 64
# Two terms of a sum, the first and the last, which cancel each other: what is added between them loses so many bits
# that the order of the sums shows in 16 bits.
_LARGE = 2.0**14


@torch.inference_mode()
def use_library(model: nn.Module, row_counts: Sequence[int], multiply: Multiply = F.linear) -> int:
    """For how many shapes and row counts `multiply` takes the place of own products in the model's layers."""
    counts = [count for count in row_counts if count > _OWN_ROWS]
    by_shape: dict[tuple[object, ...], list[TritonLinear]] = {}
    for module in model.modules():
        if isinstance(module, TritonLinear) and not isinstance(module.weight, QuantizedWeight):
            by_shape.setdefault((*module.weight.shape, module.bias is not None), []).append(module)
    if not counts or not by_shape:
        return 0
    found = 0
    for layers in by_shape.values():
        try:
            agreed = _agreed(layers[0], counts, multiply)
        # Too large a product for the memory that is left, or a version of torch without these settings.
        except (RuntimeError, AttributeError, TypeError) as error:
            logger.warning("own products for all row counts, as the library's cannot be tried: %s", one_line(error))
            return found
        found += len(agreed)
        for layer in layers:
            layer.use_library(multiply, agreed)
    return found


def _agreed(layer: TritonLinear, counts: Sequence[int], multiply: Multiply) -> frozenset[int]:
    assert isinstance(layer.weight, torch.Tensor)
    dtype, device = layer.weight.dtype, layer.weight.device
    if device.type == "cuda":
        sum_in_one_part()
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    weight, rows = random(*layer.weight.shape) * layer.in_features**-0.5, random(max(counts), layer.in_features)
    weight[:, 0] = weight[:, -1] = 1
    rows[:, 0], rows[:, -1] = _LARGE, -_LARGE
    bias = None if layer.bias is None else random(layer.out_features)
    with current(device):
        expected = product(rows, weight, bias, shared_memory=layer.shared_memory)
        return frozenset(
            count
            for count in counts
            if all(
                torch.equal(multiply(rows[part], weight, bias), expected[part])
                for part in (slice(count), slice(len(rows) - count, None))
            )
        )


def sum_in_one_part() -> None:
    """From now on, in this process."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
