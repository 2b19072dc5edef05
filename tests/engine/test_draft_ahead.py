"""Proposals for the outcomes of a verification: they are what an ordinary step proposes once the outcome has come."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.paged_step import ATTENTION_NAME
from engine.drafting.model_draft import DraftEngine
from engine.kv.pages import PageTable
from engine.models.draft_vocabulary import FILE_NAME
from engine.sampling.noise import gumbel, row_key
from engine.steps import AheadProposal, AheadRow, ProposeRow, RowOutcome
from scheduler.sampling import Grammar, SamplingParameters
from tests.engine.test_draft_engine import load
from tests.support.distribution import distribution
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
SAMPLINGS = {
    "greedy": SamplingParameters(),
    "greedy-penalties": SamplingParameters(**PENALTIES, logit_bias={5: 2.0}),
    "drawn": SamplingParameters(temperature=0.8, seed=3),
    "drawn-penalties": SamplingParameters(temperature=0.8, seed=4, **PENALTIES, bad_words=((7,),)),
    "drawn-filters": SamplingParameters(temperature=0.8, seed=5, top_k=20, top_p=0.95, min_p=0.001),
}
LENGTHS = (6, 7, 8, 9, 13, 1)
"""Of histories: with pages of 4 and proposals of 0 to 4 tokens, forks fall inside pages and on their borders."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("llama", **TORCH_SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[str, DraftEngine]:
    of_kernels = tiny_model("llama")
    of_kernels.set_attn_implementation(ATTENTION_NAME)
    return {
        "float32": load(folder),
        "bfloat16": load(folder, dtype="bfloat16"),
        "kernels": load(of_kernels.bfloat16(), page_size=16),
    }


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCABULARY), k=length)


def proposed(engine: DraftEngine, history: Sequence[int], length: int, ahead: AheadRow) -> RowOutcome:
    """By an ordinary step, of a sequence that is new to the engine."""
    table = PageTable()
    row = ProposeRow(table, history, length, history, ahead.prompt_length, ahead.sampling)
    (outcome,) = engine.step([row]).rows
    engine.pool.free(table)
    return outcome


def rows_of(engine: DraftEngine, sampling: SamplingParameters, outcomes: int = 5, length: int = 3) -> list[AheadRow]:
    """Rows with the draft's own proposals, each but the first with KV of a part of the history already. Of some, one
    proposed token is another one."""
    rows = []
    for number, count in enumerate(LENGTHS):
        history, table = prompt_of(count), PageTable()
        row = AheadRow(table, history, [], length, outcomes, history, max(1, count - 3), sampling)
        row.assumed = proposed(engine, history, number % 5, row).tokens
        if number == 4:
            row.assumed[1] = (row.assumed[1] + 1) % VOCABULARY
        known = 0 if number == 0 else count // 2
        if known:
            engine.step([ProposeRow(table, history[:known], 0, history[:known], row.prompt_length, sampling)])
        row.tokens = history[known:]
        rows.append(row)
    return rows


def history_after(row: AheadRow, outcome: AheadProposal) -> list[int]:
    return [*row.history, *row.assumed[: outcome.accepted], outcome.token]


def close(engine: DraftEngine, rows: Sequence[AheadRow]) -> None:
    """Frees the rows' tables, which must be all there are."""
    engine.pool.check_conservation([row.table for row in rows])
    for row in rows:
        engine.pool.free(row.table)
    assert engine.pool.free_pages == engine.pool.total_pages


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "kernels"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_each_outcome_has_the_proposal_of_an_ordinary_step(
    engines: dict[str, DraftEngine], kind: str, sampling: SamplingParameters
) -> None:
    engine = engines[kind]
    rows = rows_of(engine, sampling)
    outcomes = engine.prepare(rows).rows
    for row, outcome in zip(rows, outcomes, strict=True):
        assert outcome.error is None
        assert outcome.tokens == []
        assert row.table.length == len(row.history) + len(row.assumed)
        assert len(outcome.ahead) == row.outcomes
        assert len({(ahead.accepted, ahead.token) for ahead in outcome.ahead}) == row.outcomes
        for ahead in outcome.ahead:
            assert ahead.token not in row.assumed[ahead.accepted : ahead.accepted + 1]
            assert ahead.tokens == proposed(engine, history_after(row, ahead), row.draft_length, row).tokens
    # What a fork wrote is on its own pages: the sequence goes on from any outcome as if nothing had been.
    for number, row in enumerate(rows):
        accepted = number % (len(row.assumed) + 1)
        history = [*row.history, *row.assumed[:accepted], 11]
        engine.pool.truncate(row.table, len(history) - 1)
        following = ProposeRow(row.table, [11], 4, history, row.prompt_length, sampling)
        (outcome,) = engine.step([following]).rows
        assert outcome.tokens == proposed(engine, history, 4, row).tokens
    close(engine, rows)


# --- which outcomes ---------------------------------------------------------------------------------------------------


def chances(row: AheadRow, logits: Sequence[Sequence[float]], known: Sequence[int]) -> dict[tuple[int, int], float]:
    """Of every outcome; `logits` after the history and after each assumed token, of the `known` tokens."""
    found: dict[tuple[int, int], float] = {}
    reached = 1.0
    for accepted, line in enumerate(logits):
        history = [*row.history, *row.assumed[:accepted]]
        full = np.full(VOCABULARY, -np.inf)
        full[list(known)] = line
        shares = distribution(full, row.sampling, history, row.prompt_length)
        if not row.sampling.greedy:
            key = torch.tensor(row_key(row.sampling.seed, len(history)))
            shares *= gumbel(key, torch.arange(VOCABULARY)).double().exp().numpy()
            shares /= shares.sum()
        right = row.assumed[accepted] if accepted < len(row.assumed) else None
        found |= {(accepted, token): reached * share for token, share in enumerate(shares) if token != right}
        reached *= shares[right] if right is not None else 0.0
    return found


@pytest.mark.parametrize("known", [range(VOCABULARY), range(0, VOCABULARY, 3)], ids=["all", "some"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_likeliest_outcomes_are_prepared(
    folder: Path, tmp_path: Path, known: Sequence[int], sampling: SamplingParameters
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if len(known) < VOCABULARY:
        reference.save_pretrained(tmp_path)
        (tmp_path / FILE_NAME).write_text(json.dumps({"token_ids": list(known)}))
        folder = tmp_path
    engine = load(folder)
    rows = rows_of(engine, sampling, outcomes=12, length=1)
    outcomes = engine.prepare(rows).rows
    for row, outcome in zip(rows, outcomes, strict=True):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([[*row.history, *row.assumed]])).logits[0]
        lines = logits[-len(row.assumed) - 1 :, list(known)].tolist()
        expected = chances(row, lines, known)
        possible = [key for key, chance in expected.items() if chance > 0]
        best = sorted(possible, key=lambda key: (-expected[key], key))[: row.outcomes]
        assert [(ahead.accepted, ahead.token) for ahead in outcome.ahead] == best
    close(engine, rows)


# --- what there is not enough of --------------------------------------------------------------------------------------


def test_without_pages_fewer_outcomes_are_prepared(folder: Path) -> None:
    """With every number of pages: the likeliest outcomes are there, each with the first tokens of its proposal."""
    whole = load(folder)
    sampling = SAMPLINGS["drawn"]
    (full,) = whole.prepare([row_with_pages(whole, sampling)]).rows
    counts = []
    for pages in range(1, 16):
        engine = load(folder, kv_pages=pages)
        row = row_with_pages(whole, sampling)
        (outcome,) = engine.prepare([row]).rows
        if pages < 3:
            assert outcome.out_of_pages
            assert row.table.length == 0
        else:
            assert outcome.error is None
            assert row.table.length == 12
        for ahead, expected in zip(outcome.ahead, full.ahead, strict=False):
            assert (ahead.accepted, ahead.token) == (expected.accepted, expected.token)
            assert 0 < len(ahead.tokens) <= len(expected.tokens)
            assert ahead.tokens == expected.tokens[: len(ahead.tokens)]
        counts.append(sum(len(ahead.tokens) for ahead in outcome.ahead))
        close(engine, [row])
    assert counts == sorted(counts)
    assert counts[:3] == [0, 0, 0]
    assert counts[-1] == 4 * 6
    assert len(set(counts)) > 4


def row_with_pages(engine: DraftEngine, sampling: SamplingParameters) -> AheadRow:
    """Of 9 tokens and 3 assumed ones, on 3 pages of 4 positions."""
    history = prompt_of(9)
    row = AheadRow(PageTable(), history, [], 6, 4, history, 9, sampling)
    row.assumed = proposed(engine, history, 3, row).tokens
    return row


@pytest.mark.parametrize("passes", range(6))
def test_it_ends_once_another_step_waits(engines: dict[str, DraftEngine], passes: int) -> None:
    """After the first of `passes` more passes have been begun; the row's own KV is there in any case."""
    engine, begun = engines["float32"], list[int]()
    rows = rows_of(engine, SAMPLINGS["drawn"], length=4)
    outcomes = engine.prepare(rows, lambda: begun.append(1), lambda: len(begun) >= passes).rows
    assert len(begun) == min(max(passes, 1), 5)
    assert [len(ahead.tokens) for outcome in outcomes for ahead in outcome.ahead] == (
        [len(begun) - 1] * 5 * len(rows) if passes > 1 else []
    )
    assert [row.table.length for row in rows] == [len(row.history) + len(row.assumed) for row in rows]
    close(engine, rows)


def test_a_row_with_a_grammar_only_feeds(engines: dict[str, DraftEngine]) -> None:
    engine = engines["float32"]
    rows = rows_of(engine, SAMPLINGS["greedy"])
    rows[1].sampling = SamplingParameters(grammar=Grammar("start: /a*/", frozenset({2})))
    outcomes = engine.prepare(rows).rows
    assert outcomes[1] == RowOutcome([])
    assert rows[1].table.length == len(rows[1].history) + len(rows[1].assumed)
    assert [len(outcome.ahead) for outcome in outcomes] == [5, 0, 5, 5, 5, 5]
    close(engine, rows)
