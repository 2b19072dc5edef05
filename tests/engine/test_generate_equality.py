"""Output against `model.generate`, token for token, for every policy, batch size and draft length."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cpu import build
from engine.drafting.ngram_engine import NgramEngine
from engine.models.loading import load_draft_engine, load_target_engine
from engine.settings import EngineSettings
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import FinishReason, SequenceRequest
from scheduler.sampling import SamplingParameters
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from tests.support.cpu_kernels import compiled_kernels
from tests.support.in_process import run_in_process
from tests.support.tiny_models import CONFIGS, TORCH_SHAPE, VOCABULARY, WIDE_SHAPE, save_tiny_pair

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


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = tmp_path_factory.mktemp("tiny")
    target, draft = save_tiny_pair(request.param, folder, **TORCH_SHAPE)
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    plain = [generated(model, prompt, None) for prompt in prompts]
    settings = {
        role: EngineSettings(str(path), "float32", threads=1, page_size=8, kv_pages=400, max_num_batched_tokens=96)
        for role, path in (("target", target), ("draft", draft))
    }
    # A token that stands in the middle of many outputs ends some sequences there, in whatever run it turns up.
    counts = {token: sum(token in output[2:-2] for output in plain) for output in plain for token in output}
    return Pair(settings, prompts, plain, max(counts, key=lambda token: counts[token]))


def generated(
    model: torch.nn.Module, prompt: list[int], stop_token: int | None, min_tokens: int | None = None
) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=min_tokens,
            do_sample=False,
            eos_token_id=stop_token,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


# Without the prefix cache (test_prefix_cache.py), so that every run computes everything.
@pytest.fixture(scope="module")
def target(pair: Pair) -> TargetStepExecutor:
    engine = load_target_engine(pair.settings["target"], lambda *_: None)
    return TargetStepExecutor(engine, worker_epoch=1, prefix_cache=False)


@pytest.fixture(scope="module")
def draft(pair: Pair) -> DraftStepExecutor:
    engine = load_draft_engine(pair.settings["draft"], lambda *_: None)
    return DraftStepExecutor(engine, worker_epoch=1, prefix_cache=False)


def test_stop_token_ends_some_sequences_early(pair: Pair) -> None:
    ended = [pair.stop_token in output[:-1] for output in pair.plain]
    assert any(ended)
    assert not all(ended)


@pytest.mark.sampled(5, 2)
@pytest.mark.parametrize(
    ("policy", "batch_size", "draft_length"),
    [
        # Alone and without drafts, every policy does the same.
        (Policy.RAGGED, 1, 0),
        *((policy, *rest) for policy in Policy for rest in ((1, 6), (4, 1), (8, 0), (8, 6))),
    ],
)
def test_output_is_that_of_generate(
    pair: Pair,
    target: TargetStepExecutor,
    draft: DraftStepExecutor,
    policy: Policy,
    batch_size: int,
    draft_length: int,
) -> None:
    config = SchedulerConfig(
        batch_size=batch_size, max_running=10, policy=policy, draft_length=draft_length, prefill_chunk=PREFILL_CHUNK
    )
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
    outputs = run_in_process(config, {"target": target, "draft": draft}, requests)
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
    assert target.free_pages == 400
    assert draft.free_pages == 400


def test_stop_tokens_fall_inside_accepted_runs(pair: Pair, target: TargetStepExecutor) -> None:
    """With the target as its own draft everything is accepted, so the end comes in the middle of a run."""
    perfect = DraftStepExecutor(load_draft_engine(pair.settings["target"], lambda *_: None), worker_epoch=1)
    requests = [
        SequenceRequest(index, tuple(prompt), MAX_TOKENS, frozenset([pair.stop_token]))
        for index, prompt in enumerate(pair.prompts)
    ]
    config = SchedulerConfig(batch_size=4, max_running=10, draft_length=7, prefill_chunk=PREFILL_CHUNK)
    outputs = run_in_process(config, {"target": target, "draft": perfect}, requests)
    cut_short = 0
    for index, plain in enumerate(pair.plain):
        end = plain.index(pair.stop_token) + 1 if pair.stop_token in plain else MAX_TOKENS
        assert outputs[index].tokens == plain[:end]
        assert all(drafted == accepted for drafted, accepted in outputs[index].rounds[:-1])
        cut_short += sum(drafted + 1 for drafted, _ in outputs[index].rounds) > end
    assert cut_short > 0


@pytest.mark.parametrize("policy", list(Policy))
def test_no_stop_token_comes_too_early(
    pair: Pair, target: TargetStepExecutor, draft: DraftStepExecutor, policy: Policy
) -> None:
    """The end is put off in the middle of a run of draft tokens as well."""
    min_tokens, ends = 11, frozenset([pair.stop_token])
    model = AutoModelForCausalLM.from_pretrained(pair.settings["target"].model, dtype=torch.float32)
    expected = [generated(model, prompt, pair.stop_token, min_tokens) for prompt in pair.prompts]
    assert all(pair.stop_token not in output[:min_tokens] for output in expected)
    assert any(pair.stop_token in plain[:min_tokens] for plain in pair.plain)
    sampling = SamplingParameters(min_tokens=min_tokens, end_token_ids=ends)
    requests = [
        SequenceRequest(index, tuple(prompt), MAX_TOKENS, ends, sampling) for index, prompt in enumerate(pair.prompts)
    ]
    config = SchedulerConfig(batch_size=4, max_running=10, policy=policy, prefill_chunk=PREFILL_CHUNK)
    outputs = run_in_process(config, {"target": target, "draft": draft}, requests)
    assert [outputs[index].tokens for index in range(len(requests))] == expected


@pytest.mark.parametrize("policy", list(Policy))
def test_prompt_lookup_changes_nothing(pair: Pair, target: TargetStepExecutor, policy: Policy) -> None:
    ngram = DraftStepExecutor(NgramEngine(), worker_epoch=1)
    requests = [SequenceRequest(index, tuple(prompt), MAX_TOKENS) for index, prompt in enumerate(pair.prompts)]
    config = SchedulerConfig(batch_size=4, max_running=10, policy=policy, prefill_chunk=PREFILL_CHUNK)
    outputs = run_in_process(config, {"target": target, "draft": ngram}, requests)
    assert [outputs[index].tokens for index in range(len(pair.plain))] == pair.plain


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompt_lookup_beside_a_model_changes_nothing(
    pair: Pair, target: TargetStepExecutor, temperature: float
) -> None:
    settings = replace(pair.settings["draft"], lookup_match=2)
    draft = DraftStepExecutor(load_draft_engine(settings, lambda *_: None), worker_epoch=1)
    requests = [
        SequenceRequest(
            # Prompts that say something twice, so that there is something to be found from the start.
            index,
            tuple(prompt * 2),
            MAX_TOKENS,
            sampling=SamplingParameters(temperature=temperature, seed=index),
        )
        for index, prompt in enumerate(pair.prompts)
    ]
    plainly = run_in_process(SchedulerConfig(batch_size=1, max_running=1, draft_length=0), {"target": target}, requests)
    for policy in Policy:
        config = SchedulerConfig(batch_size=4, max_running=10, policy=policy, prefill_chunk=PREFILL_CHUNK)
        outputs = run_in_process(config, {"target": target, "draft": draft}, requests)
        assert [outputs[index].tokens for index in range(len(requests))] == [
            plainly[index].tokens for index in range(len(requests))
        ], policy
    assert draft.free_pages == 400


# --- in bfloat16, by the CPU kernels ----------------------------------------------------------------------------------

KERNEL_TOKENS = 12
# Logits of standard deviation 2 that are farther apart keep their order in bfloat16.
CLEAR_LEAD = 0.5


@dataclass
class KernelPair:
    """A tiny pair of a shape that the CPU kernels take, and prompts with what `model.generate` makes of them in float32
    from the same weights, up to the first token whose logit leads by less than `CLEAR_LEAD`."""

    settings: dict[str, EngineSettings]
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def kernel_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KernelPair:
    compiled_kernels()
    folders = save_tiny_pair(request.param, tmp_path_factory.mktemp("kernels"))
    for folder in folders:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    settings = {
        role: EngineSettings(str(folder), threads=1, page_size=16, kv_pages=100, max_num_batched_tokens=96, exact=False)
        for role, folder in zip(("target", "draft"), folders, strict=True)
    }
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    rng = random.Random(5)
    prompts, expected = [], []
    for length in (1, 15, 16, 30, 70):
        batch = [[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(24)]
        for prompt, tokens in zip(batch, clear_tokens(model, batch), strict=True):
            if len(tokens) >= 2:
                prompts.append(prompt)
                expected.append(tokens)
    return KernelPair(settings, prompts, expected)


def clear_tokens(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of prompts of one length, each up to its first token without a clear lead."""
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=KERNEL_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best, second = torch.stack(output.logits, dim=1).topk(2).values.unbind(-1)
    clear = (best - second > CLEAR_LEAD).int().cumprod(1).sum(1).tolist()
    return [row[ids.shape[1] :][:count].tolist() for row, count in zip(output.sequences, clear, strict=True)]


def outputs_by_kernels(pair: KernelPair, config: SchedulerConfig) -> list[list[int]]:
    workers = {
        "target": TargetStepExecutor(load_target_engine(pair.settings["target"], lambda *_: None), prefix_cache=False),
        "draft": DraftStepExecutor(load_draft_engine(pair.settings["draft"], lambda *_: None), prefix_cache=False),
    }
    requests = [
        SequenceRequest(index, tuple(prompt), len(tokens))
        for index, (prompt, tokens) in enumerate(zip(pair.prompts, pair.expected, strict=True))
    ]
    outputs = run_in_process(config, workers, requests)
    return [outputs[index].tokens for index in range(len(requests))]


@pytest.mark.parametrize("policy", list(Policy))
def test_output_by_kernels_is_that_of_generate(kernel_pair: KernelPair, policy: Policy) -> None:
    assert sum(map(len, kernel_pair.expected)) > 40
    config = SchedulerConfig(batch_size=4, max_running=10, policy=policy, draft_length=4, prefill_chunk=PREFILL_CHUNK)
    assert outputs_by_kernels(kernel_pair, config) == kernel_pair.expected


# File, what stands there, and what a mistake would make of that.
FAULTS = {
    "attention sees a position too many": (
        "attention.h",
        "for (ptrdiff_t i = seen; i < whole; i++) scores[i] = -INFINITY;",
        "for (ptrdiff_t i = seen + 1; i < whole; i++) scores[i] = -INFINITY;",
    ),
    "argmax gives the place before": (
        "logits.c",
        "places[row] = first_place(of, size, values[row]);",
        "places[row] = (first_place(of, size, values[row]) + size - 1) % size;",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel_pair", ["llama"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_seen(
    kernel_pair: KernelPair, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, right, wrong = FAULTS[fault]
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    source = (tmp_path / "csrc" / file).read_text()
    assert source.count(right) == 1
    (tmp_path / "csrc" / file).write_text(source.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path / "cache"))
    config = SchedulerConfig(batch_size=4, max_running=10, draft_length=4, prefill_chunk=PREFILL_CHUNK)
    assert outputs_by_kernels(kernel_pair, config) != kernel_pair.expected


# --- exact mode -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", WIDE_SHAPE), ("llama", TORCH_SHAPE), *((family, {}) for family in ("glm4", "qwen3", "qwen3_moe"))],
)
def test_exact_logits_do_not_depend_on_the_schedule(family: str, shape: dict[str, int], tmp_path: Path) -> None:
    """bfloat16, exact mode: the bits of every committed token's logits, plain at batch 1 against speculation."""
    target_folder, draft_folder = save_tiny_pair(family, tmp_path, **shape, max_position_embeddings=256)
    # Few rows a pass: where the processor has no products of bfloat16, calibration of more takes a minute.
    settings = EngineSettings(str(target_folder), threads=1, kv_pages=400, max_num_batched_tokens=48)
    target = TargetStepExecutor(load_target_engine(settings, lambda *_: None), prefix_cache=False)
    settings = replace(settings, model=str(draft_folder))
    draft = DraftStepExecutor(load_draft_engine(settings, lambda *_: None), prefix_cache=False)
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(length)) for length in (1, 5, 40, 130, 17, 64)]
    for temperature in (0.0, 0.8):
        requests = [
            SequenceRequest(
                index,
                prompt,
                24,
                sampling=SamplingParameters(temperature=temperature, seed=index),
                logits_digests=True,
            )
            for index, prompt in enumerate(prompts)
        ]
        plain_config = SchedulerConfig(batch_size=1, max_running=1, draft_length=0)
        plain = run_in_process(plain_config, {"target": target}, requests)
        for policy in Policy:
            config = SchedulerConfig(batch_size=4, max_running=6, policy=policy, prefill_chunk=24)
            outputs = run_in_process(config, {"target": target, "draft": draft}, requests)
            for index in range(len(prompts)):
                assert outputs[index].tokens == plain[index].tokens
                assert outputs[index].logits_digests == plain[index].logits_digests
                assert len(outputs[index].logits_digests) == 24
