"""A common beginning is computed once, and what follows has the bits that it has without sharing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.protos import worker_pb2
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import Role, SequenceRequest
from spool.scheduler.state.digests import DigestedTokens
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import WorkerArguments, load_executor
from tests.support.in_process import Output, executor_of, requests_of, run_in_process
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


@pytest.fixture(scope="module")
def plainly(models: dict[str, EngineSettings]) -> list[tuple[list[SequenceRequest], dict[int, Output]]]:
    """Requests that begin alike, greedy and sampled, and what comes of each by itself, without the cache."""
    rng = random.Random(9)
    shared = [SYSTEM[: rng.choice((20, 40, 83))] for _ in range(16)]
    prompts = [[*front, *rng.choices(range(VOCABULARY), k=rng.randint(1, 30))] for front in shared]
    plain = StepExecutor(load_target_engine(models["target"], silent), worker_epoch=1, prefix_cache=False)
    config = SchedulerConfig(batch_size=1, max_running=1, draft_length=0)
    both = [requests_of(prompts, 24, (temperature,)) for temperature in (0.0, 0.8)]
    return [(wanted, run_in_process(config, {"target": plain}, wanted)) for wanted in both]


@pytest.mark.parametrize(("policy", "pages"), [(Policy.RAGGED, 200), *((policy, 45) for policy in Policy)])
def test_speculation_over_shared_pages_is_exact(
    models: dict[str, EngineSettings],
    plainly: list[tuple[list[SequenceRequest], dict[int, Output]]],
    policy: Policy,
    pages: int,
) -> None:
    """Drafts share as well; with few pages what is known is handed out, and sequences are preempted and come back."""
    engine = load_target_engine(replace(models["target"], kv_pages=pages), silent)
    drafting = load_draft_engine(replace(models["draft"], kv_pages=pages), silent)
    workers = {"target": executor_of(engine, drafting, worker_epoch=1)}
    config = SchedulerConfig(batch_size=4, max_running=12, policy=policy, prefill_chunk=24)
    for wanted, expected in plainly:
        outputs = run_in_process(config, workers, wanted)
        for index in expected:
            assert outputs[index].error is None
            assert outputs[index].tokens == expected[index].tokens
            assert outputs[index].logits_digests == expected[index].logits_digests
        assert sum(output.cached for output in outputs.values()) >= PAGE
        assert sum(drafted for output in outputs.values() for drafted, _ in output.rounds) > 100
    assert engine.pool.free_pages == drafting.pool.free_pages == pages
    drafting.pool.check_conservation([])


def test_setting_turns_it_off(models: dict[str, EngineSettings]) -> None:
    for share, reused in ((True, 80), (False, 0)):
        fields = {"model": models["target"].model, "threads": 1, "page_size": PAGE, "kv_pages": 40}
        arguments = WorkerArguments(Role.TARGET, fields | {"prefix_cache": share})
        executor = load_executor(arguments, silent)
        replies = [
            executor.execute(
                worker_pb2.StepRequest(
                    worker_epoch=executor.worker_epoch,
                    step_id=number,
                    rows=[row(number, SYSTEM, 0, len(SYSTEM), sample=True)],
                ),
                executor.clock(),
            )()
            for number in (1, 2)
        ]
        assert [sum(reply.rows.reused) for reply in replies] == [0, reused]
        assert replies[0].rows.tokens == replies[1].rows.tokens
