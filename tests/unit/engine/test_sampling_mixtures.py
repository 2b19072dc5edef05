"""A row's tokens depend on its own parameters and logits alone: random mixtures, alone, in any company, and by
transformers' processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from spool.engine.cpu.logits_scan import KernelScan
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.logits_shaping import deficits, kept_tokens
from spool.engine.sampling.noise import gumbel, row_key
from spool.engine.sampling.sampler import sample_tokens, shaped_scores
from spool.scheduler.sampling import SamplingParameters
from tests.support.cpu_kernels import compiled_kernels
from tests.support.sampling_mixtures import POSITION, Batch, Expected, random_batch
from tests.support.triton_kernel import interpreted

Filter = Callable[[Tensor, Sequence[SamplingParameters]], tuple[Tensor, Tensor]]
BY_TORCH = LogitsScan()


def kept_prefixes(batch: Batch, places: Sequence[int], kept: Filter) -> list[list[int]]:
    """The tokens, in order, that the filters leave of some rows, which are one block."""
    rows = [batch.rows[place] for place in places]
    scores = shaped_scores(batch.logits, torch.tensor(places), rows, None)
    sampling = [row.sampling for row in rows]
    order, mask = kept(deficits(scores, scores.amax(1), sampling), sampling)
    return [line[chosen].tolist() for line, chosen in zip(order, mask, strict=True)]


def wrong_rows(batch: Batch, draw: np.random.Generator, kept: Filter, scan: LogitsScan) -> list[str]:
    """What is wrong, row by row."""
    wrong, places = [], list(range(len(batch.rows)))
    prefixes = kept_prefixes(batch, places, kept)
    together = sample_tokens(batch.logits, batch.rows, scan=scan)
    some = draw.permutation(places)[: draw.integers(1, len(places) + 1)].tolist()
    in_some = dict(zip(some, sample_tokens(batch.logits[some], [batch.rows[i] for i in some]), strict=True))
    for place, row in enumerate(batch.rows):
        line, prefix = batch.logits[place : place + 1], prefixes[place]
        expected = Expected(line[0], row)
        found = {
            "alone, other tokens are kept": kept_prefixes(batch, [place], kept) != [prefix],
            "other tokens are kept than by transformers": not expected.may_keep(len(prefix))
            or prefix != expected.order[: len(prefix)].tolist(),
            "alone, another token": sample_tokens(line, [row], scan=scan) != [together[place]],
            "in other company, another token": in_some.get(place, together[place]) != together[place],
            "another token than expected": expected.token(len(prefix)) != together[place],
        }
        wrong += [f"{batch.logits.shape}: {what}: {row.sampling}" for what, so in found.items() if so]
    return wrong


def wrong_drafts(batch: Batch, draw: np.random.Generator, scan: LogitsScan) -> list[str]:
    """A draft that has columns for some tokens only gives those of the whole vocabulary with -inf for all others."""
    has_column = torch.from_numpy(draw.random(batch.logits.shape[1]) < draw.uniform())
    has_column[int(draw.integers(batch.logits.shape[1]))] = True
    token_ids = has_column.nonzero()[:, 0]
    found = sample_tokens(batch.logits[:, token_ids].contiguous(), batch.rows, token_ids, scan)
    expected = sample_tokens(batch.logits.masked_fill(~has_column, -torch.inf), batch.rows)
    return [] if found == expected else [f"{batch.logits.shape}: drafted {found}, not {expected}: {batch.rows}"]


def wrong_mixtures(
    mixtures: int, seed: int, kept: Filter = kept_tokens, scan: LogitsScan = BY_TORCH, largest: int = 152000
) -> list[str]:
    """Of so many random rows, with vocabularies of at most `largest` tokens."""
    draw = np.random.default_rng(seed)
    wrong: list[str] = []
    while mixtures > 0:
        batch = random_batch(draw)
        if batch.logits.shape[1] > largest:
            continue
        wrong += wrong_rows(batch, draw, kept, scan)
        if draw.random() < 0.2:
            wrong += wrong_drafts(batch, draw, scan)
        mixtures -= len(batch.rows)
    return wrong


def test_a_row_is_sampled_alike_alone_in_company_and_by_transformers() -> None:
    assert wrong_mixtures(400, seed=1) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_a_cpu_sample_alike(dtype: torch.dtype) -> None:
    assert wrong_mixtures(100, seed=2, scan=KernelScan(compiled_kernels(dtype))) == []


def test_the_kernels_of_a_gpu_sample_alike() -> None:
    scan = interpreted("spool.engine.cuda.triton_sampling").TritonScan()
    assert wrong_mixtures(12, seed=3, scan=scan, largest=2100) == []


FILTERS: Sequence[dict[str, float]] = (
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.7},
    {"top_p": 0.1},
    {"min_p": 0.6},
    {"top_k": 60, "min_p": 0.4},
)


@pytest.mark.parametrize("ties", [False, True])
def test_the_kernels_of_a_gpu_keep_the_last_token_that_the_sampler_keeps_and_none_after_it(ties: bool) -> None:
    """Each row is drawn with a seed for which its last token wins, and with one for which the next one would."""
    scan = interpreted("spool.engine.cuda.triton_sampling").TritonScan()
    line = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 0.5
    line = (line * 4).round() / 4 if ties else line
    keys = torch.tensor([row_key(seed, POSITION) for seed in range(4000)])[:, None]
    rows, expected = [], list[int]()
    for filters in FILTERS:
        sampling = SamplingParameters(temperature=1.0, **filters)  # type: ignore[arg-type]
        deficit = deficits(line[None].clone(), line.amax()[None], [sampling])
        order, kept = kept_tokens(deficit, [sampling])
        last = int(kept[0].sum())
        tokens = order[0, : last + 1]
        scores = gumbel(keys, tokens) - deficit[0, tokens]
        for seed, count in ((scores[:, :last].argmax(1) == last - 1, last), (scores.argmax(1) == last, last)):
            found = int(seed.nonzero()[0, 0])
            rows.append(SamplingContext(replace(sampling, seed=found), POSITION, (), 0))
            expected.append(int(tokens[scores[found, :count].argmax()]))
    assert sample_tokens(line.expand(len(rows), -1), rows, scan=scan) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_keeps_and_samples_what_a_cpu_does() -> None:
    draw = np.random.default_rng(4)
    for _ in range(200):
        batch = random_batch(draw)
        on_gpu = Batch(batch.logits.cuda(), batch.rows)
        places = range(len(batch.rows))
        assert kept_prefixes(on_gpu, places, kept_tokens) == kept_prefixes(batch, places, kept_tokens)
        assert sample_tokens(on_gpu.logits, batch.rows) == sample_tokens(batch.logits, batch.rows)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_a_row_is_sampled_alike_in_100_000_mixtures(part: int) -> None:
    """Five minutes of one core altogether."""
    assert wrong_mixtures(5000, seed=100 + part) == []


def test_a_filter_that_depends_on_the_company_is_found() -> None:
    """Top-p takes its share of the whole vocabulary's mass where a prefix is shorter than k, and the company decides
    which prefix is looked at."""

    def planted(deficit: Tensor, rows: Sequence[SamplingParameters]) -> tuple[Tensor, Tensor]:
        size = deficit.shape[1]
        ordered, order = deficit.double().sort(dim=1, stable=True)
        weights = torch.exp(-ordered)
        before = weights.cumsum(1) - weights
        for prefix in (512, 8192, size):
            kept = torch.zeros_like(order, dtype=torch.bool)
            for line, row in enumerate(rows):
                k = row.top_k or size
                total = weights[line, :k].sum() if k <= prefix else weights[line].sum()
                within_p = (before[line] < total * row.top_p) | (row.top_p == 1)
                kept[line] = (torch.arange(size) < k) & within_p & (weights[line] >= row.min_p)
                kept[line, 0] = True
            if prefix >= size or not kept[:, prefix].any():
                break
        return order, kept

    wrong = wrong_mixtures(400, seed=1, kept=planted)
    assert any("alone, other tokens" in each for each in wrong)
    assert any("by transformers" in each for each in wrong)
