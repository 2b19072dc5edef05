"""Passes as graphs, with a stand-in for CUDA's: it computes again what was captured, from the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention.paged_step import ATTENTION_NAME
from engine.cuda.setup import GpuPasses
from engine.description import EngineDescription
from engine.drafting.model_draft import DraftEngine
from engine.kv.pages import PagePool, PageTable
from engine.models.loaded_model import LoadedModel
from engine.models.vocabulary import Vocabulary
from engine.passes import graphed
from engine.passes.eager import forward
from engine.passes.graphed import Capture, Compute
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner
from engine.passes.warm_up import capture_graphs
from engine.sampling.logits_scan import LogitsScan
from engine.steps import ProposeRow
from scheduler.sampling import SamplingParameters
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted_attention

PAGE, PAGES = 16, 12
ROW_COUNTS = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")


class Captures:
    """Counts what is captured and repeated."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    def __call__(self, compute: Compute) -> Callable[[], None]:
        compute()
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            compute()

        return replay


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
        runner = loaded(kernel, model, captures).runner(pool, None, ())
        assert runner.graphs is not None
        runner.graphs.capture(row_counts)
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


def test_a_pass_of_more_pages_than_a_graph_holds_goes_without(
    kernel: ModuleType, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_numbers = kernel.TritonBackend.max_numbers
    monkeypatch.setattr(kernel.TritonBackend, "max_numbers", lambda *given: min(max_numbers(*given), 3 * PAGES))
    captures, pool = Captures(), PagePool(PAGES, PAGE)
    runner = loaded(kernel, model, captures).runner(pool, None, ROW_COUNTS)
    assert runner.graphs is not None
    runner.graphs.capture((1, 2, 4))
    Sequences(runner, pool).feed((0, 3, 1))
    assert captures.replays == 1
    # Sequences that share pages can list more of them than there are.
    table = PageTable()
    pool.append(table, 10 * PAGE)
    many = [BatchedSequence(table, [1], 1) for _ in range(4)]
    shared = runner.run(many).logits
    assert captures.replays == 1
    assert torch.equal(shared, shared[:1].expand_as(shared))


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
    monkeypatch.setattr(graphed, "forward", lambda *given: forward(*given) * (1 + 1e-6))
    runner, pool, description = capture_by(loaded(kernel, model, captures))
    assert "other bits than the same passes without them" in caplog.text
    assert description.graphed_row_counts == ()
    before = captures.replays
    Sequences(runner, pool).feed((0, 8, 1))
    assert captures.replays == before


def capture_by(
    loaded_model: LoadedModel, said: list[str] | None = None, row_counts: tuple[int, ...] = ROW_COUNTS
) -> tuple[ModelRunner, PagePool, EngineDescription]:
    pool = PagePool(PAGES, PAGE)
    runner = loaded_model.runner(pool, None, row_counts)
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
        exact_row_counts=row_counts,
    )
    messages = [] if said is None else said
    description = capture_graphs(description, runner, pool, lambda message, fraction: messages.append(message))
    return runner, pool, description
