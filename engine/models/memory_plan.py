"""How the memory of one GPU is divided among the workers on it, before any of them has taken some. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spool.engine.errors import GpuMemoryError
from spool.engine.kv.kv_store import kv_row_bytes
from spool.engine.models.families import DENSE_FAMILIES
from spool.engine.parallel.heads import heads_of_a_rank
from spool.engine.passes.graph_sizes import MOST_GRAPHS, MOST_ROWS
from spool.engine.quantization.sizes import DTYPE_BYTES, NOT_QUANTIZED, kept_bytes

# KV for fewer tokens is too little for a worker on a GPU.
MIN_KV_TOKENS = 2048

MAX_LOGITS_ROWS = 512
"""Rows of a pass that logits are computed of: steps that want more take more passes."""

SHAPED_AT_ONCE = 1 << 23
"""Numbers of rows of logits that a GPU changes, filters or orders at a time (engine/sampling/sampler.py)."""
SHAPING_BYTES = 64
"""For each of them: scores, noise, weights and their order, in 4 or 8 bytes each."""

LISTED_AT_ONCE = SHAPED_AT_ONCE * SHAPING_BYTES // 16
"""Numbers of rows that kernels sample at a time in the same memory (engine/cuda/triton_sampling.py): of each, 8 bytes
of a key and, where scores are changed, 4 of what becomes of it."""

# What a process has on a GPU before it loads anything, and gaps between what it has there later: an allowance.
_CONTEXT_BYTES = 768 << 20
# cuBLAS keeps up to 32 MiB, and cuBLASLt as much, for each of two streams: that of passes, and that of captures.
_LIBRARY_BYTES = 4 * (32 << 20)
# Of a CUDA graph: its kernels' parameters, on the device.
_GRAPH_BYTES = 8 << 20
BESIDE_TENSORS = _CONTEXT_BYTES + _LIBRARY_BYTES + MOST_GRAPHS * _GRAPH_BYTES
"""What CUDA, its libraries and graphs have, which is no tensor's."""
# Rows whose sums over a part of their positions attention keeps in float32 (engine/cuda/triton_attention.py), once in
# passes without a graph and once in those with one: of each the vector of a head and two numbers.
_KEPT_ROWS = 2 * (1 << 17)
# Of a row of a graph: the list of a sequence's pages (engine/passes/page_lists.py), for each of its positions.
_LIST_BYTES = 8 / 16
# Of a row of a pass: vectors as long as its hidden state and its layers' inner state that are there at the same time.
_VECTORS = 8

GPU_CODE_DTYPES = ("bfloat16", "float16")
"""Of models that keep codes on a GPU: kernels multiply them there (engine/cuda/setup.py)."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that a worker takes of its GPU: its model's `weights`, a `workspace` for passes of the largest size, for
    CUDA graphs and for what CUDA itself keeps, and `kv_bytes_per_token` for each token of a sequence, as if all layers
    saw all of it. `quantization` says, in a word, as which codes the weights are kept."""

    name: str
    weights: int
    workspace: int
    kv_bytes_per_token: int
    quantization: str = NOT_QUANTIZED

    @property
    def fixed(self) -> int:
        return self.weights + self.workspace


def plan_memory(total: int, utilization: float, workers: Sequence[ModelMemory]) -> tuple[int, ...]:
    """Bytes of KV for each of the workers of a GPU that has `total` bytes, of which they may use a share.

    All get KV for equally many tokens, since a sequence has its tokens on a draft and on a target. Raises
    GpuMemoryError, with all numbers, where that would be less than `MIN_KV_TOKENS`.
    """
    allowed = int(total * utilization)
    left = allowed - sum(worker.fixed for worker in workers)
    tokens = left // sum(worker.kv_bytes_per_token for worker in workers)
    if tokens < MIN_KV_TOKENS:
        needs = ", ".join(
            f"{worker.name} {_gib(worker.weights)} of weights, {_gib(worker.workspace)} of workspace and "
            f"{_gib(worker.kv_bytes_per_token * MIN_KV_TOKENS)} of KV for {MIN_KV_TOKENS} tokens"
            for worker in workers
        )
        raise GpuMemoryError(
            f"the GPU is too small: it has {_gib(total)}, of which gpu_memory_utilization {utilization:g} allows "
            f"{_gib(allowed)}; needed are {needs}"
        )
    return tuple(worker.kv_bytes_per_token * tokens for worker in workers)


def model_memory(
    name: str,
    folder: Path,
    dtype: str,
    max_num_batched_tokens: int,
    ranks: int = 1,
    quantization: str = "auto",
    code_dtypes: Sequence[str] = GPU_CODE_DTYPES,
    quantized_kv: bool = False,
) -> ModelMemory:
    """Of the model in `folder`, from its configuration and the headers of its weights; of one of `ranks` that share it.

    `dtype` "auto" is the checkpoint's own. `quantization` is the setting; codes are kept by models of `code_dtypes`,
    which kernels multiply by them, and expanded by others. Raises GpuMemoryError where the folder does not say.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= config.get("text_config", {})
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32" if dtype == "auto" else dtype
        size = DTYPE_BYTES[dtype]
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        own_heads, own_kv_heads = heads_of_a_rank(heads, kv_heads, ranks)
        # Of each layer, the queries, keys, values and outputs of the heads by which a rank has more than its share.
        rounded_up = own_heads + own_kv_heads - (heads + kv_heads) / ranks
        more = int(2 * config["num_hidden_layers"] * hidden * head_dim * rounded_up)
        kv_row = kv_row_bytes(head_dim, size, quantized_kv)
        vocabulary, logits_rows = config["vocab_size"], min(MAX_LOGITS_ROWS, max_num_batched_tokens)
        row = _VECTORS * (hidden + config.get("intermediate_size", 4 * hidden)) * size
        workspace = BESIDE_TENSORS + _KEPT_ROWS * (head_dim + 2) * 4
        workspace += max_num_batched_tokens * row + logits_rows * vocabulary * size
        workspace += SHAPING_BYTES * min(SHAPED_AT_ONCE, logits_rows * vocabulary)
        # All graphs share the memory of the largest one, which passes without a graph do not use, and the logits.
        graphed_rows = min(MOST_ROWS, max_num_batched_tokens)
        workspace += graphed_rows * (row + 2 * vocabulary * size)
        workspace += int(graphed_rows * config.get("max_position_embeddings", 0) * _LIST_BYTES)
        codes = dtype in code_dtypes and quantization != NOT_QUANTIZED and config["model_type"] in DENSE_FAMILIES
        weights, kept = kept_bytes(folder, config, size, quantization, codes)
        return ModelMemory(
            name,
            weights=weights // ranks + size * more,
            workspace=workspace,
            kv_bytes_per_token=config["num_hidden_layers"] * 2 * own_kv_heads * kv_row,
            quantization=kept,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise GpuMemoryError(f"{folder} does not say how much memory its model takes ({reason})") from error


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
