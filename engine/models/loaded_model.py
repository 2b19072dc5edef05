"""A model in memory, and runners that compute with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from spool.engine.attention.backends import AttentionBackend
from spool.engine.cpu.attention import KernelBackend
from spool.engine.cpu.experts import replace_experts
from spool.engine.cpu.fused_layers import HEAD_MULTIPLE, KernelDecoder, fuse_decoder
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.cpu.linear import KernelLinear, replace_linears
from spool.engine.cuda.setup import GpuPasses
from spool.engine.kv.kv_store import kv_row_bytes
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.kv.pages import PagePool
from spool.engine.layers.plain_norms import replace_norms
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.parallel.lead import Lead
from spool.engine.passes.eager import forward
from spool.engine.passes.runner import ModelRunner
from spool.engine.passes.solo import SoloBackend, SoloModel, SoloPasses
from spool.engine.sampling.grammars import Grammars


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KvShape:
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, kv_heads, head_dim)

    def for_kernels(self, kernels: CpuKernels | None) -> KvShape:
        """With the dimensions that a head has on pages: those of a CPU take multiples of 32."""
        multiple = 1 if kernels is None else HEAD_MULTIPLE
        return replace(self, head_dim=-(-self.head_dim // multiple) * multiple)

    def bytes_of_layer(self, dtype: torch.dtype, quantized: bool = False) -> int:
        """For each token, of KV in `dtype`, or as codes."""
        return 2 * self.kv_heads * kv_row_bytes(self.head_dim, dtype.itemsize, quantized)


def attention_name(backend: AttentionBackend) -> str:
    """For reports."""
    names: dict[type, str] = {KernelBackend: "CPU kernel", SoloBackend: "transformers"}
    return names.get(type(backend), "triton kernel")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`kernels`: of a CPU; None where the model is on none. `gpu`: None where the model is on no GPU, or its sequences
    are computed one at a time. `planned_kv_bytes`: of the plan of a GPU's memory.
    `grammars`: None where the model's folder has no tokenizer. `lead`: of rank 0 of a worker of several, where `model`
    is a part of the whole. `quantization`: of its weights, in a word. `quantized_kv`: whether KV is kept as codes.
    `windows`: of its layers, None for those that see everything; empty as long as they are not known. `solo`: of a
    model whose sequences are computed one at a time."""

    model: PreTrainedModel
    vocabulary: Vocabulary
    kernels: CpuKernels | None
    gpu: GpuPasses | None
    planned_kv_bytes: int | None = None
    grammars: Grammars | None = None
    lead: Lead | None = None
    quantization: str = "none"
    quantized_kv: bool = False
    windows: tuple[int | None, ...] = ()
    solo: SoloModel | None = None

    @property
    def kernel_identity(self) -> str | None:
        """Names the kernels in use."""
        kernels = self.kernels or self.gpu
        return None if kernels is None else kernels.identity

    @property
    def by_cpu_kernels(self) -> bool:
        """Whether nothing of a pass is left to libraries, so that neither threads nor shapes of calls matter; known
        once layers are replaced."""
        head = self.model.get_output_embeddings()
        head = getattr(head, "part", head)
        decoder = self.model.base_model
        return isinstance(decoder, KernelDecoder) and not decoder.has_experts and isinstance(head, KernelLinear)

    @property
    def universal(self) -> bool:
        """Whether every processor computes the same bits; known once layers are replaced."""
        as_one_rank = self.lead is None or self.lead.sums_as_one
        return self.kernels is not None and self.kernels.universal and self.by_cpu_kernels and as_one_rank

    @property
    def kv_shape(self) -> KvShape:
        """In bytes, for a model whose sequences are computed one at a time."""
        if self.solo is not None:
            return KvShape(self.solo.lanes, 1, self.solo.row_bytes)
        return KvShape.of(self.model.config).for_kernels(self.kernels)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.model.dtype if self.solo is None else torch.uint8

    def replace_layers(self, check: Callable[[str], None] = lambda _: None) -> None:
        """Replaces layers by faster ones that compute the same, in place. `check` is called after each kind of them,
        with its name."""
        if self.solo is not None:
            return
        if self.gpu is not None:
            self.gpu.fuse_decoder(self.model)
            check("a fused decoder")
        if self.kernels is not None:
            fuse_decoder(self.model, self.kernels)
            replace_experts(self.model, self.kernels)
            replace_linears(self.model, self.kernels)
        replace_norms(self.model)
        check("other layers")
        if self.gpu is not None:
            self.gpu.replace_linears(self.model)
            check("products of its own")

    def runner(self, pool: PagePool, row_counts: Sequence[int]) -> ModelRunner:
        model = self.model
        if self.lead is not None:
            self.lead.new_runner(pool, row_counts)
        shape = self.kv_shape
        kv = PagedKv(
            shape.layers,
            pool.total_pages,
            pool.page_size,
            shape.kv_heads,
            shape.head_dim,
            self.kv_dtype,
            model.device,
            self.quantized_kv,
            pool.groups,
        )
        if self.solo is not None:
            return ModelRunner(model, kv, SoloBackend(), row_counts, passes=SoloPasses(self.solo, kv))
        if self.gpu is None:
            return ModelRunner(model, kv, self.cpu_backend(pool.page_size), row_counts, lead=self.lead)
        graphs = self.gpu.graphs(partial(forward, model), kv)
        return ModelRunner(model, kv, self.gpu.backend(pool.page_size), row_counts, graphs, self.lead)

    def cpu_backend(self, page_size: int) -> KernelBackend:
        assert self.kernels is not None, "the model is on no CPU"
        return KernelBackend(self.kernels, page_size)
