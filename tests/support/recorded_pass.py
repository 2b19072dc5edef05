"""One pass of the CPU kernels in a file, for a program without Python (tests/engine/kernels/run_model.c)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from spool.engine.cpu.kernels import (
    PANEL,
    CpuKernels,
    KernelLayerWeights,
    KernelNorm,
    LayerPass,
    LinearWeights,
    Panels,
    kernel_norm,
)
from spool.engine.layers.description import Norm

_LINE = 64
_ELEMENT = 2
_LINEARS = ("qkv", "out", "up", "down")


class _Recorded(ctypes.Structure):
    """As run_model.c has it."""

    _fields_ = (
        ("layer_pass", LayerPass),
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_ssize_t) for name in ("layer_count", "pool_bytes", "outputs")),
        ("residual", ctypes.c_void_p),
        ("norm", KernelNorm),
        ("head", LinearWeights),
    )


class RecordingKernels(CpuKernels):
    """Kernels for 16 bits that record a pass over a single sequence, computed in one call for all layers."""

    def record(self) -> None:
        self._found = _Recorded()
        self._image = bytearray(ctypes.sizeof(_Recorded))

    def recorded(self) -> bytes:
        self._image[: ctypes.sizeof(_Recorded)] = bytes(self._found)
        return bytes(self._image)

    def layers(
        self, residual: torch.Tensor, pools: ctypes.Array[Any], weights: ctypes.Array[Any], layer_pass: LayerPass
    ) -> None:
        found, first, rows = self._found, weights[0], layer_pass.rows
        found.residual = self._put(residual.data_ptr(), residual.nbytes)
        found.layer_pass = LayerPass.from_buffer_copy(layer_pass)
        table = rows * first.head_dim * 4
        sizes = {"cos": table, "sin": table, "slots": rows * 8, "blocks": layer_pass.block_count * 32}
        for name, size in (sizes | {"pages": -(-layer_pass.longest // layer_pass.page_size) * 8}).items():
            setattr(found.layer_pass, name, self._put(getattr(layer_pass, name), size))
        numbers = first.kv_heads * layer_pass.page_size * layer_pass.page_count
        found.pool_bytes = 2 * numbers * (first.head_dim + 4 if layer_pass.quantized else _ELEMENT * first.head_dim)
        copies = (KernelLayerWeights * len(weights))(*map(self._copy, weights))
        found.layers, found.layer_count = self._put(ctypes.addressof(copies), ctypes.sizeof(copies)), len(copies)
        super().layers(residual, pools, weights, layer_pass)

    def norm(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        self._found.norm = self._norm_copy(kernel_norm(norm), rows.shape[1])
        return super().norm(rows, norm)

    def linear(
        self, rows: torch.Tensor, panels: Panels, bias: torch.Tensor | None, out: int, *sums: int
    ) -> torch.Tensor:
        self._found.head, self._found.outputs = self._linear_copy(panels.described(bias), rows.shape[1], out), out
        return super().linear(rows, panels, bias, out, *map(int, sums))

    def _copy(self, layer: KernelLayerWeights) -> KernelLayerWeights:
        copy, hidden = KernelLayerWeights.from_buffer_copy(layer), layer.hidden
        queries, keys = layer.query_heads * layer.head_dim, layer.kv_heads * layer.head_dim
        inputs = hidden, queries, hidden, layer.inner
        outputs = queries + 2 * keys, hidden, (2 if layer.gated else 1) * layer.inner, hidden
        for name, into, out in zip(_LINEARS, inputs, outputs, strict=True):
            setattr(copy, name, self._linear_copy(getattr(layer, name), into, out))
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            setattr(copy, name, self._norm_copy(getattr(layer, name), hidden))
        copy.head_norms.queries = self._norm_copy(layer.head_norms.queries, queries)
        copy.head_norms.keys = self._norm_copy(layer.head_norms.keys, keys)
        return copy

    def _norm_copy(self, norm: KernelNorm, size: int) -> KernelNorm:
        copy = KernelNorm.from_buffer_copy(norm)
        copy.weight, copy.bias = self._put(norm.weight, size * 4), self._put(norm.bias, size * 4)
        return copy

    def _linear_copy(self, linear: LinearWeights, into: int, out: int) -> LinearWeights:
        panels, copy = -(-out // PANEL), LinearWeights.from_buffer_copy(linear)
        of_output = into * _ELEMENT
        if linear.bits:
            of_output = into * linear.bits // 8 + into // linear.group * 2 * (4 if linear.wide else 2)
        copy.weights = self._put(linear.weights, panels * PANEL * of_output)
        copy.bias = self._put(linear.bias, panels * PANEL * 4)
        return copy

    def _put(self, address: int | None, size: int) -> int:
        if address is None:
            return 0
        self._image.extend(bytes(-len(self._image) % _LINE))
        place = len(self._image)
        self._image.extend(ctypes.string_at(address, size))
        return place
