"""Proposals whose tokens are read once: they are those of a draft engine that reads every token."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.cpu.logits_scan import LogitsScan
from engine.drafting.model_draft import DraftEngine
from engine.drafting.prompt_lookup import TokenPlaces
from engine.kv.pages import PageTable
from engine.models import loading
from engine.models.draft_vocabulary import FILE_NAME
from engine.settings import EngineSettings
from engine.steps import ProposeRow, RowOutcome
from scheduler.sampling import Grammar, SamplingParameters
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted

GREEDY = SamplingParameters()
MIN_TOKENS = SamplingParameters(min_tokens=2, end_token_ids=frozenset({1}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("qwen3", **TORCH_SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def restricted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head over some tokens only."""
    folder = tmp_path_factory.mktemp("restricted")
    tiny_model("llama", **TORCH_SHAPE).save_pretrained(folder)
    (folder / FILE_NAME).write_text(json.dumps({"token_ids": list(range(0, VOCABULARY, 3))}))
    return folder


class Draft:
    """A draft engine, and sequences of its own."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        scan: LogitsScan | None = None,
        *,
        chained: bool,
        **changes: object,
    ) -> None:
        fields = {"dtype": "float32", "threads": 1, "page_size": 4, "kv_pages": 200, "max_num_batched_tokens": 64}
        settings = EngineSettings(str(folder), **fields | changes)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(
                loading,
                "DraftEngine",
                lambda *given: DraftEngine(*[*given[:3], scan or given[3], *given[4:-1], chained]),
            )
            self.engine = loading.load_draft_engine(settings, lambda *_: None)
        self.tables: list[PageTable] = []
        self.places: list[TokenPlaces] = []
        self.passes: list[int] = []

    def step(
        self, histories: Sequence[list[int]], lengths: Sequence[int], samplings: Sequence[SamplingParameters] = ()
    ) -> list[RowOutcome]:
        """Feeds what tables lack of the histories; counts the passes."""
        while len(self.tables) < len(histories):
            self.tables.append(PageTable())
            self.places.append(TokenPlaces())
        rows = [
            ProposeRow(table, history[table.length :], length, history, len(history), sampling, places)
            for table, history, length, sampling, places in zip(
                self.tables, histories, lengths, samplings or [GREEDY] * len(histories), self.places, strict=True
            )
        ]
        passes: list[None] = []
        outcome = self.engine.step(rows, lambda: passes.append(None))
        self.passes.append(len(passes))
        self.timings = outcome.timings
        self.engine.pool.check_conservation(self.tables)
        return outcome.rows

    def truncate(self, lengths: Sequence[int]) -> None:
        for table, places, length in zip(self.tables, self.places, lengths, strict=True):
            self.engine.pool.truncate(table, min(length, table.length))
            places.truncate(table.length)


def pair(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[Draft, Draft]:
    plain = Draft(folder, monkeypatch, None, chained=False, **changes)
    return plain, Draft(folder, monkeypatch, None, chained=True, **changes)


def assert_equal(plain: Draft, chained: Draft, expected: list[RowOutcome], found: list[RowOutcome]) -> None:
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in expected]
    for one, other in zip(expected, found, strict=True):
        assert other.confidences == pytest.approx(one.confidences, abs=1e-6)
        assert (other.error, other.out_of_pages) == (one.error, one.out_of_pages)
    assert [table.length for table in chained.tables] == [table.length for table in plain.tables]
    assert chained.engine.pool.free_pages == plain.engine.pool.free_pages


@pytest.mark.parametrize("changes", [{}, {"lookup_match": 2}, {"max_num_batched_tokens": 12}])
@pytest.mark.parametrize("head", ["folder", "restricted"])
def test_rounds_are_those_of_an_engine_that_reads_every_token(
    head: str, changes: dict[str, object], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random parts of proposals are accepted, of lengths that differ by row and round."""
    plain, chained = pair(request.getfixturevalue(head), monkeypatch, **changes)
    rng = random.Random(3)
    histories = [[rng.randrange(12) for _ in range(length)] for length in (1, 4, 9, 12)]
    for _ in range(12):
        lengths = [rng.randrange(6) for _ in histories]
        expected = plain.step(histories, lengths)
        assert_equal(plain, chained, expected, chained.step(histories, lengths))
        assert chained.passes[-1] == plain.passes[-1]
        assert chained.timings.batched_tokens == plain.timings.batched_tokens
        for history, outcome in zip(histories, expected, strict=True):
            accepted = rng.randint(0, len(outcome.tokens))
            history += [*outcome.tokens[:accepted], rng.randrange(12)]
        for draft in (plain, chained):
            draft.truncate([len(history) - 1 for history in histories])
    assert sum(chained.passes) > 30


@pytest.mark.parametrize("pages", range(3, 9))
def test_without_pages_rows_propose_less(pages: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, chained = pair(folder, monkeypatch, kv_pages=pages)
    histories = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [2] * 9]
    lengths = [9, 2, 5, 4]
    assert_equal(plain, chained, plain.step(histories, lengths), chained.step(histories, lengths))
    if pages == 3:
        assert chained.engine.pool.free_pages == 0


def test_logits_that_are_not_finite_are_an_error_of_their_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first, and once some tokens are chosen; the others do not notice."""
    fine = Draft(folder, monkeypatch, chained=False)
    histories = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    expected = fine.step(histories, [4, 4, 4])
    poisoned = expected[2].tokens[1]
    assert poisoned not in {token for outcome in expected[1:2] for token in outcome.tokens}
    assert poisoned not in {*histories[1], *histories[2], expected[2].tokens[0]}
    # The first row feeds it at once, the last one as the second token of its proposal.
    histories[0][1] = poisoned
    plain, chained = pair(folder, monkeypatch)
    fresh = Draft(folder, monkeypatch, chained=False)
    for draft in (plain, chained, fresh):
        with torch.no_grad():
            draft.engine._runner.model.get_input_embeddings().weight[poisoned] = torch.nan
    found = chained.step(histories, [4, 4, 4])
    assert_equal(plain, chained, plain.step(histories, [4, 4, 4]), found)
    assert found[1].tokens == expected[1].tokens
    assert [outcome.error for outcome in found] == ["the draft's logits are not finite", None, found[0].error]
    assert [len(outcome.tokens) for outcome in found] == [0, 4, 2]
    assert [table.length for table in chained.tables] == [0, 5, 0]
    # Whoever gets the pages next.
    again = [[3, 3], histories[1], [9, 9, 9, 9, 9]]
    chained.truncate([0, 1, 0])
    assert_equal(fresh, chained, fresh.step(again, [3, 3, 3]), chained.step(again, [3, 3, 3]))


@pytest.mark.parametrize(
    ("samplings", "reads"),
    [
        ([GREEDY, GREEDY], 1),
        ([GREEDY, SamplingParameters(seed=3, repetition_penalty=1.0)], 1),
        ([GREEDY, SamplingParameters(temperature=0.8, seed=3)], 8),
        ([GREEDY, SamplingParameters(repetition_penalty=1.5)], 8),
        ([GREEDY, MIN_TOKENS], 8),
        ([GREEDY, SamplingParameters(grammar=Grammar("no", frozenset({1})))], 8),
    ],
)
def test_tokens_are_read_once_where_all_rows_are_greedy(
    samplings: list[SamplingParameters], reads: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading is what a GPU's host waits for: tokens, and their probabilities."""
    plain, chained = pair(folder, monkeypatch)
    counted = 0
    read = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        nonlocal counted
        counted += 1
        return read(tensor)

    histories = [[1, 2, 3], [4, 5]]
    expected = plain.step(histories, [4, 4], samplings)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    found = chained.step(histories, [4, 4], samplings)
    monkeypatch.undo()
    assert counted == reads
    assert_equal(plain, chained, expected, found)
    assert [len(outcome.tokens) for outcome in found] == [4, 4]


@pytest.mark.parametrize("head", ["folder", "restricted"])
def test_drawn_tokens_are_read_once_where_the_scan_draws(
    head: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton's kernels, interpreted, in two rounds beside a greedy row and with proposals of different lengths."""
    scan = interpreted("engine.cuda.triton_sampling").TritonScan()
    folder = request.getfixturevalue(head)
    plain = Draft(folder, monkeypatch, chained=False)
    chained = Draft(folder, monkeypatch, scan, chained=True, max_num_batched_tokens=8)
    samplings = [SamplingParameters(temperature=0.8, seed=3), GREEDY, SamplingParameters(temperature=2.0, seed=2**63)]
    reads = 0
    read = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        nonlocal reads
        reads += 1
        return read(tensor)

    histories = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    for _ in range(2):
        expected = plain.step(histories, [4, 2, 5], samplings)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", tolist)
            found = chained.step(histories, [4, 2, 5], samplings)
        assert_equal(plain, chained, expected, found)
        histories = [[*history, *outcome.tokens, 1] for history, outcome in zip(histories, expected, strict=True)]
    assert reads == 2


def test_rows_that_only_feed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, chained = pair(folder, monkeypatch)
    assert chained.step([], []) == []
    histories = [[1, 2, 3], [4, 5]]
    assert_equal(plain, chained, plain.step(histories, [0, 0]), chained.step(histories, [0, 0]))
    assert [table.length for table in chained.tables] == [3, 2]
