"""Choice of tokens: greedy rules, the fast path against the plain one, penalties and filters against transformers."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_shaping import deficits, kept_tokens
from spool.engine.sampling.logprobs import token_logprobs
from spool.engine.sampling.noise import gumbel, row_key
from spool.engine.sampling.sampler import sample_tokens
from spool.scheduler.sampling import SamplingParameters

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def context(
    position: int = 0, history: Sequence[int] = (), prompt_length: int = 0, **settings: object
) -> SamplingContext:
    return SamplingContext(SamplingParameters(**settings), position, history, prompt_length)  # type: ignore[arg-type]


def kept(deficit: Tensor, sampling: SamplingParameters) -> list[set[int]]:
    order, mask = kept_tokens(deficit, [sampling] * deficit.shape[0])
    return [set(line[chosen].tolist()) for line, chosen in zip(order, mask, strict=True)]


def deficit_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    scores = logits.float().clone()
    return deficits(scores, scores.amax(1), [SamplingParameters(temperature=temperature)] * logits.shape[0])


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary_size", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_is_the_first_argmax(vocabulary_size: int, dtype: torch.dtype) -> None:
    # A coarse grid of values makes ties the rule.
    logits = torch.randint(-5, 6, (64, vocabulary_size), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = [line.index(max(line)) for line in logits.tolist()]
    assert sample_tokens(logits, [context()] * 64) == expected
    # The same through the path with changed scores.
    assert sample_tokens(logits, [context(logit_bias={0: 0.0})] * 64) == expected


# --- rows that are not finite -----------------------------------------------------------------------------------------

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(settings: dict[str, float], bad: float) -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(2))
    rows = [context(position=9, history=[1, 2, 3], prompt_length=1, seed=row, **settings) for row in range(4)]
    whole = sample_tokens(logits, rows)
    logits[1, 650] = bad
    logits[2] = -math.inf
    assert sample_tokens(logits, rows) == [whole[0], None, None, whole[3]]


# --- bad words --------------------------------------------------------------------------------------------------------

BAD_WORDS = ((7,), (3, 4), (1, 2, 3))


def completes_a_bad_word(output: list[int], token: int) -> bool:
    """Searched for in text, so that nothing of the code under test is repeated."""
    text = "".join(f" {each} " for each in [*output, token])
    return any(text.endswith("".join(f" {each} " for each in word)) for word in BAD_WORDS)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_bad_words_do_not_come(settings: dict[str, float]) -> None:
    """Greedy, the best token that completes none is sampled; drawn ones are those of the distribution without them."""
    generator = torch.Generator().manual_seed(4)
    prompt = [1, 2]
    for output in ([], [3], [1, 2], [2], [9, 1, 2], [3, 3]):
        logits = torch.randn(60, 9, generator=generator) * 3
        rows = [
            context(len(prompt + output), prompt + output, len(prompt), seed=row, bad_words=BAD_WORDS, **settings)
            for row in range(60)
        ]
        allowed = [token for token in range(9) if not completes_a_bad_word(output, token)]
        assert len(allowed) < 9
        without = torch.full_like(logits, -math.inf)
        without[:, allowed] = logits[:, allowed]
        plain = [context(len(prompt + output), [], 2, seed=row, **settings) for row in range(60)]
        assert sample_tokens(logits, rows) == sample_tokens(without, plain)


def test_a_bad_word_comes_where_a_grammar_leaves_nothing_else() -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, 7] = 2.0
    for settings in ({}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.5}):
        assert sample_tokens(logits, [context(bad_words=BAD_WORDS, **settings)]) == [7]


# --- the fast path ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary_size", [3, 128, 49152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("temperature", [1e-300, 0.8])
def test_discarding_tokens_early_changes_nothing(vocabulary_size: int, spread: float, temperature: float) -> None:
    count = 12 if vocabulary_size == 49152 else 300
    generator = torch.Generator().manual_seed(vocabulary_size)
    logits = (torch.randn(count, vocabulary_size, generator=generator) * spread).bfloat16()
    rows = [context(position=row * 7, seed=row, temperature=temperature) for row in range(count)]
    keys = torch.tensor([row_key(row, row * 7) for row in range(count)])
    scores = gumbel(keys[:, None], torch.arange(vocabulary_size)) - deficit_of(logits, temperature)
    assert sample_tokens(logits, rows) == scores.argmax(1).tolist()


def test_a_row_depends_on_nothing_but_itself() -> None:
    """Every kind of row, alone and in batches of several compositions, with several numbers of threads."""
    logits = (torch.randn(42, 5000, generator=torch.Generator().manual_seed(5)) * 2).bfloat16()
    history = list(range(0, 600, 3))
    rows = [
        context(position=200 + i, history=history, prompt_length=100, seed=i // 3, **KINDS[i % len(KINDS)])
        for i in range(42)
    ]
    together = sample_tokens(logits, rows)
    exclusive = [sample_tokens(logits[i : i + 1], rows[i : i + 1])[0] for i in range(42)]
    assert together == exclusive
    order = torch.randperm(42, generator=torch.Generator().manual_seed(6)).tolist()
    shuffled = sample_tokens(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert sample_tokens(logits, rows) == together
    finally:
        torch.set_num_threads(before)


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary_size", [50, 20000])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_filters_keep_what_transformers_keeps(vocabulary_size: int, spread: float) -> None:
    logits = torch.randn(20, vocabulary_size, generator=torch.Generator().manual_seed(9)) * spread
    warmed = TemperatureLogitsWarper(0.8)(None, logits)
    deficit = deficit_of(logits, 0.8)
    for k, p, m in ((5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.7, 0.02), (0, 0.99, 0.0), (700, 0.999, 0.0)):
        expected = warmed
        if k:
            expected = TopKLogitsWarper(k)(None, expected)
        if p < 1:
            expected = TopPLogitsWarper(p)(None, expected)
        if m:
            expected = MinPLogitsWarper(m)(None, expected)
        supports = [set(line.isfinite().nonzero()[:, 0].tolist()) for line in expected]
        assert kept(deficit, SamplingParameters(temperature=0.8, top_k=k, top_p=p, min_p=m)) == supports


def test_a_top_p_that_cuts_a_large_top_k_does_not_depend_on_the_company() -> None:
    line = torch.randn(1, 20000, generator=torch.Generator().manual_seed(12)) * 2.5
    sampling = SamplingParameters(temperature=1, top_k=700, top_p=0.5)
    expected = TopPLogitsWarper(0.5)(None, TopKLogitsWarper(700)(None, line)).isfinite().nonzero()[:, 1]
    assert kept(deficit_of(line), sampling) == [set(expected.tolist())]
    rows = [context(seed=seed, temperature=1, top_k=700, top_p=0.5) for seed in range(300)]
    alone = sample_tokens(line.expand(300, 20000), rows)
    company = [context(seed=seed, temperature=1, top_k=700, top_p=0.999) for seed in range(300)]
    between = [row for pair in zip(rows, company, strict=True) for row in pair]
    assert sample_tokens(line.expand(600, 20000), between)[::2] == alone


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_zeros_are_one_score(zeros: tuple[float, float], dtype: torch.dtype) -> None:
    logits = torch.full((1, 1000), -1.0, dtype=dtype)
    logits[0, 2], logits[0, 5] = zeros
    assert sample_tokens(logits, [context()]) == [2]
    assert sample_tokens(logits, [context(temperature=1, top_k=1)]) == [2]
    assert sample_tokens(logits, [context(temperature=1, top_p=1e-9)]) == [2]
    assert kept(deficit_of(logits), SamplingParameters(temperature=1, top_k=2)) == [{2, 5}]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probabilities_have_the_same_bits_alone(dtype: torch.dtype, device: str) -> None:
    logits = (torch.randn(9, 49153, generator=torch.Generator().manual_seed(14)) * 3).to(device, dtype)
    together = token_logprobs(logits, range(9), 5)
    assert together == [token_logprobs(logits[row : row + 1].clone(), [row], 5)[0] for row in range(9)]


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_of_equal_log_probabilities_the_lowest_ids_are_listed(count: int) -> None:
    """The token that is chosen greedily comes first."""
    logits = torch.randint(-3, 1, (20, 1000), generator=torch.Generator().manual_seed(13)).bfloat16()
    logits[:, ::7] *= -0.0
    greedy = sample_tokens(logits, [context()] * 20)
    for line, token, found in zip(logits.tolist(), greedy, token_logprobs(logits, greedy, count), strict=True):
        expected = [each for _, each in sorted((-score, each) for each, score in enumerate(line))][:count]
        assert [each for each, _ in found.top] == expected
        assert expected[:1] in ([], [token])


def test_filters_break_ties_by_id() -> None:
    # 10 equal tokens, then 10 equal ones less likely.
    deficit = torch.tensor([[0.0] * 10 + [1.0] * 10])
    assert kept(deficit, SamplingParameters(temperature=1, top_k=3)) == [{0, 1, 2}]
    assert kept(deficit, SamplingParameters(temperature=1, top_k=12)) == [set(range(12))]
    total = 10 + 10 * math.exp(-1)
    assert kept(deficit, SamplingParameters(temperature=1, top_p=3.5 / total)) == [{0, 1, 2, 3}]
    assert kept(deficit, SamplingParameters(temperature=1, min_p=0.9)) == [set(range(10))]
    assert kept(deficit, SamplingParameters(temperature=1, top_p=1e-9)) == [{0}]


@NEEDS_GPU
@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_gpu_chooses_what_a_cpu_chooses(settings: dict[str, float], spread: float) -> None:
    logits = (torch.randn(40, 49152, generator=torch.Generator().manual_seed(11)) * spread).bfloat16()
    logits[5, 3] = math.nan
    history = list(range(0, 600, 3))
    rows = [context(position=200 + i, history=history, prompt_length=100, seed=i, **settings) for i in range(40)]
    assert sample_tokens(logits.cuda(), rows) == sample_tokens(logits, rows)
    some = torch.arange(0, 49152, 6)
    expected = sample_tokens(logits[:, some], rows, token_ids=some)
    assert sample_tokens(logits[:, some].cuda(), rows, token_ids=some.cuda()) == expected
    keys, ids = torch.tensor([[row_key(1, 2)], [row_key(3, 4)]]), torch.arange(100_000)
    assert torch.equal(gumbel(keys.cuda(), ids.cuda()).cpu(), gumbel(keys, ids))
