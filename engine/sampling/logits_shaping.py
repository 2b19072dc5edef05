"""What a request's parameters do to a row of logits before a token is drawn.

Repetition penalty, presence and frequency penalties, logit bias, the least of all numbers for tokens that would end a
bad word, -inf for tokens that would end the output too early, in this order, in float32; then temperature; then top-k,
top-p and min-p, each on what the one before left. The filters keep a prefix of the tokens ordered by (score descending,
id ascending), found with integer weights, so that ties and sums come out alike everywhere.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from spool.engine.ieee_math import exp_of_negative
from spool.scheduler.sampling import SamplingParameters

# Weights are whole multiples of 2^-34 of the most likely token's: 2^18 of them still add up exactly in float64.
WEIGHT_BITS = 34
# Tokens that are put in order at first, and then; only where the filters keep more is the whole vocabulary ordered.
_PREFIXES = (512, 8192)
_ARRAY_CODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}
SMALLEST_TEMPERATURE = 2.0**-126


def changes_scores(sampling: SamplingParameters, output_tokens: int, must_end: bool = False) -> bool:
    """Whether the parameters change logits before temperature, after `output_tokens` tokens of output. With `must_end`,
    the output ends now, whatever its length."""
    too_early = not must_end and not sampling.may_end(output_tokens)
    return sampling.uses_history or bool(sampling.logit_bias) or too_early


def filters_tokens(sampling: SamplingParameters) -> bool:
    """Whether the parameters exclude tokens."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


class Change(IntEnum):
    """What is done to the scores of some tokens, each of which has a number for it."""

    PENALIZE = 0
    SUBTRACT = 1
    ADD = 2
    LIMIT = 3
    REPLACE = 4


def score_changes(
    sampling: SamplingParameters,
    history: Sequence[int],
    prompt_length: int,
    output_tokens: int,
    must_end: bool = False,
) -> Iterator[tuple[Change, Mapping[int, float]]]:
    """Penalties, bias, bad words and the ban on an early end, in the order of `Change`, for the token that follows
    `output_tokens` tokens of output. Only penalties and bad words read `history`. `must_end` as in `changes_scores`."""
    if sampling.repetition_penalty != 1:
        yield Change.PENALIZE, dict.fromkeys(history, sampling.repetition_penalty)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        counts = Counter(history[prompt_length:])
        yield (
            Change.SUBTRACT,
            {token: sampling.presence_penalty + sampling.frequency_penalty * count for token, count in counts.items()},
        )
    if sampling.logit_bias:
        yield Change.ADD, sampling.logit_bias
    if sampling.bad_words:
        output_so_far = tuple(history[prompt_length:])
        last = [word[-1] for word in sampling.bad_words if _ends_with(output_so_far, word[:-1])]
        # Not -inf: a token comes even where a grammar allows bad words only.
        yield Change.LIMIT, dict.fromkeys(last, torch.finfo(torch.float32).min)
    if not must_end and not sampling.may_end(output_tokens):
        yield Change.REPLACE, dict.fromkeys(sampling.end_token_ids, -math.inf)


def change_scores(
    scores: Tensor, changes: Iterable[tuple[Change, Mapping[int, float]]], token_ids: Tensor | None = None
) -> None:
    """Applies changes in place to one row of float32 scores [V]. Tokens without a column do nothing.

    `token_ids` [V] names the tokens of the columns, ascending; without it a column's number is its token's id.
    """
    for change, number_of_token in changes:
        columns, numbers = _columns(number_of_token, scores, token_ids)
        values = scores[columns]
        match change:
            case Change.PENALIZE:
                values = torch.where(values < 0, values * numbers, values / numbers)
            case Change.SUBTRACT:
                values = values - numbers
            case Change.ADD:
                values = values + numbers
            case Change.LIMIT:
                values = torch.minimum(values, numbers)
            case Change.REPLACE:
                values = numbers
        scores[columns] = values


def _ends_with(tokens: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return not end or tokens[-len(end) :] == end


def _columns(changes: Mapping[int, float], scores: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The columns of the tokens that have one, and the number, float32, that belongs to each."""
    tokens = _on_device(list(changes), torch.int64, scores)
    numbers = _on_device(list(changes.values()), torch.float32, scores)
    if token_ids is None:
        columns, found = tokens, (tokens >= 0) & (tokens < scores.shape[0])
    else:
        columns = torch.searchsorted(token_ids, tokens).clamp_(max=scores.shape[0] - 1)
        found = token_ids[columns] == tokens
    return columns[found], numbers[found]


def deficits(scores: Tensor, largest: Tensor, rows: Sequence[SamplingParameters]) -> Tensor:
    """(largest - score) / temperature of float32 scores [R, V]: 0 at each row's best token, more elsewhere. In place.

    Minus a deficit is a log probability up to a constant. Measured from the largest score, it cannot overflow to equal
    infinities at small temperatures. `largest` is [R].
    """
    temperatures = [max(sampling.temperature, SMALLEST_TEMPERATURE) for sampling in rows]
    # Where the largest is -0, the deficit of 0 would be -0, whose bits do not order like a number's; -0 + 0 is 0.
    scores.neg_().add_(largest[:, None] + 0.0)
    # Divided by a tensor, for a division by a number is a multiplication by its reciprocal on some devices.
    return scores.div_(_on_device(temperatures, torch.float32, scores)[:, None])


def kept_tokens(deficit: Tensor, rows: Sequence[SamplingParameters]) -> tuple[Tensor, Tensor]:
    """What top-k, top-p and min-p leave of rows of deficits [R, V].

    Returns the tokens in order [R, N], int64, and a mask [R, N] of those that are kept: a non-empty prefix of each row.
    """
    vocabulary_size = deficit.shape[1]
    for size in _PREFIXES:
        if size < vocabulary_size and all(_prefix_decides(sampling, size, vocabulary_size) for sampling in rows):
            kept, order, whole = _kept_prefix(deficit, rows, size)
            if whole:
                return order, kept
    kept, order, _ = _kept_prefix(deficit, rows, vocabulary_size)
    return order, kept


def _prefix_decides(sampling: SamplingParameters, size: int, vocabulary_size: int) -> bool:
    """Whether the first `size` tokens of a row suffice to say which of them are kept.

    Top-p keeps a share of the mass that top-k leaves: of the first k tokens, or of the whole vocabulary. Other company
    may ask for another prefix, so every prefix that decides must keep the same tokens.
    """
    return sampling.top_p == 1 or sampling.top_k <= size or sampling.top_k >= vocabulary_size


def _kept_prefix(deficit: Tensor, rows: Sequence[SamplingParameters], size: int) -> tuple[Tensor, Tensor, bool]:
    """Mask and order of the first `size` tokens of each row, which decide, and whether no row keeps more than those."""
    vocabulary_size = deficit.shape[1]
    order = in_order(deficit, size)
    masses = weights(deficit.gather(1, order))
    sums = masses.cumsum(1)
    top_k = [min(sampling.top_k or vocabulary_size, vocabulary_size) for sampling in rows]
    counts = _on_device(top_k, torch.int64, deficit)[:, None]
    rank = torch.arange(size, device=deficit.device)
    within_k = rank < counts
    total = sums.gather(1, counts.clamp(max=size) - 1)
    if any(sampling.top_p < 1 and count > size for sampling, count in zip(rows, top_k, strict=True)):
        total = torch.where(counts <= size, total, weights(deficit).sum(1, keepdim=True))
    top_p = _on_device([sampling.top_p for sampling in rows], torch.float64, deficit)[:, None]
    min_p = _on_device([sampling.min_p for sampling in rows], torch.float64, deficit)[:, None]
    before = (sums - masses).to(torch.float64)
    within_p = (before < total.to(torch.float64) * top_p) | (top_p >= 1)
    likely = masses.to(torch.float64) >= min_p * 2.0**WEIGHT_BITS
    kept = within_k & within_p & likely
    # The best token stays whatever the filters say.
    kept[:, 0] = True
    # A token beyond the prefix is kept only if the last one within it is.
    goes_on = kept[:, -1] & (counts[:, 0] > size)
    return kept, order, size == vocabulary_size or not bool(goes_on.any())


def in_order(deficit: Tensor, size: int) -> Tensor:
    """Ids of the first `size` tokens of each row by (deficit, id), both ascending: [R, size]. No deficit is -0."""
    ids = torch.arange(deficit.shape[1], device=deficit.device)
    # The bits of floats >= 0 order like the floats; with the id below them no two keys are equal.
    keys = (deficit.view(torch.int32).to(torch.int64) << 32) | ids
    if size == deficit.shape[1]:
        return keys.sort(dim=1).values & 0xFFFFFFFF
    return keys.topk(size, dim=1, largest=False, sorted=True).values & 0xFFFFFFFF


def weights(deficit: Tensor) -> Tensor:
    """Probabilities relative to the row's largest, as whole multiples of 2^-34: sums do not depend on their order."""
    return (exp_of_negative(deficit) * 2.0**WEIGHT_BITS).to(torch.int64)


def _on_device(values: Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    if not values:
        return torch.empty(0, dtype=dtype, device=like.device)
    # Several times as fast as torch.tensor on the thousands of tokens of a history.
    return torch.frombuffer(array(_ARRAY_CODES[dtype], values), dtype=dtype).to(like.device)
