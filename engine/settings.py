"""What a worker's engine is to load and how. Torch-free, so that launchers can build and check it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from spool.engine.cpu.isa import CPU_ISAS
from spool.engine.kv.kv_store import KV_INT8
from spool.engine.models.memory_plan import ModelMemory

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", KV_INT8)
DRAFT_AHEAD = ("auto", "always", "never")
NUMERICS = ("auto", "universal")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
LONGEST_LOOKUP_MATCH = 32
LOOKUP_MEMORY = 64 << 20
LEAST_LOOKUP_MEMORY = 1 << 20
MOST_LOOKUP_MEMORY = 1 << 36
MOST_RANKS = 64

BATCHED_TOKENS_ON_CPU = 192
# Reading 2-byte weights takes a GPU as long as multiplying by them 150 (A100) to 400 rows (L4). Passes of several times
# as many also outlast the launch of their kernels.
BATCHED_TOKENS_ON_GPU = 2048

PAGE_MULTIPLE = 16
"""Positions of a page: as kernels read them."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine. Raises `ValueError` naming field, value and limit.

    `model` is a folder with a Hugging Face model, or a hub id. `dtype` "auto" takes the checkpoint's own where the
    device computes it well. `kv_cache_dtype` "auto" keeps KV in that dtype, "int8" as codes with scales. `quantization`
    "auto" keeps weights as the checkpoint has them, "none" expands quantised ones to `dtype`, and "int8" and "int4"
    round those of a plain checkpoint.
    `cpu_isa` limits a CPU's instruction set (engine/cpu/isa.py), with "auto" to that of `SPOOL_CPU_ISA`, or not at all.
    `numerics`: with "universal" a target on a CPU computes the same bits as on every other, or is refused; "auto" does
    so where weights are quantised.
    `kv_pages` overrides the number of pages that `kv_memory_bytes` would give.
    Without either, KV gets a share of a CPU's free memory; of a GPU's memory, the share `gpu_memory_utilization` is
    divided among this worker and `gpu_peers`, the other workers there (engine/models/memory_plan.py).
    `max_num_batched_tokens` bounds the tokens of one forward pass (None: as `batched_tokens` says), `max_model_len`
    those of a sequence (None: the model does). `threads` 0 leaves the number to torch.
    With `lookup_match`, where at least that many of the last tokens stood in the sequence before, what followed them is
    proposed: by a target itself, alone (its own draft is "ngram" then) or before its head or the draft inside it is
    asked; by a draft worker, before its model is. `inside_draft` has none of its own. A target also looks in earlier
    texts of the same cache scope, of which it keeps as many as `lookup_memory` bytes hold (engine/drafting/
    lookup/text_store.py); 0: none. `target`, a model, is for drafts:
    rows and proposals have its token ids, which may not be the draft's own (engine/drafting/token_map.py). With
    `prefix_cache`, sequences that begin alike share the pages of what they have in common. With `cuda_graphs`, a GPU
    computes small passes as CUDA graphs. So many ranks as `tensor_parallel_size` says compute a target together;
    `threads`, KV and GPUs are those of each.
    `draft_head` names a drafting head that a target has beside its model, "mtp" the MTP layer in the model's own folder
    (engine/models/drafting_head.py). `inside_draft`: of a draft that runs in the target's process. `draft_ahead`: of a
    draft worker, when it goes ahead of verdicts.
    `ignore_tensors`: names or patterns, as in a shell, of tensors of the models' files, and of keys of GGUF files, that
    may be left out although nothing says that they change no token.
    """

    model: str
    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "cpu"
    cpu_isa: str = "auto"
    numerics: str = "auto"
    threads: int = 0
    page_size: int = 16
    kv_pages: int | None = None
    kv_memory_bytes: int | None = None
    exact: bool = True
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    lookup_match: int | None = None
    lookup_memory: int = LOOKUP_MEMORY
    prefix_cache: bool = True
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9
    gpu_peers: tuple[ModelMemory, ...] = ()
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    draft_head: str | None = None
    draft_ahead: str = "auto"
    target: str | None = None
    inside_draft: EngineSettings | None = None
    ignore_tensors: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, settings: Mapping[str, Any]) -> Self:
        """From what `dataclasses.asdict` made of them. Raises ValueError for a setting that is missing, unknown or out
        of range."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ValueError(f"settings hold {', '.join(unknown)}, must be among {', '.join(sorted(known))}")
        if "model" not in settings:
            raise ValueError("settings hold no model")
        peers = tuple(ModelMemory(**peer) for peer in settings.get("gpu_peers", ()))
        inside = settings.get("inside_draft")
        inside = None if inside is None else cls.from_plain(inside)
        ignored = tuple(settings.get("ignore_tensors", ()))
        return cls(**{**settings, "gpu_peers": peers, "inside_draft": inside, "ignore_tensors": ignored})

    @property
    def universal(self) -> bool:
        """Whether a target must compute as on every other processor."""
        return self.numerics == "universal"

    @property
    def quantized_kv(self) -> bool:
        return self.kv_cache_dtype == KV_INT8

    @property
    def goes_ahead(self) -> bool:
        """Of a draft worker. By itself on a GPU of its own: elsewhere targets would wait for what it computes ahead."""
        if self.draft_ahead == "auto":
            return self.device != "cpu" and not self.gpu_peers
        return self.draft_ahead == "always"

    @property
    def batched_tokens(self) -> int:
        """The most tokens of one forward pass."""
        on_device = BATCHED_TOKENS_ON_CPU if self.device == "cpu" else BATCHED_TOKENS_ON_GPU
        return self.max_num_batched_tokens or on_device

    def __post_init__(self) -> None:
        choices = (
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("quantization", QUANTIZATIONS),
            ("cpu_isa", CPU_ISAS),
            ("numerics", NUMERICS),
            ("draft_ahead", DRAFT_AHEAD),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(known)}")
        limits = (
            ("threads", 0, 1024),
            ("page_size", 1, 1024),
            ("max_num_batched_tokens", 8, 65536),
            ("tensor_parallel_size", 1, MOST_RANKS),
            ("lookup_match", 1, LONGEST_LOOKUP_MATCH),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}, must be between {low} and {high}")
        for name in ("kv_pages", "kv_memory_bytes", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if self.lookup_memory and not LEAST_LOOKUP_MEMORY <= self.lookup_memory <= MOST_LOOKUP_MEMORY:
            most = f"{LEAST_LOOKUP_MEMORY} and {MOST_LOOKUP_MEMORY}"
            raise ValueError(f"lookup_memory is {self.lookup_memory}, must be 0, or between {most}")
        if self.page_size % PAGE_MULTIPLE:
            raise ValueError(f"page_size is {self.page_size}, must be a multiple of {PAGE_MULTIPLE}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be above 0 and at most 1")
        draft = self.draft_head if self.inside_draft is None else self.inside_draft.model
        if draft is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, must be 1 with {draft}, which drafts inside a "
                "whole target"
            )
