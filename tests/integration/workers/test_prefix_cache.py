"""A common beginning is computed once: real engines bit for bit, and whole cells over gRPC."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.models.loading import load_draft_engine, load_target_engine
from engine.settings import EngineSettings
from protos import worker_pb2
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role, SequenceRequest
from scheduler.sampling import SamplingParameters
from scheduler.state.digests import DigestedTokens
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from services.worker.process import WorkerArguments, load_executor
from tests.support.in_process import Output, run_in_process
from tests.support.tiny_models import VOCABULARY, save_tiny_pair

pytestmark = pytest.mark.slow

PAGE = 16
SYSTEM = random.Random(2).choices(range(VOCABULARY), k=83)
"""Five pages and three tokens."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineSettings]:
    target, draft = save_tiny_pair("llama", tmp_path_factory.mktemp("models"))
    settings = EngineSettings(str(target), threads=1, page_size=PAGE, kv_pages=200, max_num_batched_tokens=96)
    return {"target": settings, "draft": replace(settings, model=str(draft))}


def silent(*_: object) -> None:
    pass


def row(sequence_id: int, known: Sequence[int], kv_len: int, end: int, **fields: object) -> worker_pb2.Row:
    parameters = worker_pb2.SequenceParameters(
        prompt_length=len(known), logits_digests=True, committed_tokens=known if not kv_len else ()
    )
    digest = DigestedTokens(known).digest(kv_len)
    return worker_pb2.Row(
        sequence_id=sequence_id,
        kv_len=kv_len,
        prefix_digest=digest,
        tokens=known[kv_len:end],
        parameters=parameters,
        **fields,  # type: ignore[arg-type]
    )


class Worker:
    """One target worker, asked step by step."""

    def __init__(self, settings: EngineSettings) -> None:
        engine = load_target_engine(settings, silent)
        self.executor = TargetStepExecutor(engine, worker_epoch=1, prefix_cache=settings.prefix_cache)
        self._steps = 0

    def step(self, *rows: worker_pb2.Row, released: Sequence[int] = ()) -> worker_pb2.StepReply:
        self._steps += 1
        request = worker_pb2.StepRequest(
            worker_epoch=1, scheduler_epoch=1, step_id=self._steps, rows=rows, released_sequence_ids=released
        )
        reply = self.executor.execute(request, self.executor.clock())
        self.executor.check_integrity()
        assert {each.status for each in reply.rows} <= {worker_pb2.ROW_STATUS_OK}, reply
        return reply

    def generate(self, sequence_id: int, prompt: Sequence[int], count: int) -> tuple[list[int], list[int]]:
        """Tokens and digests of their logits, after the prompt in one row."""
        known, kv_len, digests = list(prompt), 0, []
        while len(known) < len(prompt) + count:
            (reply,) = self.step(row(sequence_id, known, kv_len, len(known), sample=True)).rows
            kv_len = reply.kv_len
            known += reply.tokens
            digests += reply.logits_digests
        return known[len(prompt) :], digests


def test_logits_after_a_shared_beginning_have_the_same_bits(models: dict[str, EngineSettings]) -> None:
    """bfloat16, exact mode: four prompts that share ten pages, in other pieces and company than without the cache."""
    rng = random.Random(5)
    prompts = [[*SYSTEM, *rng.choices(range(VOCABULARY), k=length)] for length in (1, 5, 9, 13)]
    exclusive = Worker(replace(models["target"], prefix_cache=False))
    expected = [exclusive.generate(number, prompt, 12) for number, prompt in enumerate(prompts)]
    worker = Worker(models["target"])
    first = worker.step(row(0, prompts[0], 0, 50))
    assert first.timings.packed_rows == 50
    # The second takes over the six pages that are there and feeds the rest; the first then finds the others.
    second = worker.step(row(1, prompts[1], 0, len(prompts[1]), sample=True))
    assert (second.timings.packed_rows, second.rows[0].reused) == (len(prompts[1]) - 48, 48)
    assert (list(second.rows[0].tokens), list(second.rows[0].logits_digests)) == tuple(part[:1] for part in expected[1])
    reply = worker.step(row(0, prompts[0], 50, 60)).rows[0]
    assert (reply.kv_len, reply.reused) == (60, 0)
    (reply,) = worker.step(row(0, prompts[0], 60, len(prompts[0]), sample=True)).rows
    assert list(reply.logits_digests) == expected[0][1][:1]
    both = worker.step(*(row(n, prompts[n], 0, len(prompts[n]), sample=True) for n in (2, 3)), released=[0, 1])
    assert [each.reused for each in both.rows] == [80, 80]
    assert both.timings.packed_rows == 12 + 16
    for number in (2, 3):
        assert list(both.rows[number - 2].logits_digests) == expected[number][1][:1]
        worker.step(released=[number])
        assert worker.generate(number, prompts[number], 12) == expected[number]


def requests(prompts: Sequence[Sequence[int]], temperature: float) -> list[SequenceRequest]:
    return [
        SequenceRequest(
            index,
            tuple(prompt),
            24,
            sampling=SamplingParameters(temperature=temperature, seed=index),
            logits_digests=True,
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def plainly(models: dict[str, EngineSettings]) -> list[tuple[list[SequenceRequest], dict[int, Output]]]:
    """Requests that begin alike, greedy and sampled, and what comes of each by itself, without the cache."""
    rng = random.Random(9)
    shared = [SYSTEM[: rng.choice((20, 40, 83))] for _ in range(16)]
    prompts = [[*front, *rng.choices(range(VOCABULARY), k=rng.randint(1, 30))] for front in shared]
    plain = TargetStepExecutor(load_target_engine(models["target"], silent), worker_epoch=1, prefix_cache=False)
    config = SchedulerConfig(batch_size=1, max_running=1, draft_length=0)
    both = [requests(prompts, temperature) for temperature in (0.0, 0.8)]
    return [(wanted, run_in_process(config, {"target": plain}, wanted)) for wanted in both]


@pytest.mark.parametrize("pages", [200, 45])
@pytest.mark.parametrize("policy", list(Policy))
def test_speculation_over_shared_pages_is_exact(
    models: dict[str, EngineSettings],
    plainly: list[tuple[list[SequenceRequest], dict[int, Output]]],
    policy: Policy,
    pages: int,
) -> None:
    """Drafts share as well; with few pages what is known is handed out, and sequences are preempted and come back."""
    target = TargetStepExecutor(load_target_engine(replace(models["target"], kv_pages=pages), silent), worker_epoch=1)
    draft = DraftStepExecutor(load_draft_engine(replace(models["draft"], kv_pages=pages), silent), worker_epoch=1)
    config = SchedulerConfig(batch_size=4, max_running=12, policy=policy, prefill_chunk=24)
    for wanted, expected in plainly:
        outputs = run_in_process(config, {"target": target, "draft": draft}, wanted)
        for index in expected:
            assert outputs[index].error is None
            assert outputs[index].tokens == expected[index].tokens
            assert outputs[index].logits_digests == expected[index].logits_digests
    assert target.free_pages == draft.free_pages == pages


def test_setting_turns_it_off(models: dict[str, EngineSettings]) -> None:
    for share, reused in ((True, 80), (False, 0)):
        fields = {"model": models["draft"].model, "threads": 1, "page_size": PAGE, "kv_pages": 40}
        arguments = WorkerArguments(Role.DRAFT, fields | {"prefix_cache": share})
        executor = load_executor(arguments, silent)
        replies = [
            executor.execute(
                worker_pb2.StepRequest(
                    worker_epoch=executor.worker_epoch,
                    step_id=number,
                    rows=[row(number, SYSTEM, 0, len(SYSTEM), draft_length=2)],
                ),
                executor.clock(),
            )
            for number in (1, 2)
        ]
        assert [reply.rows[0].reused for reply in replies] == [0, reused]
        assert replies[0].rows[0].tokens == replies[1].rows[0].tokens
