"""What a model on a GPU computes its passes with: attention by a Triton kernel and, if asked for, CUDA graphs.

The kernel is not taken on trust: one that cannot be made here, or gives other values than matrix products, is not used.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.attention.backends import AttentionBackend, MatmulBackend, Span, unrestricted_form
from engine.kv.paged_kv import PagedKv
from engine.models.source import Progress
from engine.passes.device import current
from engine.passes.graphed import BlockBackend, Capture, CudaCapture, GraphedPasses

logger = logging.getLogger(__name__)

_KERNEL_SOURCE = Path(__file__).with_name("triton_attention.py")

# Of the trial: sequences (start and rows), of more positions than a kernel may take in one piece; and pages.
_TRIAL = ((0, 1), (70, 5), (0, 40), (330, 3), (520, 1))
_TRIAL_PAGES = 70
# An output below 4 is rounded by 2^-7 in bfloat16 and by 2^-10 in float16 at most; rounded weights add less than that.
# A position too many or too few makes a difference of 0.02 and more.
_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.0025, torch.float32: 1e-4}


class GpuPasses:
    def __init__(self, identity: str, backend: Callable[[int], BlockBackend], capture: Capture | None) -> None:
        """`identity` names the kernel, its source and its compiler; `backend` makes one for a page size; without
        `capture` there are no graphs."""
        self.identity = identity
        self.backend = backend
        self._capture = capture

    def graphs(self, model: PreTrainedModel, kv: PagedKv) -> GraphedPasses | None:
        """None captured yet."""
        if self._capture is None:
            return None
        return GraphedPasses(model, kv, self.backend(kv.page_size), self._capture)


def load_gpu_passes(
    dtype: torch.dtype, device: torch.device, heads: tuple[int, int, int], graphs: bool, progress: Progress
) -> GpuPasses | None:
    """For `heads`: query heads, KV heads, dimensions of a head. None, with a warning, where the kernel is of no use."""
    progress("making the attention kernel", None)
    try:
        import triton

        from engine.cuda.triton_attention import TritonBackend

        def backend(page_size: int) -> BlockBackend:
            return TritonBackend(heads[0], heads[1], page_size, device)

        with current(device):
            difference = _difference(backend, dtype, device, heads)
    # Triton has errors of its own, and those of the compiler that it calls.
    except Exception as error:
        logger.warning("attention by matrix products, as its Triton kernel cannot be made: %s", error)
        return None
    if not difference <= _TOLERANCES[dtype]:
        logger.warning("attention by matrix products, as its Triton kernel gives values that are %.3g off", difference)
        return None
    source = hashlib.sha256(_KERNEL_SOURCE.read_bytes()).hexdigest()[:16]
    capture = CudaCapture(device) if graphs and device.type == "cuda" else None
    return GpuPasses(f"triton {triton.__version__} {source}", backend, capture)


@torch.inference_mode()
def _difference(
    backend: Callable[[int], AttentionBackend], dtype: torch.dtype, device: torch.device, heads: tuple[int, int, int]
) -> float:
    """The largest one between attention by the kernel and by products in float32 on the CPU, on the same random KV."""
    page_size = 16
    query_heads, kv_heads, head_dim = heads
    kv = PagedKv(1, _TRIAL_PAGES, page_size, kv_heads, head_dim, dtype, device)
    generator = torch.Generator().manual_seed(0)
    layer = kv.layers[0]
    layer.pool.copy_(torch.randn(layer.pool.shape, generator=generator))
    spans, rows, page = [], 0, 0
    for start, count in _TRIAL:
        pages = -(-(start + count) // page_size)
        spans.append(Span(rows, count, start, range(page, page + pages)))
        rows, page = rows + count, page + pages
    query = torch.randn(rows, query_heads, head_dim, generator=generator).to(device, dtype)
    found = backend(page_size).plan(spans, rows).attend(layer, query, head_dim**-0.5)
    cpu = torch.device("cpu")
    exact = PagedKv(1, _TRIAL_PAGES, page_size, kv_heads, head_dim, torch.float32, cpu)
    exact.layers[0].pool.copy_(layer.pool)
    products = MatmulBackend(
        unrestricted_form(page_size), query_heads, kv_heads, page_size, exact.pages, torch.float32, cpu
    )
    expected = products.plan(spans, rows).attend(exact.layers[0], query.to(cpu, torch.float32), head_dim**-0.5)
    return float((found.to(cpu, torch.float32) - expected).abs().max())
