"""Output against `model.generate`, token for token, for every policy, batch size and draft length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import FinishReason, SequenceRequest
from spool.scheduler.sampling import SamplingParameters
from tests.support.decoding import generated
from tests.support.in_process import Output, executor_of, run_in_process
from tests.support.tiny_models import CONFIGS, TORCH_SHAPE, VOCABULARY, save_tiny_pair

PREFILL_CHUNK = 16
PROMPT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 30, 45, 70, 5, 16)
MAX_TOKENS = 20


@dataclass
class Pair:
    """A tiny pair ready to run, its prompts, and what `model.generate` makes of them without and with an end token."""

    settings: dict[str, EngineSettings]
    prompts: list[list[int]]
    plain: list[list[int]]
    stop_token: int


PAIRS = {
    f"{family}-{sizes}": (family, shape)
    for sizes, shape in (("padded", TORCH_SHAPE), ("usual", {}))
    for family in sorted(CONFIGS)
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, shape = PAIRS[request.param]
    target, draft = save_tiny_pair(family, tmp_path_factory.mktemp("tiny"), **shape)
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    plain = [generated(model, prompt, MAX_TOKENS) for prompt in prompts]
    settings = {
        role: EngineSettings(str(path), "float32", threads=1, kv_pages=400, max_num_batched_tokens=96)
        for role, path in (("target", target), ("draft", draft))
    }
    # A token that stands in the middle of many outputs ends some sequences there, in whatever run it turns up.
    counts = {token: sum(token in output[2:-2] for output in plain) for output in plain for token in output}
    stop_token = max(counts, key=lambda token: counts[token])
    assert 0 < sum(stop_token in output[:-1] for output in plain) < len(plain)
    return Pair(settings, prompts, plain, stop_token)


def running(policy: Policy, batch_size: int = 4, draft_length: int = 4) -> SchedulerConfig:
    return SchedulerConfig(
        batch_size=batch_size, max_running=10, policy=policy, draft_length=draft_length, prefill_chunk=PREFILL_CHUNK
    )


# Without the prefix cache, so that every run computes everything.
@pytest.fixture(scope="module")
def target(pair: Pair) -> TargetEngine:
    return load_target_engine(pair.settings["target"], lambda *_: None)


@pytest.fixture(scope="module")
def draft(pair: Pair) -> DraftEngine:
    return load_draft_engine(pair.settings["draft"], lambda *_: None)


def run(
    config: SchedulerConfig, target: TargetEngine, draft: DraftEngine, requests: Sequence[SequenceRequest]
) -> dict[int, Output]:
    executor = executor_of(target, draft, worker_epoch=1, prefix_cache=False)
    outputs = run_in_process(config, {"target": executor}, requests)
    assert target.pool.free_pages == draft.pool.free_pages == 400
    return outputs


@pytest.mark.sampled(17, 5)
@pytest.mark.parametrize(
    ("policy", "batch_size", "draft_length"),
    [
        *((policy, *sizes) for policy in Policy for sizes in ((4, 1), (8, 6))),
        # Alone, every policy does the same.
        (Policy.RAGGED, 1, 0),
        (Policy.RAGGED, 1, 6),
    ],
)
def test_output_is_that_of_generate(
    pair: Pair, target: TargetEngine, draft: DraftEngine, policy: Policy, batch_size: int, draft_length: int
) -> None:
    config = running(policy, batch_size=batch_size, draft_length=draft_length)
    count = len(pair.prompts)
    # The second half of the ids asks for the same prompts with a token that ends the output.
    requests = [
        SequenceRequest(
            sequence_id=index + half * count,
            prompt=tuple(prompt),
            max_tokens=MAX_TOKENS,
            stop_token_ids=frozenset([pair.stop_token] if half else []),
        )
        for half in (0, 1)
        for index, prompt in enumerate(pair.prompts)
    ]
    outputs = run(config, target, draft, requests)
    for index, plain in enumerate(pair.plain):
        assert outputs[index].tokens == plain
        assert outputs[index].reason is FinishReason.LENGTH
        ended = outputs[index + count]
        if pair.stop_token in plain:
            assert ended.tokens == plain[: plain.index(pair.stop_token) + 1]
            assert ended.reason is FinishReason.STOP
        else:
            assert ended.tokens == plain
            assert ended.reason is FinishReason.LENGTH
    if draft_length:
        accepted = [a for output in outputs.values() for drafted, a in output.rounds if drafted]
        assert sum(accepted) > 0
        assert any(a < drafted for output in outputs.values() for drafted, a in output.rounds)


@pytest.mark.parametrize("pair", ["llama-padded"], indirect=True)
def test_stop_tokens_fall_inside_accepted_runs(pair: Pair, target: TargetEngine) -> None:
    """With the target as its own draft everything is accepted, so the end comes in the middle of a run."""
    perfect = load_draft_engine(pair.settings["target"], lambda *_: None)
    requests = [
        SequenceRequest(index, tuple(prompt), MAX_TOKENS, frozenset([pair.stop_token]))
        for index, prompt in enumerate(pair.prompts)
    ]
    outputs = run(running(Policy.RAGGED, draft_length=7), target, perfect, requests)
    cut_short = 0
    for index, plain in enumerate(pair.plain):
        end = plain.index(pair.stop_token) + 1 if pair.stop_token in plain else MAX_TOKENS
        assert outputs[index].tokens == plain[:end]
        assert all(drafted == accepted for drafted, accepted in outputs[index].rounds[:-1])
        cut_short += sum(drafted + 1 for drafted, _ in outputs[index].rounds) > end
    assert cut_short > 0


@pytest.mark.parametrize("pair", ["llama-padded"], indirect=True)
def test_no_stop_token_comes_too_early(pair: Pair, target: TargetEngine, draft: DraftEngine) -> None:
    """The end is put off in the middle of a run of draft tokens as well."""
    min_tokens, ends = 11, frozenset([pair.stop_token])
    model = AutoModelForCausalLM.from_pretrained(pair.settings["target"].model, dtype=torch.float32)
    options = {"eos_token_id": pair.stop_token, "min_new_tokens": min_tokens}
    expected = [generated(model, prompt, MAX_TOKENS, **options) for prompt in pair.prompts]
    assert all(pair.stop_token not in output[:min_tokens] for output in expected)
    assert any(pair.stop_token in plain[:min_tokens] for plain in pair.plain)
    sampling = SamplingParameters(min_tokens=min_tokens, end_token_ids=ends)
    requests = [
        SequenceRequest(index, tuple(prompt), MAX_TOKENS, ends, sampling) for index, prompt in enumerate(pair.prompts)
    ]
    outputs = run(running(Policy.RAGGED), target, draft, requests)
    assert [outputs[index].tokens for index in range(len(requests))] == expected
