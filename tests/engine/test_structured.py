"""Structured output against a plain decoder: transformers' `generate`, its grammar stepped token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.sampling.noise import gumbel, row_key
from spool.engine.settings import EngineSettings
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import FinishReason, SequenceRequest
from spool.scheduler.sampling import Grammar, SamplingParameters
from spool.services.gateway.grammar_check import definition
from spool.services.worker.executor import StepExecutor
from tests.support.in_process import Output, executor_of, run_in_process
from tests.support.tiny_chat import END, save_tiny_chat_model

MAX_TOKENS = 40
TEMPERATURES = (0.0, 0.8)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

STRUCTURES: list[tuple[str, str] | None] = [
    ("json_schema", json.dumps(PERSON)),
    ("regex", "(ab?c){2,4}[0-9]{1,3}"),
    ("choice", '["yes", "yesterday", "no"]'),
    ("grammar", 'start: word (" " word)*\nword: /[a-f]{2,3}/'),
    # Token 258 is <other>: calls of functions have special tokens for markers.
    ("lark", "start: <[258]> word (<[258]> word)*\nword: /[a-f]{2,3}/"),
    None,
]


@dataclass
class Case:
    """A target with a draft inside and the same one with prompt lookup, requests of every structure at two
    temperatures, and what the plain decoder makes of them."""

    tokenizer: Any
    target: StepExecutor
    looking_up: StepExecutor
    requests: list[SequenceRequest]
    expected: list[list[int]]
    end: int


class PlainGrammar(LogitsProcessor):
    """-inf for what the grammar of each row forbids, then Spool's noise for rows that are sampled."""

    def __init__(self, requests: Sequence[SequenceRequest], tokenizer: LLTokenizer) -> None:
        self._requests = requests
        self._matchers = [
            LLMatcher(tokenizer, request.sampling.grammar.definition) if request.sampling.grammar else None
            for request in requests
        ]
        self._length = len(requests[0].prompt)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        started = input_ids.shape[1] > self._length
        for row, (request, matcher) in enumerate(zip(self._requests, self._matchers, strict=True)):
            if matcher is not None:
                if started and not matcher.is_stopped():
                    assert matcher.consume_token(int(input_ids[row, -1])), matcher.get_error()
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool)
                scores[row, ~torch.from_numpy(allowed)] = -torch.inf
            sampling = request.sampling
            if not sampling.greedy:
                key = torch.tensor(row_key(sampling.seed, input_ids.shape[1]))
                scores[row] = torch.log_softmax(scores[row] / sampling.temperature, 0)
                scores[row] += gumbel(key, torch.arange(scores.shape[1]))
        return scores


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("structured")
    target, draft = save_tiny_chat_model(folder / "target"), save_tiny_chat_model(folder / "draft")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    end = tokenizer.convert_tokens_to_ids(END)
    noisy = AutoModelForCausalLM.from_pretrained(draft)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    noisy.save_pretrained(draft)
    grammars = [None if asked is None else Grammar(definition(*asked), frozenset([end])) for asked in STRUCTURES]
    rng = random.Random(3)
    requests = []
    for number in range(len(STRUCTURES) * len(TEMPERATURES) * 2):
        prompt = tuple(rng.randrange(len(tokenizer) - 3) for _ in range((9, 23)[number % 2]))
        sampling = SamplingParameters(
            temperature=TEMPERATURES[number // 2 % 2], seed=number, grammar=grammars[number // 4 % len(grammars)]
        )
        requests.append(SequenceRequest(number, prompt, MAX_TOKENS, frozenset([end]), sampling))
    expected: list[list[int]] = [[] for _ in requests]
    tokens = from_tokenizer(tokenizer, eos_token=end)
    for length in {len(request.prompt) for request in requests}:
        batch = [request for request in requests if len(request.prompt) == length]
        ids = torch.tensor([request.prompt for request in batch])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
            logits_processor=LogitsProcessorList([PlainGrammar(batch, tokens)]),
        )
        for request, row in zip(batch, output[:, length:].tolist(), strict=True):
            expected[request.sequence_id] = row[: row.index(end) + 1] if end in row else row
    settings = EngineSettings(str(target), "float32", threads=1, page_size=16, kv_pages=300, exact=False)
    of_draft = replace(settings, model=str(draft), lookup_match=2)
    draft_engine = load_draft_engine(of_draft, lambda *_: None)
    engines = [load_target_engine(replace(settings, max_num_batched_tokens=96), lambda *_: None) for _ in range(2)]
    drafting = executor_of(engines[0], draft_engine, worker_epoch=1)
    looking_up = executor_of(engines[1], lookup_match=2, worker_epoch=1)
    return Case(tokenizer, drafting, looking_up, requests, expected, end)


def tokens_of(outputs: dict[int, Output], requests: Sequence[SequenceRequest]) -> list[list[int]]:
    assert [output.error for output in outputs.values() if output.error] == []
    return [outputs[request.sequence_id].tokens for request in requests]


@pytest.mark.parametrize(
    ("policy", "batch_size", "draft_length"),
    [
        (Policy.RAGGED, 1, 3),
        pytest.param(Policy.EQSPEC, 8, 6, marks=pytest.mark.slow),
        (Policy.RAGGED, 8, 6),
    ],
)
def test_output_is_that_of_a_plain_decoder(case: Case, policy: Policy, batch_size: int, draft_length: int) -> None:
    # One at a time takes long: every third, of all structures and both temperatures.
    requests = case.requests[:: 3 if batch_size == 1 else 1]
    outputs = run(case.target, requests, policy=policy, batch_size=batch_size, draft_length=draft_length)
    assert tokens_of(outputs, requests) == [case.expected[request.sequence_id] for request in requests]
    rounds = [round_ for output in outputs.values() for round_ in output.rounds if round_[0]]
    assert sum(accepted for _, accepted in rounds) > 0
    assert any(accepted < drafted for drafted, accepted in rounds)


def run(target: StepExecutor, requests: Sequence[SequenceRequest], **settings: Any) -> dict[int, Output]:
    usual = {"batch_size": 8, "max_running": 20, "policy": Policy.RAGGED, "draft_length": 3, "prefill_chunk": 16}
    return run_in_process(SchedulerConfig(**(usual | settings)), {"target": target}, requests)


def test_prompt_lookup_changes_nothing(case: Case) -> None:
    """Its proposals are not masked: the target refuses what the grammar forbids."""
    outputs = run(case.looking_up, case.requests)
    assert tokens_of(outputs, case.requests) == case.expected


def test_output_goes_on_from_any_of_its_tokens(case: Case) -> None:
    """As after a move, a death or a new scheduler: whoever goes on knows the tokens, and nothing of the grammar."""
    requests = [
        replace(request, committed_output=tuple(tokens[: request.sequence_id % len(tokens)]))
        for request, tokens in zip(case.requests, case.expected, strict=True)
    ]
    outputs = run(case.target, requests)
    assert [[*r.committed_output, *out] for r, out in zip(requests, tokens_of(outputs, requests), strict=True)] == (
        case.expected
    )


def test_a_complete_output_ends_before_its_least_length(case: Case) -> None:
    sampling = SamplingParameters(
        min_tokens=9, end_token_ids=frozenset([case.end]), grammar=Grammar("start: /ab?/", frozenset([case.end]))
    )
    request = SequenceRequest(0, (5,), MAX_TOKENS, frozenset([case.end]), sampling)
    outputs = run(case.target, [request])
    # Only the end may follow "ab", so that it comes; "a" alone could go on.
    assert case.tokenizer.decode(outputs[0].tokens) == f"ab{END}"
    assert outputs[0].reason is FinishReason.STOP


def test_a_grammar_whose_only_token_is_forbidden_says_so(case: Case) -> None:
    stops = frozenset([case.end, case.tokenizer.convert_tokens_to_ids("a")])
    sampling = SamplingParameters(
        min_tokens=3, end_token_ids=stops, grammar=Grammar("start: /a/", frozenset([case.end]))
    )
    outputs = run(case.target, [SequenceRequest(0, (5,), MAX_TOKENS, stops, sampling)])
    assert "allows only stop tokens, which min_tokens forbids" in (outputs[0].error or "")


def test_a_grammar_that_fails_hurts_nobody_else(case: Case) -> None:
    """The gateway lets none in; a gateway of another release might."""
    broken = SamplingParameters(grammar=Grammar("start: gone", frozenset([case.end])))
    requests = [replace(case.requests[0], sampling=broken), *case.requests[1:6]]
    outputs = run(case.target, requests)
    assert 'the grammar failed: at 1(8): unknown name: "gone"' in (outputs[0].error or "")
    assert [outputs[index].tokens for index in range(1, 6)] == case.expected[1:6]
