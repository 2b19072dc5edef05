"""How the memory of one GPU is divided among the workers on it, before any of them has taken some. No torch here."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import GpuMemoryError
from engine.kv.groups import lanes_of, page_groups
from engine.kv.kv_store import kv_row_bytes
from engine.parallel.heads import heads_of_a_rank
from engine.passes.graph_sizes import MOST_GRAPHS, MOST_ROWS
from engine.quantization.sizes import NOT_QUANTIZED, QUANTIZED_FAMILIES, KeptWeight, kept_bytes, kept_weights

# KV for fewer tokens is too little for a worker on a GPU.
MIN_KV_TOKENS = 2048

# What a process has on a GPU before it loads anything, and gaps between what it has there later: an allowance.
_CONTEXT_BYTES = 768 << 20
# cuBLAS keeps up to 32 MiB, and cuBLASLt as much, for each of two streams: that of passes, and that of captures.
_LIBRARY_BYTES = 4 * (32 << 20)
# Of a CUDA graph: its kernels' parameters, on the device.
_GRAPH_BYTES = 8 << 20
# Rows whose sums over a part of their positions attention keeps in float32 (engine/cuda/triton_attention.py), once in
# passes without a graph and once in those with one: of each the vector of a head and two numbers.
_KEPT_ROWS = 2 * (1 << 17)
# Of a row of a pass: its logits in the model's dtype and, while tokens are chosen, twice in float32.
_LOGITS_FLOATS = 2
# Of a row of a pass: vectors as long as its hidden state and its layers' inner state that are there at the same time.
_VECTORS = 8

# Of families whose configuration may not tell layers apart: the last of so many sees everything; 0: all have windows.
_FULL_EVERY = {
    "gemma2": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "mistral": 0,
    "mixtral": 0,
    "phi3": 0,
    "phimoe": 0,
    "starcoder2": 0,
}

GPU_CODE_DTYPES = ("bfloat16", "float16")
"""Of models that keep codes on a GPU: kernels multiply them there (engine/cuda/setup.py)."""
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that a worker takes of its GPU: its model's `weights`, a `workspace` for passes of the largest size, for
    CUDA graphs and for what CUDA itself keeps, and `kv_bytes_per_token` for each token of a sequence. `window_kv_bytes`
    are those of layers with windows, for each sequence; it has up to `longest` tokens. `quantization` says, in a word,
    as which codes the weights are kept."""

    name: str
    weights: int
    workspace: int
    kv_bytes_per_token: int
    quantization: str = NOT_QUANTIZED
    window_kv_bytes: int = 0
    longest: int = 1

    def kv_bytes(self, tokens: int) -> int:
        """Of so many tokens, in sequences that are as long as they can be."""
        return tokens * self.kv_bytes_per_token + -(-tokens // self.longest) * self.window_kv_bytes

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
    tokens = kv_tokens(left, workers)
    if tokens < MIN_KV_TOKENS:
        needs = ", ".join(
            f"{worker.name} {_gib(worker.weights)} of weights, {_gib(worker.workspace)} of workspace and "
            f"{_gib(worker.kv_bytes(MIN_KV_TOKENS))} of KV for {MIN_KV_TOKENS} tokens"
            for worker in workers
        )
        raise GpuMemoryError(
            f"the GPU is too small: it has {_gib(total)}, of which gpu_memory_utilization {utilization:g} allows "
            f"{_gib(allowed)}; needed are {needs}"
        )
    return tuple(worker.kv_bytes(tokens) for worker in workers)


def kv_tokens(size: int, workers: Sequence[ModelMemory]) -> int:
    """Tokens that KV of `size` bytes has room for, if all of the workers hold them."""
    return bisect_right(range(1, max(size, 0) + 1), size, key=lambda count: sum(one.kv_bytes(count) for one in workers))


def model_memory(
    name: str,
    folder: Path,
    dtype: str,
    max_num_batched_tokens: int,
    ranks: int = 1,
    quantization: str = "auto",
    code_dtypes: Sequence[str] = GPU_CODE_DTYPES,
    quantized_kv: bool = False,
    max_model_len: int | None = None,
) -> ModelMemory:
    """Of the model in `folder`, from its configuration and the headers of its weights; of one of `ranks` that share it.

    `dtype` "auto" is the checkpoint's own. `quantization` is the setting; codes are kept by models of `code_dtypes`,
    which kernels multiply by them, and expanded by others. Raises GpuMemoryError where the folder does not say.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        method = config.get("quantization_config") or {}
        config = config.get("text_config", config)
        own_dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype = own_dtype if dtype == "auto" else dtype
        size = _DTYPE_BYTES[dtype]
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        own_heads, own_kv_heads = heads_of_a_rank(heads, kv_heads, ranks)
        # Of each layer, the queries, keys, values and outputs of the heads by which a rank has more than its share.
        rounded_up = own_heads + own_kv_heads - (heads + kv_heads) / ranks
        more = int(2 * config["num_hidden_layers"] * hidden * head_dim * rounded_up)
        kv_row = kv_row_bytes(head_dim, size, quantized_kv)
        row = config["vocab_size"] * (size + 4 * _LOGITS_FLOATS)
        row += _VECTORS * (hidden + config.get("intermediate_size", 4 * hidden)) * size
        workspace = _CONTEXT_BYTES + _LIBRARY_BYTES + _KEPT_ROWS * (head_dim + 2) * 4 + max_num_batched_tokens * row
        # All graphs share the memory of the largest one, which passes without a graph do not use, and the logits.
        graphed_rows = min(MOST_ROWS, max_num_batched_tokens)
        workspace += MOST_GRAPHS * _GRAPH_BYTES + graphed_rows * (row + config["vocab_size"] * size)
        weights, kept = kept_weights(folder, _DTYPE_BYTES[own_dtype], method, quantization)
        keeps_codes = dtype in code_dtypes and quantization != NOT_QUANTIZED
        if not keeps_codes or config.get("model_type") not in QUANTIZED_FAMILIES:
            weights, kept = {name: KeptWeight(weight.numbers) for name, weight in weights.items()}, NOT_QUANTIZED
        whole = kept_bytes(weights, size, own_heads * head_dim, config.get("intermediate_size", 0) // ranks)
        longest = min(config.get("max_position_embeddings", sys.maxsize), max_model_len or sys.maxsize)
        groups = page_groups(_windows(config, longest))
        lanes = lanes_of(groups, config["num_hidden_layers"]) * 2 * own_kv_heads * kv_row
        # Windows move on with a step, and by whole pages.
        seen = [0 if group.window is None else group.window + 2 * max_num_batched_tokens for group in groups]
        return ModelMemory(
            name,
            weights=whole // ranks + size * more,
            workspace=workspace,
            kv_bytes_per_token=sum(lanes // group.slices for group in groups if group.window is None),
            quantization=kept,
            window_kv_bytes=sum(
                lanes * min(count, longest) // group.slices for count, group in zip(seen, groups, strict=True)
            ),
            longest=longest,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise GpuMemoryError(f"{folder} does not say how much memory its model takes ({reason})") from error


def _windows(config: Mapping[str, Any], longest: int) -> list[int | None]:
    """Of the layers, as far as the configuration says; None for those that see everything."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if not window or window >= longest:
        return [None] * layers
    if types := config.get("layer_types"):
        return [window if kind == "sliding_attention" else None for kind in types]
    every = config.get("sliding_window_pattern", _FULL_EVERY.get(config.get("model_type", "")))
    if every is None:
        return [None] * layers
    return [None if every and (layer + 1) % every == 0 else window for layer in range(layers)]


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
