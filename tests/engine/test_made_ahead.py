"""A GPU's kernels are made before a worker is ready: its passes run each row count, and none of what a step computes is
made later."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import pytest
import torch

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cuda.setup import GpuPasses
from spool.engine.exactness.calibration import candidate_row_counts
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.passes.warm_up import warm_up
from tests.support.cpu_kernels import compiled_kernels
from tests.support.tiny_models import VOCABULARY, tiny_model
from tests.support.triton_kernel import interpreted, multiply_in_one_order

pytest.importorskip("triton", reason="Triton is made for Linux only")

PAGE, LONGEST, MOST_ROWS = 16, 100, 512
CPU = torch.device("cpu")


def model_on_kernels(kind: str) -> LoadedModel:
    from spool.engine.cuda.triton_attention import TritonBackend
    from spool.engine.cuda.triton_product import TritonLinear

    # GPT-NeoX has as many KV heads as query heads, of which its configurations say nothing.
    changes = {"num_key_value_heads": 4} if kind == "gpt_neox" else {}
    model = tiny_model(kind, **changes).to(torch.float16)
    model.set_attn_implementation(ATTENTION_NAME)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    gpu = GpuPasses("", lambda page: TritonBackend(*heads, page, CPU, wide_from=1.0), None, TritonLinear)
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), None, gpu)
    loaded.replace_layers()
    return loaded


def parts(kind: str) -> tuple[ModelRunner, PagePool]:
    pool = PagePool(64, PAGE)
    return model_on_kernels(kind).runner(pool, candidate_row_counts(MOST_ROWS)), pool


def made_late(kind: str) -> tuple[set[str], set[str]]:
    """The kernels of a warm-up, and those of later steps that it lacks; in a process without the interpreter."""
    from tests.support.triton_builds import asked_for

    runner, pool = parts(kind)

    def serve() -> None:
        steps = [[(rows, logits)] for rows in (1, 2, 7, 33, 64, 100) for logits in (0, 1, rows)]
        steps += [[(4, 4)] * 128, [(1, 1)] * 256, [(5, 5)] * 40 + [(90, 1)], [(100, 0)] * 4 + [(50, 1)] * 2]
        for step in steps:
            tables = [PageTable() for _ in step[:8]]
            for table in tables:
                pool.append(table, LONGEST)
            runner.run([BatchedSequence(tables[n % 8], [0] * rows, logits) for n, (rows, logits) in enumerate(step)])
            for table in tables:
                pool.free(table)

    made = asked_for(lambda: warm_up(LONGEST, runner, pool), 90)
    return made, asked_for(serve, 90) - made


BETWEEN = 6
"""Kernels between products and attention, of Llama's layers and last norm."""
DESCRIBED = (
    *("glm4", "gpt_neox", "gemma3_text", "olmo2", "cohere2", "phi", "granite", "exaone4", "nanochat"),
    "hunyuan_v1_dense",
)


@pytest.mark.parametrize(
    ("kind", "between"),
    [("llama", BETWEEN), *(pytest.param(kind, BETWEEN + 2, marks=pytest.mark.slow) for kind in DESCRIBED)],
)
def test_no_kernel_is_made_after_the_warm_up(kind: str, between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another description takes two kernels more, at most."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        made, late = process.submit(made_late, kind).result()
    names = [name.split()[0] for name in made]
    assert {*names} >= {"_attend", "_multiply"}
    assert sum(name not in ("_attend", "_multiply") for name in names) <= between
    assert late == set()


@pytest.mark.parametrize("longest", [7, LONGEST])
def test_a_warm_up_runs_all_row_counts_also_beyond_the_longest_sequence(longest: int) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), compiled_kernels(torch.float32), None)
    computed: list[tuple[int, int]] = []
    pool, head = PagePool(7, PAGE), model.get_output_embeddings()
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: computed.append((given[0].numel(), 0)))
    head.register_forward_pre_hook(lambda _, given: computed.append((computed.pop()[0], given[0].shape[-2])))
    counts = (1, 7, 30, 110, 200, 900)
    warm_up(longest, loaded.runner(pool, counts), pool)
    assert computed == [(count, min(count, 200)) for count in counts]
    assert pool.free_pages == 7


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    multiply_in_one_order(monkeypatch)
    return interpreted("spool.engine.cuda.launches")


def test_what_is_made_ahead_does_not_run(kernel: ModuleType) -> None:
    from spool.engine.cuda.triton_product import product

    inputs, weight = torch.ones(3, 64).half(), torch.ones(64, 64).half()
    expected = product(inputs, weight)
    assert torch.equal(expected, torch.full((3, 64), 64.0).half())
    with kernel.made_ahead():
        outputs: Sequence[torch.Tensor] = [product(inputs * 0, weight) for _ in range(2)]
    assert [output.shape for output in outputs] == [(3, 64)] * 2
    assert torch.equal(product(inputs, weight), expected)
