"""`spool bench profile` over real processes: of workers that keep to a known law, and of a tiny pair."""

from __future__ import annotations

import asyncio
import io
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from bench.draft_ahead.laws import PACED
from bench.profiling.measured_cell import MeasuredCell
from bench.profiling.measuring import measure_pair
from bench.profiling.profile import Profile
from bench.profiling.text_prompts import TextPrompts
from bench.virtual_time.rates import Costs
from deploy.offline.cell import launched_cell
from deploy.progress import LineReporter
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch
from tests.support.command_line import save_tokenizer, spool, write_lines
from tests.support.tiny_models import save_tiny_pair

pytestmark = pytest.mark.slow

COSTS = Costs(base=0.06, row=0.002, draft_base=0.02, draft_row=0.001, kv=2e-5, draft_kv=2e-5)
"""So slow that the processes' own time hardly counts."""
AGREEMENT = 0.7


async def profile() -> Profile:
    settings = {"costs": asdict(COSTS), "agreement": AGREEMENT}
    launches = [WorkerLaunch(role, settings, threads=1, module=PACED) for role in (Role.TARGET, Role.DRAFT)]
    config = SchedulerConfig(batch_size=4, draft_length=4)
    # Their luck goes by a prompt's first token.
    prompts = TextPrompts([range(100_000 * number, 100_000 * number + 400) for number in range(8)])
    async with launched_cell(launches, LineReporter(Console(file=io.StringIO()))) as cell:
        return await measure_pair(MeasuredCell(cell), config, prompts, 400, lambda what, share: None)


def test_finds_the_costs_that_workers_keep_to() -> None:
    """A busy machine lets workers sleep longer than they are to, and never shorter."""
    found = asyncio.run(profile())
    target, draft = found.target.law, found.draft.law
    assert (target.step, target.token) == pytest.approx((0.06, 0.002), rel=0.1)
    assert (draft.step, draft.token) == pytest.approx((0.02, 0.001), rel=0.15)
    # The smallest part of a step, and so what is told least surely.
    assert (target.kv_token, draft.kv_token) == pytest.approx((2e-5, 2e-5), rel=0.5)
    assert found.acceptance == pytest.approx(AGREEMENT, abs=0.12)
    assert found.target.kv_tokens == 40_000 * 16
    assert 0 < found.wire_seconds < 0.02
    assert 0 < found.step_seconds < 0.02


def test_prints_what_a_plan_file_needs(tmp_path: Path) -> None:
    for model in save_tiny_pair("llama", tmp_path):
        save_tokenizer(model)
    write_lines(tmp_path / "prompts.jsonl", *({"prompt": f"once upon a time {index}"} for index in range(6)))
    models = ("llama-target", "--draft", "llama-draft", "--dtype", "float32", "--threads", "1")
    loads = ("--prompts", "prompts.jsonl", "--prompt-tokens", "64", "--batch-size", "2", "--draft-length", "2")
    ended = spool("bench", "profile", *models, *loads, "--set", "engine.kv_pages=256", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "profile: streams 2, prompt tokens 64, draft tokens 1" in ended.err
    assert "predicted to within" in ended.err
    found = yaml.safe_load(ended.out)
    (target,) = found["target"]["measured"]
    assert target["kv_tokens"] == 256 * 16
    assert target["step_seconds"] > 0
    assert 0 <= found["acceptance"] <= 1
    plan = {"traffic": {"requests_per_second": 1, "prompt_tokens": 20, "output_tokens": 10, "requests": 50}, **found}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    ended = spool("plan", "plan.yaml", cwd=tmp_path)
    assert "on cpu x 1: first token" in ended.err
