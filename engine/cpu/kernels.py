"""Calls the kernels of engine/cpu/csrc on torch's tensors and threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from spool.engine.attention.backends import AttentionRule
from spool.engine.cpu.build import CompilationError, compiled_library
from spool.engine.cpu.isa import AUTO, chosen_isa
from spool.engine.errors import UnsupportedProcessorError, one_line
from spool.engine.kv.paged_kv import LayerKv
from spool.engine.layers.description import Activation, HeadNorms, Norm
from spool.engine.models.source import Progress
from spool.engine.quantization.weights import QuantizedWeight

LANES = 16
"""Sizes that the kernels take are multiples of this; head dimensions, of twice this."""

PANEL = 32
"""Outputs of a linear layer whose weights lie together, in one panel."""

# Inputs whose weights for one output lie side by side in a panel (WEIGHT_INPUTS of engine/cpu/csrc/element.h).
_WEIGHT_INPUTS = {torch.bfloat16: 2, torch.float16: 1, torch.float32: 1}
_GROUP = 32
_SORTED_PANELS = 32
"""Of a quantised weight at a time: codes take several times their room while they are sorted."""
_CACHE_LINE = 64
_NO_MEMORY = "no memory for the scores of attention"


def load_cpu_kernels(
    dtype: torch.dtype, progress: Progress, cpu_isa: str = AUTO, *, universal: bool = False
) -> CpuKernels:
    """For models of `dtype`; if `universal`, with the bits that every instruction set gives. Raises
    UnsupportedProcessorError for an instruction set that this processor does not have, and where kernels cannot be
    compiled or loaded."""
    try:
        isa = chosen_isa(cpu_isa)
        library = compiled_library(isa, str(dtype).removeprefix("torch."), universal, progress)
        return CpuKernels(ctypes.CDLL(str(library.path)), dtype, isa.name, library.identity, universal)
    except ValueError as error:
        raise UnsupportedProcessorError(str(error)) from error
    except (CompilationError, OSError) as error:
        raise UnsupportedProcessorError(f"there are no kernels for this processor: {one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Runs of rows that attend together.

    `edges` int64 `[blocks, 4]`: first row, rows, position of the first, and where in `pages` (int64) the pages of its
    sequence begin. No block has more than `max_rows` rows or sees more than `longest` positions.
    """

    edges: np.ndarray
    pages: np.ndarray
    max_rows: int
    longest: int


class LinearWeights(ctypes.Structure):
    """`Linear` of engine/cpu/csrc/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_ssize_t) for name in ("bits", "group", "wide", "parts", "exact")),
    )


class KernelRule(ctypes.Structure):
    """`Rule` of engine/cpu/csrc/kernels.h."""

    _fields_ = (
        ("sinks", ctypes.c_void_p),
        ("window", ctypes.c_ssize_t),
        ("scaling", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


def kernel_rule(rule: AttentionRule) -> KernelRule:
    """Keeps no tensor alive."""
    sinks = None if rule.sinks is None else rule.sinks.data_ptr()
    return KernelRule(sinks, rule.window or 0, rule.scaling, rule.softcap or 0.0)


class KernelNorm(ctypes.Structure):
    """`Norm` of engine/cpu/csrc/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("centred", ctypes.c_ssize_t),
        ("epsilon", ctypes.c_float),
    )


def kernel_norm(norm: Norm | None) -> KernelNorm:
    """Keeps no tensor alive."""
    if norm is None:
        return KernelNorm()
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return KernelNorm(norm.weight.data_ptr(), bias, norm.centred, norm.epsilon)


class KernelHeadNorms(ctypes.Structure):
    """`HeadNorms` of engine/cpu/csrc/kernels.h."""

    _fields_ = (
        *((name, KernelNorm) for name in ("queries", "keys")),
        *((name, ctypes.c_ssize_t) for name in ("whole", "after")),
    )


def kernel_head_norms(norms: HeadNorms | None) -> KernelHeadNorms:
    """Keeps no tensor alive."""
    if norms is None:
        return KernelHeadNorms()
    return KernelHeadNorms(kernel_norm(norms.queries), kernel_norm(norms.keys), norms.whole, norms.after_rotation)


_SIZES = ("hidden", "inner", "query_heads", "kv_heads", "head_dim", "activation", "gated", "parallel")


class KernelLayerWeights(ctypes.Structure):
    """`Layer` of engine/cpu/csrc/kernels.h."""

    _fields_ = (
        *((name, LinearWeights) for name in ("qkv", "out", "up", "down")),
        *((name, KernelNorm) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
        ("head_norms", KernelHeadNorms),
        *((name, ctypes.c_ssize_t) for name in _SIZES),
        ("rule", KernelRule),
        ("multiplier", ctypes.c_float),
    )


class LayerPass(ctypes.Structure):
    """`Pass` of engine/cpu/csrc/kernels.h. Keeps no tensor alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "pages", "blocks", "scratch")),
        *((name, ctypes.c_ssize_t) for name in ("rows", "block_count", "max_rows", "longest")),
        *((name, ctypes.c_ssize_t) for name in ("page_size", "page_count", "quantized")),
    )


class WeightMemory:
    """Tensors side by side in large pieces of memory, which numpy asks the system to hold on large pages: weights are
    read from end to end, and each page of 4 KiB costs a search for its address."""

    _PIECE = 32 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with any content, 64 bytes aligned."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // _CACHE_LINE) * _CACHE_LINE
        if room > len(self._free):
            piece = np.empty(max(room, self._PIECE) + _CACHE_LINE, np.uint8)
            self._free = torch.from_numpy(piece)[-piece.ctypes.data % _CACHE_LINE :]
        taken, self._free = self._free[:size], self._free[room:]
        return taken.view(dtype).view(*shape)


@dataclass(frozen=True, slots=True)
class Panels:
    """Weights of a linear layer `[out, in]` the way that kernels read them: a tensor of `out` in panels of 32, and, of
    quantised ones, bits, group, and whether scales are float32 (0 and False for weights in the model's dtype)."""

    weights: torch.Tensor
    bits: int = 0
    group: int = 0
    wide: bool = False

    def described(self, bias: torch.Tensor | None, parts: int = 1, exact: bool = False) -> LinearWeights:
        """For a kernel, which sums inputs in 1, 2 or 4 `parts` and, if `exact`, rounds no sum. Keeps neither alive."""
        bias_pointer = None if bias is None else bias.data_ptr()
        return LinearWeights(self.weights.data_ptr(), bias_pointer, self.bits, self.group, self.wide, parts, exact)


class CpuKernels:
    """The functions of engine/cpu/csrc. Tensors are contiguous, on the CPU, of `dtype` where not said otherwise."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, isa: str, identity: str, universal: bool) -> None:
        """`identity` names the source, the compiler and its options."""
        self.dtype = dtype
        self.isa = isa
        self.universal = universal
        # Whether a process gets matrix tiles is the system's choice, and their sums have another order.
        self.identity = f"{identity}-tiles" if library.spool_has_tiles() else identity
        self._weights = WeightMemory()
        function = partial(_function, library, _shares_threads(library))
        pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
        self._norm = function("spool_norm", [pointer] * 3 + [size] * 2)
        self._add = function("spool_add", [pointer] * 3 + [number] + [size] * 2)
        self._activate = function("spool_activate", [pointer] * 2 + [size] * 4)
        self._cap = function("spool_cap", [pointer, size, number, number])
        self._rotate_write = function("spool_rotate_write", [pointer] * 7 + [size] * 7)
        self._attend = function("spool_attend", [pointer] * 5 + [size] * 3 + [pointer] + [size] * 6, ctypes.c_int)
        self._argmax = function("spool_argmax", [pointer] * 3 + [size] * 3)
        self._digests = function("spool_digests", [pointer] * 3 + [size] * 3)
        self._draw = function("spool_draw", [pointer] * 5 + [size] * 3)
        self._masses = function("spool_masses", [pointer] * 3 + [size] * 3)
        self._forbid = function("spool_forbid", [pointer] * 4 + [size] * 4)
        self._linear = function("spool_linear", [pointer] * 4 + [size] * 3)
        self._expand_rows = function("spool_expand_rows", [pointer] * 3 + [size] * 2)
        self._layers = function("spool_layers", [pointer] * 3 + [size] + [pointer], ctypes.c_int)
        self._layer_scratch = function("spool_layer_scratch", [pointer], size)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the functions take tensors of this one's dtype and device."""
        return tensor.dtype == self.dtype and tensor.device.type == "cpu"

    def to_panels(self, weight: torch.Tensor) -> Panels:
        """A weight `[out, in]` to `[ceil(out / 32), ceil(in / n), 32, n]` with n neighbouring inputs, zeros past the
        last input and the last output."""
        side_by_side = _WEIGHT_INPUTS[self.dtype]
        out, inputs = weight.shape[0], -(-weight.shape[1] // side_by_side) * side_by_side
        padded = torch.nn.functional.pad(weight, (0, inputs - weight.shape[1], 0, -out % PANEL))
        panels = padded.view(-1, PANEL, inputs // side_by_side, side_by_side).transpose(1, 2)
        return Panels(self._weights.take(panels.shape, self.dtype).copy_(panels))

    def to_quantized_panels(self, weight: QuantizedWeight) -> Panels:
        """To what engine/cpu/csrc/quantized.c reads, uint8 `[ceil(out / 32), in / group, bytes of a group]`. Scales and
        minimums become float16 where all of them stay what they are."""
        numbers = torch.stack((weight.scales, weight.minimums))
        # The kernels have groups of 16 with float32 scales and 8 bits only.
        wide = weight.group != _GROUP or not torch.equal(numbers.half().float(), numbers)
        out, inputs = weight.shape
        panels = -(-out // PANEL)
        size = PANEL * (weight.group * weight.bits // 8 + 2 * (4 if wide else 2))
        packed = self._weights.take((panels, inputs // weight.group, size), torch.uint8)
        for first in range(0, panels, _SORTED_PANELS):
            last = min(panels, first + _SORTED_PANELS)
            part = weight.rows(torch.arange(first * PANEL, min(out, last * PANEL)))
            packed[first:last] = _panel_bytes(part, torch.float32 if wide else torch.float16)
        return Panels(packed, weight.bits, weight.group, wide)

    @staticmethod
    def padded_bias(bias: torch.Tensor) -> torch.Tensor:
        """`[out]` to float32, of whole panels."""
        return torch.nn.functional.pad(bias.float(), (0, -len(bias) % PANEL))

    def linear(
        self,
        rows: torch.Tensor,
        panels: Panels,
        bias: torch.Tensor | None,
        out: int,
        parts: int = 1,
        exact: bool = False,
    ) -> torch.Tensor:
        """`rows` `[rows, in]` times the panels of a weight, plus a padded bias, `[rows, out]`, in float32 if `exact`.
        Inputs are summed in 1, 2 or 4 `parts`."""
        if missing := -rows.shape[1] % _WEIGHT_INPUTS[self.dtype]:
            rows = torch.nn.functional.pad(rows, (0, missing))
        count, inputs = rows.shape
        outputs = torch.empty(count, out, dtype=torch.float32 if exact else rows.dtype)
        scratch = torch.empty(count, inputs, dtype=torch.float32)
        described = panels.described(bias, parts, exact)
        pointers = (outputs.data_ptr(), rows.data_ptr(), ctypes.addressof(described), scratch.data_ptr())
        self._linear(*pointers, count, inputs, out)
        return outputs

    def expanded_rows(self, panels: Panels, which: torch.Tensor, inputs: int) -> torch.Tensor:
        """The weights `[which, in]` of some outputs (int64) of a quantised weight, in the model's dtype."""
        rows = torch.empty(len(which), inputs, dtype=self.dtype)
        described = panels.described(None)
        self._expand_rows(rows.data_ptr(), which.data_ptr(), ctypes.addressof(described), len(which), inputs)
        return rows

    def layer_scratch(self, weights: KernelLayerWeights) -> int:
        """Bytes of scratch that `layers` needs for a row, where all layers are like this one."""
        return int(self._layer_scratch(ctypes.addressof(weights)))

    def layers(
        self,
        residual: torch.Tensor,
        pools: ctypes.Array[ctypes.c_void_p],
        weights: ctypes.Array[KernelLayerWeights],
        layer_pass: LayerPass,
    ) -> None:
        """Adds to `residual` `[rows, hidden]` what decoder layers add one after the other, each writing keys and
        values to its one of `pools` (addresses of pools as below). Raises MemoryError."""
        pass_address = ctypes.addressof(layer_pass)
        if self._layers(residual.data_ptr(), pools, weights, len(weights), pass_address):
            raise MemoryError(_NO_MEMORY)

    def norm(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Norms of `rows` `[rows, hidden]`; a copy where there is none."""
        normed, described = torch.empty_like(rows), kernel_norm(norm)
        self._norm(normed.data_ptr(), rows.data_ptr(), ctypes.addressof(described), *rows.shape)
        return normed

    def add(
        self, residual: torch.Tensor, added: torch.Tensor, post_norm: Norm | None = None, multiplier: float = 1.0
    ) -> None:
        """Adds the norm of `added` times `multiplier` to `residual` `[rows, hidden]` in place. Changes `added`."""
        described = kernel_norm(post_norm)
        pointers = residual.data_ptr(), added.data_ptr(), ctypes.addressof(described)
        self._add(*pointers, multiplier, *residual.shape)

    def activate(self, up: torch.Tensor, activation: Activation, gated: bool) -> torch.Tensor:
        """`[rows, inner]` to activation(up); if `gated`, `[rows, 2 * inner]`, gates first, to activation(gate) * up,
        `[rows, inner]`."""
        rows, inner = up.shape[0], up.shape[1] // (2 if gated else 1)
        product = up.new_empty(rows, inner)
        self._activate(product.data_ptr(), up.data_ptr(), rows, inner, activation, gated)
        return product

    def cap(self, logits: torch.Tensor, multiplier: float, cap: float | None) -> torch.Tensor:
        """Logits of any shape times `multiplier` and, with a `cap` c, then c tanh(logit / c)."""
        capped = torch.empty(-(-logits.numel() // LANES) * LANES, dtype=logits.dtype)
        capped[: logits.numel()] = logits.flatten()
        capped[logits.numel() :] = 0
        self._cap(capped.data_ptr(), len(capped), multiplier, cap or 0.0)
        return capped[: logits.numel()].view(logits.shape)

    def rotate_write(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        layer: LayerKv,
        query_heads: int,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """Queries `[rows, query_heads, head_dim]` of `qkv`, rotated; writes keys, rotated, and values to their slots.

        `rotation`: cosines and signed sines, float32 `[rows, 1, head_dim]`; `slots` int64 `[rows]`, positions counted
        through the pages of `layer`. With `norms`, queries and keys are normalized, which changes `qkv`.
        """
        rows = qkv.shape[0]
        queries, described = qkv.new_empty(rows, query_heads, layer.head_dim), kernel_head_norms(norms)
        self._rotate_write(
            queries.data_ptr(),
            layer.pool.data_ptr(),
            qkv.data_ptr(),
            rotation[0].data_ptr(),
            rotation[1].data_ptr(),
            slots.data_ptr(),
            ctypes.addressof(described),
            rows,
            query_heads,
            *_sizes(layer),
        )
        return queries

    def attend(
        self, queries: torch.Tensor, layer: LayerKv, blocks: AttentionBlocks, rule: AttentionRule
    ) -> torch.Tensor:
        """Causal attention of `queries` `[rows, query_heads, head_dim]` over the pages of `layer`, to the same shape; 0
        for rows of no block. Raises MemoryError.
        """
        outputs, described = torch.zeros_like(queries), kernel_rule(rule)
        failed = self._attend(
            outputs.data_ptr(),
            queries.data_ptr(),
            layer.pool.data_ptr(),
            blocks.pages.ctypes.data,
            blocks.edges.ctypes.data,
            len(blocks.edges),
            blocks.max_rows,
            blocks.longest,
            ctypes.addressof(described),
            queries.shape[1],
            *_sizes(layer),
        )
        if failed:
            raise MemoryError(_NO_MEMORY)
        return outputs

    def scans(self, scores: torch.Tensor) -> bool:
        """Whether `argmax`, `digests`, `draw`, `masses` and `forbid` take rows of scores like these."""
        return self.takes(scores) and scores.stride(1) == 1

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Place (int64) and value (float32) of the first largest score of each row `[rows, size]`; the value is NaN
        where a score is."""
        rows, size = scores.shape
        places = torch.empty(rows, dtype=torch.int64)
        values = torch.empty(rows, dtype=torch.float32)
        pointers = (places.data_ptr(), values.data_ptr(), scores.data_ptr())
        self._argmax(*pointers, rows, scores.stride(0), size)
        return places, values

    def digests(self, scores: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        """As `LogitsScan.digests`."""
        found = torch.empty(len(which), dtype=torch.int64)
        rows = np.array(which, dtype=np.int64)
        pointers = (found.data_ptr(), scores.data_ptr(), rows.ctypes.data)
        self._digests(*pointers, len(rows), scores.stride(0), scores.shape[1])
        return found

    def draw(
        self, scores: torch.Tensor, draws: Sequence[tuple[int, float]], token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """As `LogitsScan.draw`."""
        rows, size = scores.shape
        drawn = torch.empty(rows, dtype=torch.int64)
        keys = np.array([key for key, _ in draws], np.int64)
        temperatures = np.array([temperature for _, temperature in draws], np.float32)
        tokens = None if token_ids is None else token_ids.data_ptr()
        pointers = (drawn.data_ptr(), scores.data_ptr(), keys.ctypes.data, temperatures.ctypes.data, tokens)
        self._draw(*pointers, rows, scores.stride(0), size)
        return drawn

    def masses(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LogitsScan.masses`."""
        rows, size = scores.shape
        largest, found = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.float64)
        self._masses(largest.data_ptr(), found.data_ptr(), scores.data_ptr(), rows, scores.stride(0), size)
        return largest, found

    def forbid(
        self, scores: torch.Tensor, which: Sequence[int], allowed: np.ndarray, token_ids: torch.Tensor | None
    ) -> None:
        """-inf for what has no bit in `allowed` `[which, bytes]`, lowest bits first, in rows of scores `[rows, size]`;
        the bit of a column is that of its number, or of its token (int64 `[size]`, ascending). Raises ValueError where
        a column has no bit."""
        needed = scores.shape[1] if token_ids is None else int(token_ids[-1]) + 1
        if 8 * allowed.shape[1] < needed:
            raise ValueError(f"allowed has {8 * allowed.shape[1]} bits, must have at least {needed}")
        rows = np.array(which, dtype=np.int64)
        allowed = np.ascontiguousarray(allowed)
        tokens = None if token_ids is None else token_ids.data_ptr()
        pointers = (scores.data_ptr(), rows.ctypes.data, allowed.ctypes.data, tokens)
        self._forbid(*pointers, len(rows), scores.stride(0), scores.shape[1], allowed.shape[1])


def _sizes(layer: LayerKv) -> tuple[int, ...]:
    """As functions over pages take them."""
    assert layer.head_dim % (2 * LANES) == 0 == layer.page_size % LANES, "kernels would read beyond the page"
    return layer.kv_heads, layer.head_dim, layer.page_size, layer.value_pages, layer.quantized


def _panel_bytes(part: QuantizedWeight, scales: torch.dtype) -> torch.Tensor:
    """Of the weight of some panels, the last of which may have less: uint8 `[panels, in / group, bytes of a group]`."""
    out, inputs = part.shape
    groups, missing = inputs // part.group, -out % PANEL
    codes = torch.nn.functional.pad(part.unpacked(), (0, 0, 0, missing))
    codes = codes.view(-1, PANEL, groups, part.group // 4, 4).permute(0, 2, 3, 1, 4)
    if part.bits == 4:
        codes = codes[:, :, ::2] | codes[:, :, 1::2] << 4
    numbers = torch.nn.functional.pad(torch.stack((part.scales, part.minimums)).to(scales), (0, 0, 0, missing))
    numbers = numbers.view(2, -1, PANEL, groups).permute(1, 3, 0, 2).flatten(2).contiguous()
    return torch.cat((codes.flatten(2), numbers.view(torch.uint8)), dim=2)


def _shares_threads(library: ctypes.CDLL) -> bool:
    """Whether the library computes on as many threads as torch. It does where both use the same OpenMP
    library; clang's is another one than torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return bool(library.spool_threads() == before + 1)
    finally:
        torch.set_num_threads(before)


def _function(
    library: ctypes.CDLL, shares_threads: bool, name: str, arguments: Sequence[type], result: type | None = None
) -> Callable[..., Any]:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = result
    if shares_threads:
        return cast(Callable[..., Any], function)

    def on_own_threads(*values: Any) -> Any:
        library.spool_use_threads(torch.get_num_threads())
        return function(*values)

    return on_own_threads
