"""Passes as graphs, with a stand-in for CUDA's: it computes again what was captured, from the same tensors."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from spool.engine.attention.backends import TILE_POSITIONS, Span
from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cuda.setup import GpuPasses
from spool.engine.description import EngineDescription
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.exactness.calibration import candidate_row_counts
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models import loaded_model
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.passes.eager import forward
from spool.engine.passes.graphed import Capture, Compute
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.page_lists import PageLists
from spool.engine.passes.runner import ModelRunner
from spool.engine.passes.warm_up import capture_graphs
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.steps import ProposeRow
from spool.scheduler.sampling import SamplingParameters
from tests.support.gpu_work import Captures
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted_attention

PAGE, PAGES = 16, 12
ROW_COUNTS = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = tiny_model("llama", **TORCH_SHAPE)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def loaded(kernel: ModuleType, model: PreTrainedModel, capture: Capture) -> LoadedModel:
    config = model.config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    gpu = GpuPasses("test", lambda page_size: kernel.TritonBackend(*heads, page_size, CPU), capture)
    return LoadedModel(model, Vocabulary(b"", VOCABULARY), None, gpu)


class Sequences:
    """Sequences of known tokens on the pages of a runner."""

    def __init__(self, runner: ModelRunner, pool: PagePool) -> None:
        self._runner = runner
        self._pool = pool
        self._tables: dict[int, PageTable] = {}

    def feed(self, *steps: tuple[int, int, int]) -> torch.Tensor:
        """Logits of a pass; each step is a sequence, how many tokens it feeds, and of how many it wants logits."""
        batch = []
        for number, count, logits in steps:
            table = self._tables.setdefault(number, PageTable())
            start = table.length
            self._pool.append(table, count)
            tokens = [(7 * position + 11 * number) % VOCABULARY for position in range(start, start + count)]
            batch.append(BatchedSequence(table, tokens, logits))
        return self._runner.run(batch).logits.clone()


PASSES: list[tuple[tuple[int, int, int], ...]] = [
    ((0, 5, 1), (1, 3, 1)),
    ((0, 11, 0), (1, 1, 1), (2, 2, 2)),
    ((3, 17, 1),),
    ((2, 13, 1),),
    ((0, 1, 1), (1, 1, 1), (2, 1, 1)),
    ((0, 4, 4), (1, 1, 1), (2, 3, 3)),
]


def test_graphs_compute_what_passes_compute(kernel: ModuleType, model: PreTrainedModel) -> None:
    """On the next row count that has a graph; neither padding rows nor an earlier pass changes anything."""
    found = []
    for row_counts in ((), ROW_COUNTS, (3, 16)):
        captures, pool = Captures(), PagePool(PAGES, PAGE)
        runner = loaded(kernel, model, captures).runner(pool, ())
        assert runner.graphs is not None
        runner.graphs.capture(row_counts, PAGE * PAGES)
        sequences = Sequences(runner, pool)
        found.append([sequences.feed(*steps) for steps in PASSES])
        assert runner.graphs.row_counts == row_counts
        assert captures.captured == len(row_counts)
        # No graph holds the pass of 17 rows.
        assert captures.replays == (len(PASSES) - 1 if row_counts else 0)
    for eager, *by_graphs in zip(*found, strict=True):
        for by_graph in by_graphs:
            assert torch.allclose(
                eager, by_graph, atol=1e-5
            )  # heads of other row counts, which in float32 have other bits


def test_sequences_that_list_more_pages_than_there_are_have_a_graph(kernel: ModuleType, model: PreTrainedModel) -> None:
    captures, pool = Captures(), PagePool(PAGES, PAGE)
    runner = loaded(kernel, model, captures).runner(pool, ROW_COUNTS)
    assert runner.graphs is not None
    runner.graphs.capture((1, 2, 8), PAGE * PAGES)
    table = PageTable()
    pool.append(table, 10 * PAGE)
    tables = [copy.deepcopy(table) for _ in range(8)]
    shared = runner.run([BatchedSequence(table, [1], 1) for table in tables]).logits
    assert captures.replays == 1
    assert torch.equal(shared, shared[:1].expand_as(shared))
    # A list has no room beyond the longest sequence.
    pool.append(table, 2 * PAGE)
    runner.graphs.capture((1, 2, 8), 11 * PAGE)
    runner.run([BatchedSequence(table, [1], 1)])
    assert captures.replays == 1


def test_lists_of_pages_follow_their_sequences_by_what_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of sequences that grow, are cut, end and are taken up by others, with and without pages that a window left."""
    written: list[int] = []
    copy_ = torch.Tensor.index_copy_

    def counted(to: torch.Tensor, dim: int, places: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        written.append(len(places))
        return copy_(to, dim, places, pages)

    monkeypatch.setattr(torch.Tensor, "index_copy_", counted)
    lists, draw = PageLists(4, 40 * PAGE, PAGE, CPU), random.Random(0)
    pages = {owner: [draw.randrange(900)] for owner in range(3)}
    for _ in range(300):
        for owner in list(pages):
            move = draw.random()
            if move < 0.3:
                pages[owner] += [draw.randrange(900) for _ in range(min(draw.randrange(1, 4), 40 - len(pages[owner])))]
            elif move < 0.4:
                del pages[owner][draw.randrange(1, len(pages[owner]) + 1) :]
            elif move < 0.45:
                # Another one, which may be called as one that is gone.
                del pages[owner]
                new = draw.choice([name for name in range(9) if name not in pages])
                pages[new] = [draw.randrange(900) for _ in range(draw.randrange(1, 9))]
        spans = []
        for owner in pages:
            freed = draw.choice((0, 0, len(pages[owner]) // 2))
            rows = draw.randrange(1, PAGE)
            start = len(pages[owner]) * PAGE - rows
            spans.append(Span(0, rows, start, pages[owner][freed:], freed, owner))
        for span, first in zip(spans, lists.first_places(spans), strict=True):
            listed = lists.pages[first : first + span.freed + len(span.pages)].tolist()
            assert listed[span.freed :] == span.pages
            looked_at = listed[max(0, span.freed - TILE_POSITIONS // PAGE) : span.freed]
            assert looked_at == [span.pages[0]] * len(looked_at)
        written.clear()
        lists.first_places(spans)
        assert written == []
    # A sequence that goes on is written the page that is new.
    table = [*range(30)]
    lists.first_places([Span(0, 1, 30 * PAGE - 1, table, 0, 77)])
    written.clear()
    lists.first_places([Span(0, 1, 30 * PAGE, [*table, 5], 0, 77)])
    assert written == [1]


def test_a_draft_feeds_graphs_with_what_they_chose(kernel: ModuleType, model: PreTrainedModel) -> None:
    """Proposals of two lengths, on graphs of other row counts, are those of passes without graphs, token by token."""
    found = []
    for row_counts, chained in (((), False), ((1, 2, 8), True)):
        captures = Captures()
        runner, pool, description = capture_by(loaded(kernel, model, captures), row_counts=row_counts)
        engine = DraftEngine(description, runner, pool, LogitsScan(), chained=chained)
        histories = [[3, 1, 4, 1], [5, 9]]
        rows = [
            ProposeRow(PageTable(), history, length, history, len(history), SamplingParameters())
            for history, length in zip(histories, (4, 2), strict=True)
        ]
        before = captures.replays
        found.append(engine.step(rows).rows)
        assert captures.replays - before == (4 if chained else 0)
        pool.check_conservation([row.table for row in rows])
    expected, outcomes = found
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]


def test_a_model_that_cannot_be_captured_goes_without(
    kernel: ModuleType, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures()

    def fails_at_second(compute: Compute) -> Callable[[], None]:
        if captures.captured:
            try:
                raise torch.OutOfMemoryError("out of memory")
            finally:
                raise RuntimeError("the capture was invalidated")
        return captures(compute)

    said: list[str] = []
    runner, pool, description = capture_by(loaded(kernel, model, fails_at_second), said)
    assert "cannot be captured: the capture was invalidated, after out of memory" in caplog.text
    assert said[-1].startswith("no CUDA graphs, as this model's passes cannot be captured: ")
    assert description.graphed_row_counts == ()
    Sequences(runner, pool).feed((0, 8, 1))
    assert captures.replays == 0


def test_graphs_of_other_bits_are_not_used_in_exact_mode(
    kernel: ModuleType, model: PreTrainedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Captures()
    monkeypatch.setattr(loaded_model, "forward", lambda *given: forward(*given) * (1 + 1e-6))
    runner, pool, description = capture_by(loaded(kernel, model, captures))
    assert "other bits than the same passes without them" in caplog.text
    assert description.graphed_row_counts == ()
    before = captures.replays
    Sequences(runner, pool).feed((0, 8, 1))
    assert captures.replays == before


@pytest.mark.slow
def test_as_many_rows_as_run_by_default_have_a_graph_however_short_sequences_are(
    kernel: ModuleType, model: PreTrainedModel
) -> None:
    """256 sequences that decode, of up to as many positions as the pool here has; and 128 that verify three tokens."""
    captures = Captures()
    row_counts = candidate_row_counts(600)
    runner, pool, description = capture_by(loaded(kernel, model, captures), row_counts=row_counts, exact=False)
    assert description.graphed_row_counts[-3:] == (384, 448, 512)
    assert len(description.graphed_row_counts) == captures.captured == 19
    table = PageTable()
    pool.append(table, 4)
    for sequences, tokens in ((256, 1), (128, 4), (129, 4)):
        captures.replays = 0
        found = runner.run([BatchedSequence(table, [3, 5, 7, 9][-tokens:], 1) for _ in range(sequences)]).logits
        assert captures.replays == (sequences * tokens <= 512)
        assert torch.allclose(found, found[:1].expand_as(found), atol=1e-5)


def capture_by(
    of: LoadedModel,
    said: list[str] | None = None,
    row_counts: tuple[int, ...] = ROW_COUNTS,
    exact: bool = True,
) -> tuple[ModelRunner, PagePool, EngineDescription]:
    pool = PagePool(PAGES, PAGE)
    runner = of.runner(pool, row_counts)
    description = EngineDescription(
        model_id="tiny",
        tokenizer_digest=b"",
        vocabulary_size=VOCABULARY,
        dtype="float32",
        device="cpu",
        page_size=PAGE,
        total_pages=PAGES,
        max_sequence_length=PAGE * PAGES,
        max_num_batched_tokens=ROW_COUNTS[-1],
        exact_row_counts=row_counts if exact else (),
    )
    messages = [] if said is None else said
    description = capture_graphs(description, runner, pool, lambda message, fraction: messages.append(message))
    return runner, pool, description
