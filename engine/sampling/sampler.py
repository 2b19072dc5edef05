"""Samples tokens from logits, row by row: equal logits and context give the same token in any batch.

A greedy row takes the argmax. Otherwise the token is the argmax of log probability + Gumbel noise, which draws exactly
from the distribution; the noise depends on seed, position and token id alone, so a draft that uses it too tends to
guess what the target will sample (coupled sampling, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spool.engine.models.memory_plan import SHAPED_AT_ONCE
from spool.engine.passes.device import on_device
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_scan import RACE_MARGIN, LogitsScan
from spool.engine.sampling.logits_shaping import (
    change_scores,
    deficits,
    filters_tokens,
    kept_tokens,
)
from spool.engine.sampling.noise import gumbel, noise_bits, row_key
from spool.scheduler.sampling import SamplingParameters

# Rows are taken in blocks whose scratch fits a CPU core's cache, or into what is planned for it on a GPU.
_CPU_BLOCK_ELEMENTS = 65536
_NO_TOKEN = 2**62
_BY_TORCH = LogitsScan()


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens that may win, of several rows: flat tensors of equal length, `rows` indexing into the rows of logits."""

    rows: Tensor
    token_ids: Tensor
    deficits: Tensor


def sample_tokens(
    logits: Tensor,
    rows: Sequence[SamplingContext],
    token_ids: Tensor | None = None,
    scan: LogitsScan = _BY_TORCH,
) -> list[int | None]:
    """As `choose_tokens`, on the host; None for a row without a token."""
    return known(choose_tokens(logits, rows, token_ids, scan).tolist())


def known(tokens: Iterable[int]) -> list[int | None]:
    """None for what is negative."""
    return [None if token < 0 else token for token in tokens]


@torch.no_grad()
def choose_tokens(
    logits: Tensor,
    rows: Sequence[SamplingContext],
    token_ids: Tensor | None = None,
    scan: LogitsScan = _BY_TORCH,
) -> Tensor:
    """The next token of each row of `logits` [R, V], int64 [R], on the device of the logits; negative for a row that
    holds NaN or +inf, or nothing but -inf.

    Ties go to the lowest id. Where only some tokens have a column, `token_ids` [V] names them: int64, ascending, on the
    device of the logits. The token is then the one that the whole vocabulary would give, with -inf for every other
    token. `scan` affects speed, not results. Raises `ValueError` if shapes do not fit.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits have shape {tuple(logits.shape)}, must be [{len(rows)}, vocabulary]")
    if token_ids is not None and token_ids.shape != logits.shape[1:]:
        raise ValueError(f"token_ids have shape {tuple(token_ids.shape)}, must be [{logits.shape[1]}]")
    sampled = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if not rows:
        return sampled
    chosen_there = scan.sample(logits, rows, token_ids)
    if chosen_there is not None:
        return chosen_there
    changes = [row.changes_scores for row in rows]
    left: Sequence[int] = [i for i, row in enumerate(rows) if changes[i] or not takes_any_token(row.sampling)]
    drawn_there = None
    if len(left) < len(rows):
        drawn_there = scan.draw(logits, [row.draw for row in rows], token_ids)
    if drawn_there is None:
        left = range(len(rows))
    elif left:
        sampled = drawn_there
    else:
        return drawn_there
    as_they_are = [i for i in left if not changes[i] and rows[i].sampling.greedy]
    if len(as_they_are) == len(rows):
        columns, largest = scan.argmax(logits)
        return torch.where(largest.isfinite(), _ids(columns, token_ids), -1)
    largest = torch.zeros(len(rows), dtype=torch.float32, device=logits.device)
    changed = [i for i in left if changes[i] and rows[i].sampling.greedy]
    drawn = [i for i in left if not rows[i].sampling.greedy]
    if as_they_are:
        index = _tensor(as_they_are, logits)
        columns, largest[index] = scan.argmax(logits[index])
        sampled[index] = _ids(columns, token_ids)
    for block in row_blocks(changed, logits):
        index = _tensor(block, logits)
        columns, largest[index] = scan.argmax(shaped_scores(logits, index, [rows[i] for i in block], token_ids))
        sampled[index] = _ids(columns, token_ids)
    if drawn:
        keys = _tensor([0 if row.sampling.greedy else row_key(row.sampling.seed, row.position) for row in rows], logits)
        candidates = list(_candidates(logits, rows, drawn, keys, largest, token_ids))
        sampled[_tensor(drawn, logits)] = _winners(candidates, keys)[_tensor(drawn, logits)]
    return torch.where(largest.isfinite(), sampled, -1)


@torch.inference_mode()
def choose_alternatives(
    logits: Tensor,
    rows: Sequence[SamplingContext],
    chosen: Tensor,
    token_ids: Tensor | None = None,
    scan: LogitsScan = _BY_TORCH,
) -> Tensor:
    """What `choose_tokens` would give if there were no tokens `chosen`, which it has given. Overwrites their logits."""
    columns = chosen if token_ids is None else torch.searchsorted(token_ids, chosen)
    logits.scatter_(1, columns.clamp(0, logits.shape[1] - 1)[:, None], -torch.inf)
    return choose_tokens(logits, rows, token_ids, scan)


def takes_any_token(sampling: SamplingParameters) -> bool:
    """Whether no filter matters to the choice."""
    return sampling.greedy or not filters_tokens(sampling)


def _candidates(
    logits: Tensor,
    rows: Sequence[SamplingContext],
    drawn: Sequence[int],
    keys: Tensor,
    largest: Tensor,
    token_ids: Tensor | None,
) -> Iterator[_Candidates]:
    """The candidates of the rows `drawn`, block by block; writes the largest score of each to `largest`."""
    for filtering in (False, True):
        for block in row_blocks([i for i in drawn if filters_tokens(rows[i].sampling) == filtering], logits):
            index = _tensor(block, logits)
            scores = shaped_scores(logits, index, [rows[i] for i in block], token_ids)
            largest[index] = scores.amax(1)
            sampling = [rows[i].sampling for i in block]
            deficit = deficits(scores, largest[index], sampling)
            if filtering:
                order, kept = kept_tokens(deficit, sampling)
                row, rank = kept.nonzero(as_tuple=True)
                columns = order[row, rank]
            else:
                row, columns = _front_runners(deficit, keys[index], token_ids)
            yield _Candidates(index[row], _ids(columns, token_ids), deficit[row, columns])


def _front_runners(deficit: Tensor, keys: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and columns, flat, among which the winner of each row [R, V] is certain to be.

    Adding Gumbel noise and taking the largest is a race: token v arrives at -log(1 - t_v) * e^deficit_v and the first
    one wins. As t <= -log(1 - t) < 22.88 t for all t that occur, no token whose t_v * e^deficit_v exceeds 24 times the
    least can be first, nor come near enough for rounding to decide.
    """
    if token_ids is None:
        token_ids = torch.arange(deficit.shape[1], device=deficit.device)
    bits = noise_bits(keys[:, None], token_ids)
    # The upper halves of the 64 bits: (x + 0.5) is t, but for a factor that all tokens share.
    arrival = bits.view(torch.uint32)[:, 1::2].to(torch.float32).add_(0.5).mul_(torch.exp(deficit))
    limit = arrival.amin(1, keepdim=True) * RACE_MARGIN
    row, column = (arrival <= limit).nonzero(as_tuple=True)
    return row, column


def _winners(candidates: Sequence[_Candidates], keys: Tensor) -> Tensor:
    """For each row the candidate with the largest log probability + noise, the lowest id on ties."""
    rows = torch.cat([part.rows for part in candidates])
    token_ids = torch.cat([part.token_ids for part in candidates])
    scores = gumbel(keys[rows], token_ids) - torch.cat([part.deficits for part in candidates])
    best = torch.full(keys.shape, -torch.inf, device=keys.device).scatter_reduce(0, rows, scores, "amax")
    tied = torch.where(scores == best[rows], token_ids, _NO_TOKEN)
    return torch.full_like(keys, _NO_TOKEN).scatter_reduce(0, rows, tied, "amin")


def shaped_scores(logits: Tensor, index: Tensor, rows: Sequence[SamplingContext], token_ids: Tensor | None) -> Tensor:
    """A float32 copy of some rows of the logits, with penalties, bias and the ban on an early end applied."""
    scores = logits[index].to(torch.float32)
    for line, row in zip(scores, rows, strict=True):
        if row.changes_scores:
            change_scores(line, row.changes(), token_ids)
    return scores


def _ids(columns: Tensor, token_ids: Tensor | None) -> Tensor:
    return columns if token_ids is None else token_ids[columns]


def row_blocks(indices: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    elements = _CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else SHAPED_AT_ONCE
    size = max(1, elements // logits.shape[1])
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _tensor(values: Sequence[int], like: Tensor) -> Tensor:
    return on_device(values, like.device)
