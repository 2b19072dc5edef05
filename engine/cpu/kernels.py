"""Compiles engine/cpu/csrc for this machine, keeps the result, and calls it on torch's tensors and threads."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.models.source import Progress, cache_folder

logger = logging.getLogger(__name__)

LANES = 16
"""Sizes that the kernels take are multiples of this; head dimensions, of twice this."""

PANEL = 32
"""Outputs of a linear layer whose weights lie together, in one panel."""

_FOLDER = Path(__file__).with_name("csrc")
# Threads are those of the OpenMP library that torch has loaded: their number is what torch says.
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
# Elements of 16 bits in a cache line.
_ALIGNED = 32
_COMPILE_SECONDS = 120
_NO_MEMORY = "no memory for the scores of attention"


def load_cpu_kernels(progress: Progress) -> CpuKernels | None:
    """None, with a word in the log, where no compiler makes them or they cannot share torch's threads: torch's
    operations then do the same."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        logger.warning("no C compiler (gcc) here: passes on the CPU take longer")
        return None
    sources = [file.read_bytes() for file in sorted(_FOLDER.iterdir())]
    try:
        version = _run([compiler, "--version"])
        conditions = (*sources, " ".join(_FLAGS).encode(), version.encode(), processor_name().encode())
        identity = hashlib.sha256(b"\0".join(conditions)).hexdigest()[:32]
        library = cache_folder() / "kernels" / f"{identity}.so"
        if not library.exists():
            progress("compiling CPU kernels", None)
            _compile(compiler, library)
        kernels = ctypes.CDLL(str(library))
        if kernels.spool_threads() != torch.get_num_threads():
            raise OSError("torch shares its threads with another OpenMP library than the compiler's")
        # Whether a process gets matrix tiles is the system's choice, and their sums have another order.
        return CpuKernels(kernels, f"{identity}-tiles" if kernels.spool_has_tiles() else identity)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("no CPU kernels, passes take longer: %s", str(reason).strip()[:500])
        return None


def processor_name() -> str:
    """What this machine's processor is called. Two machines of one name compute alike, with the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    identity = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    return " ".join(sorted({line for line in lines if line.split("\t")[0].strip() in identity}))


def _compile(compiler: str, library: Path) -> None:
    """Whole or not at all: another worker may load it at the same time."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        _run([compiler, *_FLAGS, "-o", str(made), *map(str, sorted(_FOLDER.glob("*.c"))), "-lm"])
        os.replace(made, library)


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS).stdout


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


class LayerWeights(ctypes.Structure):
    """`Layer` of engine/cpu/csrc/layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_ssize_t) for name in ("hidden", "inner", "query_heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_float) for name in ("attention_epsilon", "mlp_epsilon", "head_epsilon", "scaling")),
    )


class LayerPass(ctypes.Structure):
    """`Pass` of engine/cpu/csrc/layer.c. Keeps no tensor alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "pages", "blocks", "scratch")),
        *((name, ctypes.c_ssize_t) for name in ("rows", "block_count", "max_rows", "longest")),
        *((name, ctypes.c_ssize_t) for name in ("page_size", "page_count")),
    )


class WeightMemory:
    """Tensors side by side in large pieces of memory, which numpy asks the system to hold on large pages: weights are
    read from end to end, and each page of 4 KiB costs a search for its address."""

    _PIECE = 16 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.bfloat16)

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of bfloat16 with any content, 64 bytes aligned."""
        size = math.prod(shape)
        room = -(-size // _ALIGNED) * _ALIGNED
        if room > len(self._free):
            piece = np.empty(max(room, self._PIECE) + _ALIGNED, np.int16)
            first = -(piece.ctypes.data // 2) % _ALIGNED
            self._free = torch.from_numpy(piece)[first:].view(torch.bfloat16)
        taken, self._free = self._free[:size], self._free[room:]
        return taken.view(*shape)


class CpuKernels:
    """The functions of engine/cpu/csrc. Tensors are contiguous, on the CPU, bfloat16 where not said otherwise."""

    def __init__(self, library: ctypes.CDLL, identity: str) -> None:
        """`identity` names the source, the compiler, its flags, the processor and what of it may be used."""
        self.identity = identity
        self._weights = WeightMemory()
        pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
        self._norm = _function(library.spool_norm, [pointer] * 3 + [size] * 2 + [number])
        self._add_norm = _function(library.spool_add_norm, [pointer] * 4 + [size] * 2 + [number])
        self._silu_mul = _function(library.spool_silu_mul, [pointer] * 2 + [size] * 2)
        self._rotate_write = _function(library.spool_rotate_write, [pointer] * 8 + [number] + [size] * 6)
        self._attend = _function(library.spool_attend, [pointer] * 5 + [size] * 3 + [number] + [size] * 5)
        self._attend.restype = ctypes.c_int
        self._argmax = _function(library.spool_argmax, [pointer] * 3 + [size] * 3)
        self._probabilities = _function(library.spool_probabilities, [pointer] * 3 + [size] * 3)
        self._linear: ctypes._NamedFuncPointer | None = None
        if hasattr(library, "spool_linear"):
            self._linear = _function(library.spool_linear, [pointer] * 4 + [size] * 3)
            self._layers = _function(library.spool_linear_layers, [pointer] * 3 + [size] + [pointer])
            self._layers.restype = ctypes.c_int
            self._layer_scratch = _function(library.spool_linear_layer_scratch, [pointer])
            self._layer_scratch.restype = size

    def multiplies(self, weight: torch.Tensor) -> bool:
        """Whether `linear` takes a weight like this one. It needs AVX-512's products of bfloat16, or AVX2."""
        is_fit = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0
        return self._linear is not None and is_fit

    def to_panels(self, weight: torch.Tensor) -> torch.Tensor:
        """`[out, in]` to what `linear` reads, `[ceil(out / 32), in / 2, 32, 2]`, with zeros past the last output."""
        out, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -out % PANEL))
        panels = padded.view(-1, PANEL, inputs // 2, 2).transpose(1, 2)
        return self._weights.take(panels.shape).copy_(panels)

    @staticmethod
    def padded_bias(bias: torch.Tensor) -> torch.Tensor:
        """`[out]` to float32, of whole panels."""
        return torch.nn.functional.pad(bias.float(), (0, -len(bias) % PANEL))

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: int) -> torch.Tensor:
        """`rows` `[rows, in]` times the panels of a weight, plus a padded bias, `[rows, out]`."""
        if self._linear is None:
            raise RuntimeError("this processor has no products of bfloat16")
        count, inputs = rows.shape
        outputs = rows.new_empty(count, out)
        bias_pointer = None if bias is None else bias.data_ptr()
        self._linear(outputs.data_ptr(), rows.data_ptr(), weight.data_ptr(), bias_pointer, count, inputs, out)
        return outputs

    def layer_scratch(self, weights: LayerWeights) -> int:
        """Elements of scratch that `layers` needs for a row, where all layers are like this one."""
        return int(self._layer_scratch(ctypes.addressof(weights)))

    def layers(
        self,
        residual: torch.Tensor,
        pools: ctypes.Array[ctypes.c_void_p],
        weights: ctypes.Array[LayerWeights],
        layer_pass: LayerPass,
    ) -> None:
        """Adds to `residual` `[rows, hidden]` what decoder layers add one after the other, each writing keys and
        values to its one of `pools` (addresses of pools as below). Raises MemoryError."""
        pass_address = ctypes.addressof(layer_pass)
        if self._layers(residual.data_ptr(), pools, weights, len(weights), pass_address):
            raise MemoryError(_NO_MEMORY)

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Root-mean-square norms of `rows` `[rows, hidden]`."""
        normed = torch.empty_like(rows)
        self._norm(normed.data_ptr(), rows.data_ptr(), weight.data_ptr(), *rows.shape, epsilon)
        return normed

    def add_norm(
        self, residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Adds `added` to `residual` `[rows, hidden]` in place; gives the norms of the sums."""
        normed = torch.empty_like(residual)
        pointers = (normed.data_ptr(), residual.data_ptr(), added.data_ptr(), weight.data_ptr())
        self._add_norm(*pointers, *residual.shape, epsilon)
        return normed

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[rows, 2 * inner]`, gate before up, to silu(gate) * up, `[rows, inner]`."""
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        product = gate_up.new_empty(rows, inner)
        self._silu_mul(product.data_ptr(), gate_up.data_ptr(), rows, inner)
        return product

    def rotate_write(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        pool: torch.Tensor,
        query_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Queries `[rows, query_heads, head_dim]` of `qkv`, rotated; writes keys, rotated, and values to their slots.

        `rotation`: cosines and signed sines, float32 `[rows, 1, head_dim]`; `slots` int64 `[rows]`, positions counted
        through the pages of `pool` `[2, pages, kv_heads, page_size, head_dim]`; `norms`: weights for queries and for
        keys, and epsilon, where they are normalized before.
        """
        rows = qkv.shape[0]
        pages, kv_heads, page_size, head_dim = pool.shape[1:]
        queries = qkv.new_empty(rows, query_heads, head_dim)
        query_norm, key_norm, epsilon = norms or (None, None, 0.0)
        self._rotate_write(
            queries.data_ptr(),
            pool.data_ptr(),
            qkv.data_ptr(),
            rotation[0].data_ptr(),
            rotation[1].data_ptr(),
            slots.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            epsilon,
            rows,
            query_heads,
            kv_heads,
            head_dim,
            page_size,
            pages,
        )
        return queries

    def attend(
        self, queries: torch.Tensor, pool: torch.Tensor, blocks: AttentionBlocks, scaling: float
    ) -> torch.Tensor:
        """Causal attention of `queries` `[rows, query_heads, head_dim]` over `pool` (as above), to the same shape; 0
        for rows of no block. Raises MemoryError.
        """
        outputs = torch.zeros_like(queries)
        page_count, kv_heads, page_size, head_dim = pool.shape[1:]
        failed = self._attend(
            outputs.data_ptr(),
            queries.data_ptr(),
            pool.data_ptr(),
            blocks.pages.ctypes.data,
            blocks.edges.ctypes.data,
            len(blocks.edges),
            blocks.max_rows,
            blocks.longest,
            scaling,
            queries.shape[1],
            kv_heads,
            head_dim,
            page_size,
            page_count,
        )
        if failed:
            raise MemoryError(_NO_MEMORY)
        return outputs

    @staticmethod
    def scans(scores: torch.Tensor) -> bool:
        """Whether `argmax` and `probabilities` take rows of scores like these."""
        return scores.dtype == torch.bfloat16 and scores.device.type == "cpu" and scores.stride(1) == 1

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Place (int64) and value (float32) of the first largest score of each row `[rows, size]`; the value is NaN
        where a score is."""
        rows, size = scores.shape
        places = torch.empty(rows, dtype=torch.int64)
        values = torch.empty(rows, dtype=torch.float32)
        pointers = (places.data_ptr(), values.data_ptr(), scores.data_ptr())
        self._argmax(*pointers, rows, scores.stride(0), size)
        return places, values

    def probabilities(self, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Softmax of each row of scores `[rows, size]` at the row's place (int64), float32."""
        rows, size = scores.shape
        found = torch.empty(rows, dtype=torch.float32)
        pointers = (found.data_ptr(), scores.data_ptr(), places.data_ptr())
        self._probabilities(*pointers, rows, scores.stride(0), size)
        return found


def _function(function: ctypes._NamedFuncPointer, arguments: Sequence[type]) -> ctypes._NamedFuncPointer:
    function.argtypes = arguments
    function.restype = None
    return function
