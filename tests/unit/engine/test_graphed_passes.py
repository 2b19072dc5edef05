"""Passes as graphs, with a stand-in for CUDA's: it computes again what was captured, from the same tensors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention.paged_step import ATTENTION_NAME
from engine.cuda import setup as gpu_passes
from engine.cuda.setup import GpuPasses, load_gpu_passes
from engine.description import EngineDescription
from engine.kv.pages import PagePool, PageTable
from engine.models import loading
from engine.models.loaded_model import LoadedModel
from engine.models.vocabulary import Vocabulary
from engine.passes.graphed import Compute
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted_attention

PAGE, PAGES = 16, 12
ROW_COUNTS = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")


class Captures:
    """Counts what is captured and repeated."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.replays = 0

    def __call__(self, compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        with torch.inference_mode():
            result = compute()
        self.rows.append(len(result))

        def replay() -> None:
            self.replays += 1
            result.copy_(compute())

        return replay, result


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return interpreted_attention()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = tiny_model("llama", **TORCH_SHAPE)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def loaded(kernel: ModuleType, model: PreTrainedModel, capture: Captures) -> LoadedModel:
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
    ((2, 13, 1),),
    ((0, 1, 1), (1, 1, 1), (2, 1, 1)),
    ((0, 4, 4), (1, 1, 1), (2, 3, 3)),
]


def test_graphs_compute_what_passes_compute(kernel: ModuleType, model: PreTrainedModel) -> None:
    found = []
    for row_counts in ((), ROW_COUNTS):
        captures, pool = Captures(), PagePool(PAGES, PAGE)
        runner = loaded(kernel, model, captures).runner(pool, None, ROW_COUNTS)
        assert runner.graphs is not None
        runner.graphs.capture(row_counts)
        sequences = Sequences(runner, pool)
        found.append([sequences.feed(*steps) for steps in PASSES])
        assert captures.rows == sorted(row_counts, reverse=True)
        assert captures.replays == (len(PASSES) if row_counts else 0)
    for eager, graphed in zip(*found, strict=True):
        assert torch.allclose(eager, graphed, atol=1e-5)  # heads of other row counts, which in float32 have other bits


def test_passes_without_a_graph_that_fits_go_without(kernel: ModuleType, model: PreTrainedModel) -> None:
    captures, pool = Captures(), PagePool(PAGES, PAGE)
    runner = loaded(kernel, model, captures).runner(pool, None, ROW_COUNTS)
    assert runner.graphs is not None
    runner.graphs.capture((1, 2, 4))
    sequences = Sequences(runner, pool)
    sequences.feed((0, 6, 1))
    assert captures.replays == 0
    sequences.feed((0, 3, 1))
    assert captures.replays == 1
    # Four sequences that share the pages of a long one list more pages than there are.
    table = PageTable()
    pool.append(table, 4 * PAGE)
    many = [BatchedSequence(table, [1], 1) for _ in range(4)]
    shared = runner.run(many).logits
    assert captures.replays == 1
    assert torch.equal(shared, shared[:1].expand_as(shared))


def test_a_model_that_cannot_be_captured_goes_without(
    kernel: ModuleType, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures()

    def fails_at_second(compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        if captures.rows:
            raise RuntimeError("operation not permitted when stream is capturing")
        return captures(compute)

    runner, pool = capture_by(loaded(kernel, model, fails_at_second))  # type: ignore[arg-type]
    assert "cannot be captured: operation not permitted" in caplog.text
    Sequences(runner, pool).feed((0, 8, 1))
    assert captures.replays == 0


def test_graphs_of_other_bits_are_not_used_in_exact_mode(
    kernel: ModuleType, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    captures = Captures()

    def off(compute: Compute) -> tuple[Callable[[], None], torch.Tensor]:
        return captures(lambda: compute() * (1 + 1e-6))

    runner, pool = capture_by(loaded(kernel, model, off))  # type: ignore[arg-type]
    assert "other bits than the same passes without them" in caplog.text
    before = captures.replays
    Sequences(runner, pool).feed((0, 8, 1))
    assert captures.replays == before


def test_row_counts_in_use_are_captured(kernel: ModuleType, model: PreTrainedModel) -> None:
    captures = Captures()
    runner, pool = capture_by(loaded(kernel, model, captures))
    assert captures.rows == sorted(ROW_COUNTS, reverse=True)
    before = captures.replays
    Sequences(runner, pool).feed((0, 7, 1))
    assert captures.replays == before + 1
    assert pool.free_pages == PAGES - 1


def capture_by(loaded_model: LoadedModel) -> tuple[ModelRunner, PagePool]:
    pool = PagePool(PAGES, PAGE)
    runner = loaded_model.runner(pool, None, ROW_COUNTS)
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
        exact_row_counts=ROW_COUNTS,
    )
    loading._capture_graphs(description, runner, pool, lambda message, fraction: None)
    return runner, pool


HEADS = (4, 2, 16)


def load(caplog: pytest.LogCaptureFixture) -> GpuPasses | None:
    caplog.set_level(logging.WARNING)
    return load_gpu_passes(torch.float32, CPU, HEADS, True, lambda message, fraction: None)


def test_a_kernel_that_works_is_named(kernel: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    gpu = load(caplog)
    assert gpu is not None
    assert gpu.identity.startswith("triton 3.")
    assert not caplog.text


def test_a_kernel_of_other_values_is_not_used(
    kernel: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = kernel.TritonPlan.attend
    assert gpu_passes._TOLERANCE < 0.1
    monkeypatch.setattr(kernel.TritonPlan, "attend", lambda plan, *more: attend(plan, *more) + 0.1)
    assert load(caplog) is None
    assert "gives values that are 0.1 off" in caplog.text


def test_without_triton_there_are_products(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert load(caplog) is None
    assert "cannot be made: " in caplog.text
