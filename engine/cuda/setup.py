"""What a model on a GPU computes its passes with: attention, products and what lies between them by Triton kernels and,
if asked for, CUDA graphs.

Kernels are not taken on trust: without attention that gives the values of float32 products nothing is served, and
products that cannot be made here, or give other values, or other bits for a row in company, are not used.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.backends import AttentionBackend, AttentionRule, Span
from spool.engine.errors import UnsupportedProcessorError, one_line
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.models.source import Progress
from spool.engine.passes.device import current
from spool.engine.passes.graphed import Capture, CudaCapture, GraphedPasses, NumberedBackend
from spool.engine.passes.layout import Forward
from spool.engine.quantization.layers import QuantizedLinear
from spool.engine.quantization.rounding import rounded

logger = logging.getLogger(__name__)

# Types that the products are made for.
_MULTIPLIED = (torch.bfloat16, torch.float16)
_CODE_BITS = (4, 8)

# Of the trial of products: outputs, inputs, and row counts, for which tiles of several sizes are used.
_TRIAL_WEIGHT = (320, 1056)
_TRIAL_ROWS = (1, 2, 17, 40, 100, 161, 300)
# Relative to the largest number of a row.
_PRODUCT_TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10}

# Of the trial of attention: sequences (start and rows), some longer than what a kernel takes in one piece; and pages.
_TRIAL = ((0, 1), (70, 5), (230, 70), (330, 3), (520, 1))
_TRIAL_PAGES = 82
_TRIAL_WINDOW = 300
# An output below 4 is rounded by 2^-7 in bfloat16 and by 2^-10 in float16 at most; rounded weights add less than that.
# A position too many or too few makes a difference of 0.02 and more.
_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.0025, torch.float32: 1e-4}


MakeLinear = Callable[[nn.Linear | QuantizedLinear], nn.Module]
_Tried = tuple[torch.dtype, torch.device, tuple[int, int, int], bool]


class GpuPasses:
    def __init__(
        self,
        identity: str,
        backend: Callable[[int], NumberedBackend],
        capture: Capture | None,
        make_linear: MakeLinear | None = None,
    ) -> None:
        """`identity` names the kernels in use, their sources and their compiler; `backend` makes attention for a page
        size; without `capture` there are no graphs; `make_linear` makes what computes a linear layer, None leaves it as
        it is."""
        self.identity = identity
        self.backend = backend
        self._capture = capture
        self._make_linear = make_linear

    def graphs(self, compute: Forward, kv: PagedKv, backend: NumberedBackend | None = None) -> GraphedPasses | None:
        """None captured yet. With another `backend`, of a layer of other sizes."""
        if self._capture is None:
            return None
        return GraphedPasses(compute, kv, backend or self.backend(kv.page_size), self._capture)

    def made_ahead(self) -> AbstractContextManager[None]:
        """While it is open, kernels are made and not run (engine/cuda/launches.py)."""
        from spool.engine.cuda.launches import made_ahead

        return made_ahead()

    def fuse_decoder(self, model: PreTrainedModel) -> None:
        """Replaces the decoder of a model of a known family, in place."""
        from spool.engine.cuda.fused_decoder import fuse_decoder

        fuse_decoder(model, self._make_linear or (lambda linear: linear))

    def use_library(self, model: PreTrainedModel, row_counts: Sequence[int]) -> int:
        """Lets torch's library multiply where it gives the bits of own products: for how many shapes and row counts."""
        if self._make_linear is None:
            return 0
        from spool.engine.cuda.library_products import use_library

        return use_library(model, row_counts)

    def replace_linears(self, model: PreTrainedModel) -> None:
        """Replaces experts and all linear layers by those that give a row the same bits in any company, in place."""
        if self._make_linear is None:
            return
        from spool.engine.cuda.triton_experts import replace_experts

        replace_experts(model)
        for module in list(model.modules()):
            for name, child in module.named_children():
                plain = type(child) is nn.Linear and child.weight.dtype in _MULTIPLIED
                if plain or isinstance(child, QuantizedLinear):
                    setattr(module, name, self._make_linear(child))


def load_gpu_passes(
    dtype: torch.dtype,
    device: torch.device,
    heads: tuple[int, int, int],
    graphs: bool,
    progress: Progress,
    has_rules: bool = False,
    quantized_kv: bool = False,
) -> GpuPasses:
    """For `heads`: query heads, KV heads, dimensions of a head; `has_rules`: whether layers have windows, soft caps or
    sinks; `quantized_kv`: whether KV is kept as codes. Raises UnsupportedProcessorError where the kernel of attention
    cannot be made, or gives other values."""
    progress("making the GPU kernels", None)
    try:
        import triton

        from spool.engine.cuda.launches import made_ahead
        from spool.engine.cuda.triton_attention import WIDE_FROM, TritonBackend, check_fits, takes_wide_tiles

        check_fits(heads[2], dtype, quantized_kv)

        def backend(page_size: int, wide_from: float = math.inf) -> NumberedBackend:
            return TritonBackend(heads[0], heads[1], page_size, device, wide_from=wide_from)

        wide_from = math.inf
        with current(device):
            tried = (dtype, device, heads, quantized_kv)
            has_wide = not has_rules and takes_wide_tiles(heads, dtype, quantized_kv)
            with made_ahead():
                for by_rules in {False, has_rules}:
                    _attended(backend, *tried, by_rules)
                if has_wide:
                    _attended(lambda page_size: backend(page_size, 0.0), *tried, False)
            trials = [_attended(backend, *tried, by_rules) for by_rules in {False, has_rules}]
            differences = [float((found.cpu().float() - expected).abs().max()) for found, expected in trials]
            if has_wide:
                fault = _wide_fault(lambda page_size: backend(page_size, 0.0), trials[0][0], *tried)
                if fault is None:
                    wide_from = WIDE_FROM
                else:
                    logger.warning("attention of long prefills in narrow tiles, as wide ones %s", fault)
    # Triton has errors of its own, and those of the compiler that it calls.
    except Exception as error:
        raise UnsupportedProcessorError(
            f"the Triton kernel of attention cannot be made on {device}: {one_line(error)}"
        ) from error
    wrong = [difference for difference in differences if not difference <= _TOLERANCES[dtype]]
    if wrong:
        raise UnsupportedProcessorError(
            f"the Triton kernel of attention gives values on {device} that are {wrong[0]:.3g} off"
        )
    make_linear = _own_products(dtype, device)
    capture = CudaCapture(device) if graphs and device.type == "cuda" else None
    products = "torch's products" if make_linear is None else "own products"
    identity = f"triton {triton.__version__} {_sources()} {products}"
    return GpuPasses(identity, lambda page_size: backend(page_size, wide_from), capture, make_linear)


def _sources() -> str:
    """A digest of all that this folder computes with."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def multiplies_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of `_CODE_BITS` bits can stay quantised there: rows of `dtype` are multiplied by their codes, and
    a row gets the same bits in any company. If not, a warning says why."""
    return _own_products(dtype, device, _CODE_BITS) is not None


def _own_products(dtype: torch.dtype, device: torch.device, code_bits: Sequence[int] = ()) -> MakeLinear | None:
    """Makes linear layers that give a row the same bits in any company, also, with `code_bits`, of codes of so many;
    None, with a warning, if they do not here."""
    if dtype not in _MULTIPLIED:
        return None
    try:
        from spool.engine.cuda.triton_product import TritonLinear

        with current(device):
            faults = (_product_fault(TritonLinear, dtype, device, bits) for bits in code_bits or (None,))
            fault = next(filter(None, faults), None)
    except Exception as error:  # noqa: BLE001
        fault = f"their Triton kernel cannot be made: {error}"
    if fault is not None:
        what = "quantised weights are expanded" if code_bits else "products by torch's libraries"
        logger.warning("%s, as %s", what, fault)
        return None
    return TritonLinear


@torch.inference_mode()
def _product_fault(
    make_linear: MakeLinear, dtype: torch.dtype, device: torch.device, code_bits: int | None
) -> str | None:
    """What is wrong with products of random numbers, or of such codes: values, or bits of a row in company."""
    from spool.engine.cuda.launches import made_ahead

    generator = torch.Generator().manual_seed(0)
    out_features, in_features = _TRIAL_WEIGHT
    linear = nn.Linear(in_features, out_features, dtype=dtype, device=device)
    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * in_features**-0.5)
    rows = torch.randn(max(_TRIAL_ROWS), in_features, generator=generator).to(device, dtype)
    if code_bits is None:
        own = make_linear(linear)
    else:
        weight = rounded(linear.weight, code_bits)
        own = make_linear(QuantizedLinear(weight, linear.bias))
        linear.weight.copy_(weight.expanded())
    with made_ahead():
        for count in _TRIAL_ROWS:
            own(rows[:count])
    expected = F.linear(rows.double(), linear.weight.double(), linear.bias.double())
    reference = own(rows)
    difference = float((reference.double() - expected).abs().max() / expected.abs().max())
    if not difference <= _PRODUCT_TOLERANCES[dtype]:
        return f"their Triton kernel gives values that are {difference:.3g} off"
    for count in _TRIAL_ROWS:
        # The first rows and the last ones: a row's place in a tile may be any.
        for part in (slice(count), slice(len(rows) - count, None)):
            if not torch.equal(own(rows[part]), reference[part]):
                return f"their Triton kernel gives other bits with {count} rows than with {len(rows)}"
    return None


def _wide_fault(backend: Callable[[int], AttentionBackend], narrow: torch.Tensor, *tried: *_Tried) -> str | None:
    """What is wrong with attention in wide tiles, where narrow ones give `narrow`."""
    try:
        return None if torch.equal(_attended(backend, *tried, False)[0], narrow) else "give other bits"
    except Exception as error:  # noqa: BLE001
        return f"cannot be made: {error}"


@torch.inference_mode()
def _attended(
    backend: Callable[[int], AttentionBackend],
    dtype: torch.dtype,
    device: torch.device,
    heads: tuple[int, int, int],
    quantized_kv: bool,
    by_rules: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the kernel, and as float32 products on the CPU, on the same random KV."""
    page_size = 16
    query_heads, kv_heads, head_dim = heads
    kv = PagedKv(1, _TRIAL_PAGES, page_size, kv_heads, head_dim, dtype, device, quantized_kv)
    generator = torch.Generator().manual_seed(0)
    layer = kv.layers[0]
    layer.fill(torch.randn((2, kv.pages, kv_heads, page_size, head_dim), generator=generator))
    rule = AttentionRule(head_dim**-0.5)
    if by_rules:
        rule = AttentionRule(head_dim**-0.5, _TRIAL_WINDOW, 2.0, torch.linspace(-1, 1, query_heads))
    on_device = rule if rule.sinks is None else replace(rule, sinks=rule.sinks.to(device))
    spans, rows, page = [], 0, 0
    for start, count in _TRIAL:
        pages = -(-(start + count) // page_size)
        spans.append(Span(rows, count, start, range(page, page + pages)))
        rows, page = rows + count, page + pages
    query = torch.randn(rows, query_heads, head_dim, generator=generator).to(device, dtype)
    found = backend(page_size).plan(spans, rows).attend(layer, query, on_device)
    content, queries = layer.content().cpu(), query.cpu().float()
    return found, torch.cat([_products(content, queries, span, rule) for span in spans])


def _products(content: torch.Tensor, queries: torch.Tensor, span: Span, rule: AttentionRule) -> torch.Tensor:
    """Attention of the rows of a span, `[rows, heads, head_dim]`, as its definition has it."""
    group, ends = queries.shape[1] // content.shape[2], span.start + span.rows
    query = queries[span.first_row : span.first_row + span.rows].transpose(0, 1)
    of_sequence = content[:, list(span.pages)].transpose(1, 2).flatten(2, 3)[:, :, :ends]
    keys, values = of_sequence.repeat_interleave(group, 1)
    scores = query @ keys.transpose(1, 2) * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    behind = torch.arange(span.start, ends).unsqueeze(1) - torch.arange(ends)
    hidden = behind < 0 if rule.window is None else (behind < 0) | (behind >= rule.window)
    scores = scores.masked_fill(hidden, -math.inf)
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks.view(-1, 1, 1).expand(-1, span.rows, 1)), -1)
    return (torch.softmax(scores, -1)[..., :ends] @ values).transpose(0, 1)
