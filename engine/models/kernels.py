"""Which kernels a model is computed with, of those for its device."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from spool.engine.cpu.kernels import CpuKernels, load_cpu_kernels
from spool.engine.cpu.logits_scan import KernelScan
from spool.engine.cuda.setup import GpuPasses, load_gpu_passes, multiplies_codes
from spool.engine.drafting.head import DraftingHead
from spool.engine.drafting.head_passes import HeadPasses
from spool.engine.errors import one_line
from spool.engine.kv.pages import PagePool
from spool.engine.models.loaded_model import KvShape, LoadedModel
from spool.engine.models.source import Progress
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.sampler import sample_tokens
from spool.engine.settings import EngineSettings
from spool.scheduler.sampling import SamplingParameters

logger = logging.getLogger(__name__)


def cpu_kernels(
    dtype: torch.dtype, device: torch.device, settings: EngineSettings, progress: Progress, quantized: bool
) -> CpuKernels | None:
    """None for another device. With universal numerics, without what processors have for products of bfloat16 numbers:
    all then compute the same bits. It is little used with quantised weights. Raises UnsupportedProcessorError."""
    if device.type != "cpu":
        return None
    return load_cpu_kernels(dtype, progress, settings.cpu_isa, universal=quantized or settings.universal)


def takes_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels that multiply by quantised weights."""
    return device.type == "cpu" or multiplies_codes(dtype, device)


def gpu_passes(model: PreTrainedModel, settings: EngineSettings, graphs: bool, progress: Progress) -> GpuPasses | None:
    if model.device.type != "cuda":
        return None
    shape = KvShape.of(model.config)
    heads = (model.config.num_attention_heads, shape.kv_heads, shape.head_dim)
    has_rules = any(getattr(model.config, name, None) for name in ("sliding_window", "attn_logit_softcapping"))
    return load_gpu_passes(model.dtype, model.device, heads, graphs, progress, has_rules, settings.quantized_kv)


def head_passes(head: DraftingHead, pool: PagePool, loaded: LoadedModel, progress: Progress) -> HeadPasses:
    """Of a head of the loaded model. On a GPU with the attention that its own sizes get, and with graphs to capture."""
    kv, gpu, model = head.kv(pool.total_pages, pool.page_size), loaded.gpu, loaded.model
    if gpu is None:
        return HeadPasses(head, kv, loaded.cpu_backend(pool.page_size))
    passes = load_gpu_passes(model.dtype, model.device, head.heads, False, progress, head.has_windows)
    backend = passes.backend(pool.page_size)
    return HeadPasses(head, kv, backend, lambda compute: gpu.graphs(compute, kv, backend))


# The first rows are greedy, the next ones drawn from all tokens, then filtered and changed: kernels differ.
_TRIED_AT_ONCE = (8, 16, 24, 32)
# What float32 sums of a vocabulary in another order may differ by.
_LOGPROB_TOLERANCE = 1e-4
_FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.95, "min_p": 0.01}
_CHANGES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
    "logit_bias": {3: 1.0},
    "bad_words": ((4,),),
}


def _tried(number: int) -> SamplingContext:
    more = (_FILTERS if number >= 16 else {}) | (_CHANGES if number >= 24 else {})
    sampling = SamplingParameters(temperature=number // 8 * 0.4, seed=number, **more)
    return SamplingContext(sampling, number, (1, 2, 2), 1)


def _scanned(
    scan: LogitsScan, logits: torch.Tensor, token_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What else is asked of two rows of logits: digests, likeliest tokens and what a grammar leaves, as bits; and log
    probabilities, which err."""
    rows, last = [1, 0], logits.shape[1] - 1 if token_ids is None else int(token_ids[-1])
    probable = scan.logprobs(logits, rows, torch.tensor(rows, device=logits.device), 3)
    left = logits[:2].clone(memory_format=torch.contiguous_format)
    scan.forbid(left, rows, np.full((2, last // 8 + 1), 0b10110010, np.uint8), token_ids)
    exact = scan.digests(logits, rows), probable[:, 1:4].flatten(), left.double().view(torch.int64).flatten()
    return torch.cat(exact).cpu(), probable[:, [0, 4, 5, 6]].view(torch.float64).cpu()


def logits_scan(loaded: LoadedModel, token_ids: torch.Tensor | None = None) -> LogitsScan:
    """`token_ids` as in `sample_tokens`. On a GPU by Triton kernels, if they choose what torch chooses on a CPU, and
    find the same else."""
    if loaded.kernels is not None:
        return KernelScan(loaded.kernels)
    if loaded.gpu is None:
        return LogitsScan()
    # Triton is made for Linux only.
    from spool.engine.cuda.triton_sampling import TritonScan

    model, size = loaded.model, loaded.vocabulary.size if token_ids is None else token_ids.numel()
    wide = torch.randn(32, -(-size // 16) * 16, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    rows = [_tried(number) for number in range(32)]
    scan, logits, on_gpu = TritonScan(), wide[:, :size], wide.to(model.device)[:, :size]
    try:
        found = [sample_tokens(on_gpu[:count], rows[:count], token_ids, scan) for count in _TRIED_AT_ONCE]
        bits, logprobs = _scanned(scan, on_gpu, token_ids)
    # Triton has errors of its own, and those of the compiler that it calls.
    except Exception as error:  # noqa: BLE001
        logger.warning("tokens are chosen by torch, as the Triton kernels cannot be made: %s", one_line(error))
        return LogitsScan()
    token_ids = None if token_ids is None else token_ids.cpu()
    expected, others = sample_tokens(logits, rows, token_ids), _scanned(LogitsScan(), logits, token_ids)
    same = torch.equal(bits, others[0]) and float((logprobs - others[1]).abs().max()) < _LOGPROB_TOLERANCE
    if not same or found != [expected[:count] for count in _TRIED_AT_ONCE]:
        logger.warning("tokens are chosen by torch, as the Triton kernels choose others")
        return LogitsScan()
    return scan
