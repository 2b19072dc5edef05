"""The experts of sparse layers on a GPU, by Triton kernels that give a row the same bits whatever shares its call.

Pairs of a row and one of its experts are sorted by expert and cut into tiles of one expert each. All tiles are of one
size, and the sums of a pair add up block by block along the inner dimension, whatever else is in the tile. How many
tiles there can be follows from the number of rows: the host waits for nothing, and a pass can be a graph.
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import nn
from transformers import PreTrainedModel

from spool.engine.cuda.launches import launch
from spool.engine.layers.experts import Experts, replace_in_block, sparse_blocks

logger = logging.getLogger(__name__)

# Pairs of a tile: the fewest columns that matrix units take on all GPUs.
_TILE = 16
_BLOCK_OUT, _BLOCK_IN = 64, 64
# Outputs of a router and numbers of a sum that a program computes.
_ROUTED, _ADDED = 16, 512

# Of the trial: rows, those that are also computed without the others, and the largest difference, relative to the
# largest number.
_TRIAL_ROWS = 40
_TRIAL_PARTS = (slice(1), slice(17), slice(-1, None))
_TOLERANCE = 2**-5


@triton.jit(do_not_specialize=["pair_count"])
def _multiply_pairs(  # type: ignore[no-untyped-def]
    to,
    inputs,
    weights,
    bias,
    pairs,
    tile_experts,
    pair_count,
    experts,
    out_features,
    in_features,
    expert_stride,
    out_stride,
    in_stride,
    pairs_of_a_row,
    tile: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
):
    """One tile of pairs, whose inputs are those of their rows, and one block of outputs."""
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < experts:
        pair = tl.load(pairs + tl.program_id(0) * tile + tl.arange(0, tile))
        out = tl.program_id(1) * block_out + tl.arange(0, block_out)
        is_pair, is_out = (pair < pair_count)[None, :], (out < out_features)[:, None]
        input_rows = inputs + pair // pairs_of_a_row * in_features
        weight_rows = weights + expert * expert_stride + out.to(tl.int64) * out_stride
        sums = tl.zeros([block_out, tile], tl.float32)
        for step in range(tl.cdiv(in_features, block_in)):
            inner = step * block_in + tl.arange(0, block_in)
            exists = inner < in_features
            places = weight_rows[:, None] + inner[None, :].to(tl.int64) * in_stride
            weight = tl.load(places, mask=is_out & exists[None, :], other=0.0)
            block = tl.load(input_rows[None, :] + inner[:, None], mask=is_pair & exists[:, None], other=0.0)
            sums = tl.dot(weight, block, sums)
        if bias is not None:
            sums += tl.load(bias + expert * out_features + out, mask=out < out_features, other=0.0).to(tl.float32)[
                :, None
            ]
        places = to + pair[None, :] * out_features + out[:, None]
        tl.store(places, sums.to(to.dtype.element_ty), mask=is_pair & is_out)


@triton.jit
def _add_shares(to, outputs, shares, chosen, hidden, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of what the experts of one row give, in the order of their choice."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for pair in range(row * chosen, (row + 1) * chosen):
        output = tl.load(outputs + pair * hidden + place, mask=place < hidden, other=0.0)
        total += output.to(tl.float32) * tl.load(shares + pair).to(tl.float32)
    tl.store(to + row * hidden + place, total.to(to.dtype.element_ty), mask=place < hidden)


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    to, inputs, weight, bias, out_features, in_features, block_out: tl.constexpr, block_in: tl.constexpr
):
    """One row, without matrix units, which round float32."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * block_out + tl.arange(0, block_out)
    is_out = out < out_features
    sums = tl.zeros([block_out, block_in], tl.float32)
    for step in range(tl.cdiv(in_features, block_in)):
        inner = step * block_in + tl.arange(0, block_in)
        exists = inner < in_features
        places = weight + out[:, None] * in_features + inner[None, :]
        numbers = tl.load(places, mask=is_out[:, None] & exists[None, :], other=0.0).to(tl.float32)
        sums += numbers * tl.load(inputs + row * in_features + inner, mask=exists, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if bias is not None:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)
    tl.store(to + row * out_features + out, total.to(to.dtype.element_ty), mask=is_out)


class TritonExperts(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to the same; experts and their shares `[rows, top k]`. Shares and sums are in float32."""
        experts, tiles = self._experts, _tiles(chosen.flatten(), len(self._experts.down))
        inner = experts.gate(_product(rows, experts.gate_up, experts.gate_up_bias, tiles, chosen.numel()))
        outputs = _product(inner, experts.down, experts.down_bias, tiles, chosen.numel())
        to = torch.empty_like(rows)
        count, hidden = rows.shape
        grid = (count, triton.cdiv(hidden, _ADDED))
        launch(_add_shares, grid, to, outputs, shares.contiguous(), chosen.shape[1], hidden, _ADDED)
        return to


class TritonRouting(nn.Module):
    """The product of a router: of few outputs, in any dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        out, inputs = self._linear.weight.shape
        to = rows.new_empty(*rows.shape[:-1], out)
        grid = (rows.numel() // inputs, triton.cdiv(out, _ROUTED))
        launch(
            _route, grid, to, rows.contiguous(), self._linear.weight, self._linear.bias, out, inputs, _ROUTED, _BLOCK_IN
        )
        return to


def replace_experts(model: PreTrainedModel) -> None:
    """Replaces experts and their routers in place, if the first ones compute what transformers does."""
    for index, block in enumerate(sparse_blocks(model)):
        weights = Experts.of(block.experts)
        experts = TritonExperts(weights)
        fault = _fault(block.experts, experts, weights) if index == 0 else None
        if fault is not None:
            logger.warning("experts by torch's libraries, as %s", fault)
            return
        replace_in_block(block, experts, TritonRouting)


def _tiles(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of pairs, of which `chosen` says the experts: the pairs of each tile, of which those past the last are none, and
    the tiles' experts."""
    count = len(chosen)
    numbers = torch.arange(max(count, experts), device=chosen.device)
    by_expert, order = chosen.sort(stable=True)
    counts = (chosen.unsqueeze(1) == numbers[:experts]).sum(0)
    tiles = (counts + _TILE - 1) // _TILE
    ends = tiles.cumsum(0)
    # Every expert has less than one tile that is not full.
    most = min(count, count // _TILE + experts)
    first_places = (ends - tiles) * _TILE - (counts.cumsum(0) - counts)
    pairs = chosen.new_full((most * _TILE,), count)
    pairs[first_places[by_expert] + numbers[:count]] = order
    return pairs, torch.searchsorted(ends, numbers[:most], right=True)


def _product(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    tiles: tuple[torch.Tensor, torch.Tensor],
    count: int,
) -> torch.Tensor:
    """`[pairs, out]` of `count` pairs, each row of `inputs` being that of equally many."""
    experts, out_features, in_features = weights.shape
    to = inputs.new_empty(count, out_features)
    grid = (len(tiles[1]), triton.cdiv(out_features, _BLOCK_OUT))
    launch(
        _multiply_pairs,
        grid,
        to,
        inputs.contiguous(),
        weights,
        biases,
        *tiles,
        count,
        experts,
        out_features,
        in_features,
        *(weights.stride(0), weights.stride(1), weights.stride(2)),
        count // len(inputs),
        _TILE,
        _BLOCK_OUT,
        _BLOCK_IN,
    )
    return to


@torch.inference_mode()
def _fault(plain: nn.Module, own: nn.Module, experts: Experts) -> str | None:
    """What is wrong with random rows: values, or bits of a row in company."""
    generator = torch.Generator().manual_seed(0)
    like, number = experts.down, len(experts.down)
    rows = torch.randn(_TRIAL_ROWS, like.shape[1], generator=generator).to(like)
    shares, chosen = torch.rand(_TRIAL_ROWS, number, generator=generator).topk(min(number, 4))
    given = rows, chosen.to(like.device), shares.to(like)
    try:
        expected, found = plain(*given).float(), own(*given)
        difference = float((found.float() - expected).abs().max() / expected.abs().max())
        same = all(torch.equal(own(*(all_rows[part] for all_rows in given)), found[part]) for part in _TRIAL_PARTS)
    # Triton has errors of its own, and those of the compiler that it calls.
    except Exception as error:  # noqa: BLE001
        return f"their Triton kernel cannot be made: {error}"
    if not difference <= _TOLERANCE:
        return f"their Triton kernel gives values that are {difference:.3g} off"
    return None if same else "their Triton kernel gives a row other bits in company than alone"
