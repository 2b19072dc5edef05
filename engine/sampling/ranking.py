"""How likely tokens are to be sampled, of one who knows the noise and guesses at the logits.

The likelihood of a token is its share in the softmax over the scores of which `sample_tokens` takes the largest: of
logits as they are shaped, at their temperature, plus the noise of their position. A draft's scores differ from the
target's by what the draft's logits differ, so that the tokens next to the largest are those to reckon with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.logits_shaping import deficits, filters_tokens, kept_tokens
from engine.sampling.noise import noise_bits, row_key
from engine.sampling.sampler import SamplingContext, row_blocks, shaped_scores


@dataclass(slots=True)
class RankedTokens:
    """Tokens and their shares, the largest first, and the share of the token that was asked about."""

    likeliest: list[tuple[int, float]]
    share: float


@torch.no_grad()
def ranked_tokens(
    logits: Tensor,
    rows: Sequence[SamplingContext],
    asked: Sequence[int | None],
    count: int,
    token_ids: Tensor | None = None,
) -> list[RankedTokens | None]:
    """Of each row of logits [R, V], the share of the token `asked` about, and the `count` likeliest ones but for that.

    Fewer where filters leave fewer. A token without a column has the share 0, as has None. `token_ids` as in
    `sample_tokens`, and None for the same rows. Shares may differ by rounding between devices.
    """
    found: list[RankedTokens | None] = [None] * len(rows)
    for block in _alike(logits, rows):
        contexts = [rows[i] for i in block]
        index = torch.tensor(block, device=logits.device)
        scores = shaped_scores(logits, index, contexts, token_ids)
        largest = scores.amax(1)
        weights = _weights(scores, largest, contexts, token_ids)
        total = weights.sum(1)
        columns = weights.topk(min(count + 1, weights.shape[1])).indices
        tokens = (columns if token_ids is None else token_ids[columns]).tolist()
        likeliest = (weights.gather(1, columns) / total[:, None]).tolist()
        shares = (_weights_of([asked[i] for i in block], weights, token_ids) / total).tolist()
        finite = largest.isfinite().tolist()
        for place, i in enumerate(block):
            if finite[place]:
                pairs = zip(tokens[place], likeliest[place], strict=True)
                others = [(token, share) for token, share in pairs if token != asked[i] and share > 0]
                found[i] = RankedTokens(others[:count], shares[place])
    return found


def _alike(logits: Tensor, rows: Sequence[SamplingContext]) -> Iterator[Sequence[int]]:
    """Rows in blocks, each of greedy rows, of rows whose filters exclude tokens, or of others."""
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for place, row in enumerate(rows):
        kinds[0 if row.sampling.greedy else 1 + filters_tokens(row.sampling)].append(place)
    for kind in kinds:
        yield from row_blocks(kind, logits)


def _weights(scores: Tensor, largest: Tensor, rows: Sequence[SamplingContext], token_ids: Tensor | None) -> Tensor:
    """e^score of rows alike [R, V], up to a factor for each row; 0 for excluded tokens. Overwrites `scores`, of which
    `largest` [R] has the largest of each row.

    With Gumbel noise -log(-log(1 - t)), e^score is e^-deficit / -log(1 - t).
    """
    if rows[0].sampling.greedy:
        return scores.sub_(largest[:, None]).exp_()
    sampling = [row.sampling for row in rows]
    deficit = deficits(scores, largest, sampling)
    if filters_tokens(sampling[0]):
        order, kept = kept_tokens(deficit, sampling)
        excluded = torch.ones_like(deficit, dtype=torch.bool).scatter_(1, order, ~kept)
        deficit.masked_fill_(excluded, torch.inf)
    weights = deficit.neg_().exp_()
    keys = torch.tensor([row_key(row.sampling.seed, row.position) for row in rows], device=scores.device)
    if token_ids is None:
        token_ids = torch.arange(weights.shape[1], device=weights.device)
    bits = noise_bits(keys[:, None], token_ids)
    # The upper halves of the 64 bits; where rounding makes t 1, the weight is 0 instead of next to nothing.
    t = bits.view(torch.uint32)[:, 1::2].to(torch.float32).add_(0.5).mul_(2.0**-32)
    return weights.div_(t.neg_().log1p_().neg_())


def _weights_of(tokens: Sequence[int | None], weights: Tensor, token_ids: Tensor | None) -> Tensor:
    """The weight of one token of each row [R, V]."""
    asked = torch.tensor([-1 if token is None else token for token in tokens], device=weights.device)
    last = weights.shape[1] - 1
    if token_ids is None:
        columns, known = asked.clamp(0, last), (asked >= 0) & (asked <= last)
    else:
        columns = torch.searchsorted(token_ids, asked).clamp_(max=last)
        known = token_ids[columns] == asked
    return torch.where(known, weights.gather(1, columns[:, None])[:, 0], 0.0)
