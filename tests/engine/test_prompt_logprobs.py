"""Log probabilities of prompts: those of transformers in float32, and in exact mode the same bits in any company."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spool.engine.models.loading import load_target_engine
from spool.engine.settings import EngineSettings
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import SequenceRequest
from spool.scheduler.sampling import SamplingParameters
from spool.services.worker.executor import StepExecutor
from tests.support.in_process import Output, run_in_process
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, save_tiny_pair

TOP = 3
SYSTEM = random.Random(3).choices(range(VOCABULARY), k=45)


def silent(*_: object) -> None:
    pass


def executor(settings: EngineSettings) -> StepExecutor:
    return StepExecutor(load_target_engine(settings, silent), prefix_cache=settings.prefix_cache)


def scored(prompts: list[list[int]], top: int = TOP) -> list[SequenceRequest]:
    sampling = SamplingParameters(temperature=0.7, seed=3, top_k=5)
    return [
        SequenceRequest(number, tuple(prompt), 2, sampling=sampling, prompt_logprobs=top, top_logprobs=top)
        for number, prompt in enumerate(prompts)
    ]


def run(worker: StepExecutor, requests: list[SequenceRequest], chunk: int = 16) -> dict[int, Output]:
    config = SchedulerConfig(prefill_chunk=chunk, draft_length=0, batch_size=4)
    outputs = run_in_process(config, {"target": worker}, requests)
    assert [output.error for output in outputs.values()] == [None] * len(requests)
    return outputs


@pytest.mark.parametrize("family", ["llama", pytest.param("glm4", marks=pytest.mark.slow)])
def test_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Of prompts in chunks and in company, their beginning in the prefix cache, with a beginning of one token among
    them; and of what is sampled, whatever shapes the distribution that it is drawn from."""
    folder = save_tiny_pair(family, tmp_path, **TORCH_SHAPE)[0]
    settings = EngineSettings(
        str(folder), dtype="float32", threads=1, page_size=16, kv_pages=60, exact=False, max_num_batched_tokens=96
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worker = executor(settings)
    run(worker, [SequenceRequest(0, tuple(SYSTEM), 1)])
    rng = random.Random(7)
    prompts = [[*SYSTEM, *rng.choices(range(VOCABULARY), k=count)] for count in (1, 9, 30)] + [[5], [5, 6], SYSTEM]
    outputs = run(worker, scored(prompts))
    for number, prompt in enumerate(prompts):
        output = outputs[number]
        text = [*prompt, *output.tokens]
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(input_ids=torch.tensor([text[:-1]])).logits[0], dim=-1)
        found = [*output.prompt_logprobs, *output.logprobs]
        assert [entry.token_id for entry in found] == text[1:]
        own = logprobs[torch.arange(len(text) - 1), torch.tensor(text[1:])]
        torch.testing.assert_close(torch.tensor([entry.logprob for entry in found]), own, rtol=1e-4, atol=1e-4)
        values, ids = torch.topk(logprobs, TOP)
        assert [[token for token, _ in entry.top] for entry in found] == ids.tolist()
        top = torch.tensor([[value for _, value in entry.top] for entry in found])
        torch.testing.assert_close(top, values, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = save_tiny_pair("llama", tmp_path_factory.mktemp("models"))[0]
    return EngineSettings(str(folder), threads=1, page_size=16, kv_pages=60, max_num_batched_tokens=96)


def test_the_same_bits_alone_and_in_company(exact: EngineSettings) -> None:
    """bfloat16: whole prompts one by one without the cache, against chunks, company, a warm cache and few pages."""
    rng = random.Random(4)
    prompts = [[*SYSTEM, *rng.choices(range(VOCABULARY), k=count)] for count in (1, 17, 41, 77)]
    requests = scored(prompts)
    alone = executor(replace(exact, prefix_cache=False))
    expected = {one.sequence_id: run(alone, [one], chunk=96)[one.sequence_id] for one in requests}
    for pages, chunk in ((60, 16), (14, 23)):
        outputs = run(executor(replace(exact, kv_pages=pages)), requests, chunk)
        for number, output in outputs.items():
            assert output.prompt_logprobs == expected[number].prompt_logprobs
            assert output.tokens == expected[number].tokens


def test_a_prompt_that_is_scored_is_computed_and_others_still_share_it(exact: EngineSettings) -> None:
    worker = executor(exact)
    plain = SequenceRequest(0, tuple(SYSTEM), 2)
    first = run(worker, [plain])[0]
    again = run(worker, [plain])[0]
    (both,) = run(worker, scored([SYSTEM])).values()
    assert (first.cached, again.cached, both.cached) == (0, 32, 0)
    assert len(both.prompt_logprobs) == len(SYSTEM) - 1
    assert run(worker, [plain])[0].cached == 32
    assert first.tokens == again.tokens
