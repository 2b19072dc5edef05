"""Other ways to cut up Spool's own products than the one in use."""

from __future__ import annotations

from functools import partial

import torch

from bench.gpu.device import graphed_seconds
from bench.gpu.findings import Findings
from bench.gpu.products import CALLS, SHAPES, working_set
from engine.cuda.triton_product import ProductShape, product

_ROW_COUNTS = (1, 40, 160)
# Outputs and inputs of a block, parts of the inner dimension, stages, warps.
_CANDIDATES = {
    "gate_up": ((128, 64, 1, 4, 4), (64, 128, 1, 3, 4), (64, 64, 1, 7, 4)),
    "down": ((64, 128, 4, 4, 4), (128, 64, 8, 4, 4), (64, 64, 8, 4, 4)),
    "head": ((128, 64, 1, 5, 8), (64, 128, 1, 3, 4)),
    "qkv": ((64, 128, 2, 4, 4), (64, 64, 4, 4, 4), (128, 64, 4, 5, 8)),
    "out": ((64, 128, 4, 4, 4), (64, 64, 8, 4, 4), (128, 64, 8, 4, 4)),
}


def time_shapes(device: torch.device, findings: Findings) -> None:
    for name, candidates in _CANDIDATES.items():
        out_features, in_features = SHAPES[name]
        weight = torch.randn(out_features, in_features, dtype=torch.bfloat16, device=device) * in_features**-0.5
        rows = torch.randn(max(_ROW_COUNTS), in_features, dtype=torch.bfloat16, device=device)
        weights = working_set(weight)
        for shape in (None, *(ProductShape(*candidate) for candidate in candidates)):
            microseconds = {}
            for count in _ROW_COUNTS:
                calls = [
                    partial(product, rows[:count], weights[number % len(weights)], None, shape)
                    for number in range(CALLS)
                ]
                microseconds[count] = graphed_seconds(calls, device) * 1e6
            findings.add(f"product {name} by shape", shape=str(shape or "in use"), microseconds=microseconds)
        del weight, weights
