"""Matrix products of the target's shapes: whether a row has the bits that it has alone, and the time they take."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import Tensor

from bench.gpu.device import graphed_seconds
from bench.gpu.findings import Findings
from spool.engine.quantization.rounding import rounded
from spool.engine.quantization.weights import QuantizedWeight

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 40, 64, 160, 192, 200, 256, 512)
# Outputs and inputs of Qwen3-8B's layers, joined, and of its head.
SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
_CPU_SHAPES = {"qkv": (128, 64), "down": (64, 192)}
# More than a device's cache holds, so that weights come from its memory as they do in a pass.
_WORKING_SET = 512 << 20
CALLS = 12

Weight: TypeAlias = Tensor | QuantizedWeight
Product = Callable[[Tensor, Weight], Tensor]


def measure_products(
    device: torch.device,
    findings: Findings,
    name: str,
    product: Product,
    bandwidth: float,
    bits: int = 16,
    own: Product | None = None,
) -> None:
    """`product` of rows [rows, in] and weights [out, in], with fewer than 16 bits in codes. A finding for each shape:
    the row counts at which each row has the bits that it has alone (with codes: by the weight expanded to bfloat16),
    the others, and microseconds by row count; and the row counts at which it has the bits of `own`."""
    shapes = SHAPES if device.type == "cuda" else _CPU_SHAPES
    for shape, (out_features, in_features) in shapes.items():
        generator = torch.Generator(device).manual_seed(3)
        weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device=device)
        weight.normal_(0, in_features**-0.5, generator=generator)
        stored: Weight = weight
        if bits < 16:
            stored = rounded(weight, bits)
            weight = stored.expanded().to(weight.dtype)
        rows = torch.empty(max(ROW_COUNTS), in_features, dtype=torch.bfloat16, device=device)
        rows.normal_(generator=generator)
        reference = F.linear(rows.float(), weight.float())
        alone = torch.cat([product(rows[row : row + 1], weight) for row in range(max(ROW_COUNTS))])
        equal, like_own, microseconds, error = [], [], {}, 0.0
        size = stored_bytes(stored)
        # Copies, in turn for calls one after the other, that no cache holds.
        weights = [stored, *(deepcopy(stored) for _ in range(min(CALLS, _WORKING_SET // size) - 1))]
        for count in ROW_COUNTS:
            found = product(rows[:count], stored)
            error = max(error, float((found.float() - reference[:count]).abs().max()))
            if torch.equal(found, alone[:count]):
                equal.append(count)
            if own is not None and torch.equal(found, own(rows[:count], stored)):
                like_own.append(count)
            calls = [partial(product, rows[:count], weights[number % len(weights)]) for number in range(CALLS)]
            microseconds[count] = graphed_seconds(calls, device) * 1e6
        findings.add(
            f"product {shape}, {name}",
            out_features=out_features,
            in_features=in_features,
            equal_at=equal,
            unequal_at=[count for count in ROW_COUNTS if count not in equal],
            **({} if own is None else {"like_own_at": like_own}),
            microseconds=microseconds,
            read_microseconds=size / bandwidth * 1e6,
            max_error=error,
        )
        del weight, stored, weights, reference


def stored_bytes(weight: Weight) -> int:
    parts = (weight,) if isinstance(weight, Tensor) else (weight.codes, weight.scales, weight.minimums)
    return sum(part.nbytes for part in parts)
