"""Prompts that come again, with a real engine: what is proposed from earlier texts, to whom; the text stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spool.engine.settings import EngineSettings
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import Role, SequenceRequest
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import WorkerArguments, load_executor
from tests.engine.test_drafting_head import requests, text
from tests.support.in_process import Output, run_in_process
from tests.support.tiny_models import save_tiny_pair

DRAFTING = SchedulerConfig(policy=Policy.RAGGED, draft_length=4)
ONE, OTHER = b"1" * 32, b"2" * 32
"""Cache scopes of two keys."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_tiny_pair("llama", tmp_path_factory.mktemp("models"))


def worker(target: Path, draft: Path | None = None, **fields: object) -> StepExecutor:
    settings = replace(EngineSettings(str(target), dtype="float32", kv_pages=200, threads=1), **fields)  # type: ignore[arg-type]
    inside = None if draft is None else replace(settings, model=str(draft), lookup_match=None)
    arguments = WorkerArguments(Role.TARGET, asdict(replace(settings, inside_draft=inside)))
    return load_executor(arguments, lambda *_: None)


def run(target: StepExecutor, asked: Sequence[SequenceRequest], scope: bytes = ONE, **config: object) -> list[Output]:
    scoped = [replace(one, cache_scope=scope) for one in asked]
    return list(run_in_process(replace(DRAFTING, **config), {"target": target}, scoped).values())  # type: ignore[arg-type]


def counts(outputs: Sequence[Output]) -> tuple[int, int]:
    """Tokens drafted and accepted. The last round may end amid a proposal."""
    drafted, accepted = (sum(each[at] for one in outputs for each in one.rounds[:-1]) for at in (0, 1))
    return drafted, accepted


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompts_that_come_again_are_proposed_from_their_first_answers(
    pair: tuple[Path, Path], temperature: float, drafts: bool
) -> None:
    """To the same key, from the first token on, in as few rounds as there can be. Another key's requests get the same
    proposals, and take as many passes, as if nobody had been there."""
    asked = requests(temperature)
    plain = run(worker(pair[0]), asked, draft_length=0)
    target = worker(pair[0], pair[1] if drafts else None, lookup_match=2)
    first, again, others = run(target, asked), run(target, asked), run(target, asked, OTHER)
    alone = run(worker(pair[0], pair[1] if drafts else None, lookup_match=2), asked, OTHER)
    for outputs in (first, again, others, alone):
        assert [text(one) for one in outputs] == [text(one) for one in plain]
    drafted, accepted = counts(again)
    assert accepted == drafted > 300
    assert all(one.rounds[:3] == [(0, 0), (4, 4), (4, 4)] for one in again)
    assert all(len(one.rounds) == 11 for one in again)
    drafted, accepted = counts(first)
    assert accepted < 0.6 * drafted
    assert [one.rounds for one in others] == [one.rounds for one in alone]


def test_samples_of_one_prompt_learn_from_each_other_while_they_run(pair: tuple[Path, Path]) -> None:
    """The third starts once the first, which is short, is done; the second is not yet."""
    (one, *_) = requests(0.8)
    asked = [replace(one, sequence_id=number, max_tokens=length) for number, length in enumerate((10, 50, 50))]
    outputs = run(worker(pair[0], lookup_match=2), asked, max_running=2, batch_size=2)
    assert outputs[1].tokens == outputs[2].tokens
    assert outputs[2].rounds[:2] == [(0, 0), (4, 4)]
    assert len(outputs[2].rounds) < len(outputs[1].rounds)


def test_plain_rounds_are_remembered_too(pair: tuple[Path, Path]) -> None:
    """So `auto`, where it decodes plainly, finds the texts once it tries again."""
    target = worker(pair[0], lookup_match=2)
    run(target, requests(), draft_length=0)
    drafted, accepted = counts(run(target, requests()))
    assert accepted == drafted > 300


def test_without_memory_nothing_is_kept(pair: tuple[Path, Path]) -> None:
    target = worker(pair[0], lookup_match=2, lookup_memory=0)
    first, again = run(target, requests()), run(target, requests())
    assert [one.rounds for one in first] == [one.rounds for one in again]


def test_memory_has_limits() -> None:
    for wrong in (-1, 1000, 1 << 40):
        expected = f"lookup_memory is {wrong}, must be 0, or between 1048576 and 68719476736"
        with pytest.raises(ValueError, match=expected):
            EngineSettings("some", lookup_memory=wrong)
