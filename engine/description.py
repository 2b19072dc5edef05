"""The description of an engine. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Fields as in protos/worker.proto, WorkerDescription; `attention` and `graphed_row_counts` are for reports and
    stay in the process.

    `fingerprint`: what must be alike on two targets for equal bits, in parts (engine/exactness/fingerprint.py).

    An empty `tokenizer_digest` fits any vocabulary. `quantization` is that of the weights as they are computed with,
    such as "none", "int8" or "awq", and `kv_cache_dtype` that of elements of KV. `attention` is what attends: "triton
    kernel", "CPU kernel" or "matrix products". `graphed_row_counts`: of passes that are CUDA graphs.
    """

    model_id: str
    tokenizer_digest: bytes
    vocabulary_size: int
    dtype: str
    device: str
    page_size: int
    total_pages: int
    max_sequence_length: int
    max_num_batched_tokens: int
    exact_row_counts: tuple[int, ...] = ()
    threads: int = 1
    kv_bytes_per_token: int = 0
    quantization: str = "none"
    kv_cache_dtype: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    page_spans: tuple[int, ...] = ()
    page_windows: tuple[int, ...] = ()
    attention: str = ""
    graphed_row_counts: tuple[int, ...] = ()
    own_draft_id: str = ""
