"""Drafts inside the target's process: what they propose, that the text stays, and that they give their pages back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spool.engine.drafting.inside_target import InsideDrafting
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.drafting.model_drafting import Draft, ModelDrafting
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.engine.steps import Computing, Interrupted, ProposeRow, StepOutcome
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import Role
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import WorkerArguments, load_executor
from tests.engine.test_drafting_head import Follower, requests, step_together, text
from tests.support.decoding import generated
from tests.support.in_process import executor_of, run_in_process
from tests.support.tiny_models import VOCABULARY, save_tiny_pair, tiny_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and as its draft a model that rarely agrees."""
    folder = tmp_path_factory.mktemp("models")
    target, _ = save_tiny_pair("llama", folder)
    tiny_model("llama", seed=1).save_pretrained(folder / "draft")
    return target, folder / "draft"


def settings(model: Path | str, **fields: object) -> EngineSettings:
    return replace(EngineSettings(str(model), dtype="float32", kv_pages=200, threads=1), **fields)  # type: ignore[arg-type]


def worker(target: Path, draft: Path | None = None, **fields: object) -> StepExecutor:
    inside = None if draft is None else settings(draft)
    arguments = WorkerArguments(Role.TARGET, asdict(settings(target, inside_draft=inside, **fields)))
    return load_executor(arguments, lambda *_: None)


@pytest.mark.parametrize("kind", ["same", "other", "lookup", "lookup, then other"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_and_bits_of_logits_are_those_without_a_draft(
    pair: tuple[Path, Path], kind: str, temperature: float
) -> None:
    draft = pair[0] if kind == "same" else pair[1] if "other" in kind else None
    asked = [replace(one, sampling=replace(one.sampling, temperature=temperature)) for one in requests()]
    expected = run_in_process(SchedulerConfig(draft_length=0), {"target": worker(pair[0])}, asked)
    drafting = worker(pair[0], draft, lookup_match=2 if "lookup" in kind else None)
    assert drafting.describe().own_draft_id == ("ngram" if draft is None else str(draft))
    for policy in (Policy.EXSPEC, Policy.AUTO):
        got = run_in_process(SchedulerConfig(policy=policy, batch_size=4), {"target": drafting}, asked)
        assert [text(one) for one in got.values()] == [text(one) for one in expected.values()]
        # The last round may end amid a proposal.
        drafted, accepted = (sum(count[at] for one in got.values() for count in one.rounds[:-1]) for at in (0, 1))
        assert drafted > 0
        # Lookup finds the texts of the first policy under the second.
        right = kind == "same" or ("lookup" in kind and policy is Policy.AUTO)
        assert accepted == drafted if right else accepted < drafted


def test_proposals_are_the_drafts_own_once_it_has_caught_up(pair: tuple[Path, Path]) -> None:
    """It takes 48 tokens a step and looks away now and then; the last follower's KV came from elsewhere."""
    rng, reference = random.Random(1), tiny_model("llama", seed=1)
    engine = load_target_engine(settings(pair[0]), lambda *_: None)
    draft = load_draft_engine(settings(pair[1], max_num_batched_tokens=48), lambda *_: None)
    inside, target = InsideDrafting(ModelDrafting(draft, prefix_cache=True)), tiny_model("llama")
    prompts = [rng.choices(range(VOCABULARY), k=length) for length in (5, 16, 17, 40, 170)]
    followers = [Follower(engine, prompt, proposer=inside) for prompt in prompts]
    source = Follower(load_target_engine(settings(pair[0]), lambda *_: None), followers[-1].known)
    source.step()
    engine.pool.append(followers[-1].table, 170)
    engine.kv_store.write_pages(followers[-1].table.pages, source.engine.kv_store.read_pages(source.table.pages))
    followers[-1].known = source.known
    for follower in followers[:-1]:
        while follower.table.length + 7 < len(follower.known):
            assert not follower.step(chunk=7)
    compared = late = 0
    for number in range(16):
        length, rows = 0 if number in (7, 8) else 4, []
        for follower in followers:
            drafts = [*generated(target, follower.known, 2)[: rng.randrange(3)], *rng.choices(range(96), k=1)]
            rows.append(follower.row(drafts, length))
        for follower, proposal in zip(followers, step_together(followers, rows), strict=True):
            if proposal or number >= 8:
                assert list(proposal) == (generated(reference, follower.known, length) if length else [])
                compared += 1
            else:
                late += follower is followers[-1]
    assert compared > 60
    assert 3 <= late < 8
    free = draft.pool.free_pages
    for follower in followers:
        inside.forget(follower.drafting)
    draft.pool.check_conservation([])
    assert free < draft.pool.free_pages == 200


class Failing:
    """Raises in its tenth step."""

    device_lost = False
    steps = 0

    def __init__(self, draft: DraftEngine) -> None:
        self.draft, self.description, self.pool = draft, draft.description, draft.pool

    def step(self, rows: Sequence[ProposeRow], computing: Computing, interrupted: Interrupted | None) -> StepOutcome:
        self.steps += 1
        if self.steps == 10:
            raise RuntimeError("no")
        return self.draft.step(rows, computing, interrupted)


def test_a_draft_that_fails_or_has_no_pages_changes_no_text(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    asked = requests()
    expected = run_in_process(SchedulerConfig(draft_length=0), {"target": worker(pair[0])}, asked)
    engine = load_target_engine(settings(pair[0]), lambda *_: None)
    few, many = (load_draft_engine(settings(pair[0], kv_pages=pages), lambda *_: None) for pages in (12, 200))
    drafts: list[Draft] = [Failing(many), few]
    for draft in drafts:
        pages = draft.pool.free_pages
        config = SchedulerConfig(policy=Policy.RAGGED)
        got = run_in_process(config, {"target": executor_of(engine, draft)}, asked)
        assert [text(one) for one in got.values()] == [text(one) for one in expected.values()]
        assert sum(drafted for one in got.values() for drafted, _ in one.rounds) > 0
        draft.pool.check_conservation([])
        assert draft.pool.free_pages == pages
    assert caplog.text.count("the draft failed; these sequences go on without") == 1


def test_a_draft_of_another_vocabulary_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=90).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit target worker target: vocabulary sizes 90 and 96"):
        worker(pair[0], tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, must be 1 with demo, which drafts inside"):
        settings(pair[0], inside_draft=EngineSettings("demo"), tensor_parallel_size=2)
