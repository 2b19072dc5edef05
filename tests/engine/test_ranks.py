"""A target of several ranks: what `model.generate` writes, and the same bits whatever shares a pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PageTable
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.parallel.shards import check_divides
from spool.engine.quantization.rounding import rounded
from spool.engine.settings import EngineSettings
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.sampling import SamplingParameters
from spool.services.worker.executor import StepExecutor
from tests.support.cpu_kernels import compiled_kernels
from tests.support.decoding import generated
from tests.support.golden_models import golden_folder, golden_tokens
from tests.support.in_process import Output, executor_of, requests_of, run_in_process
from tests.support.ranks import target_of_ranks
from tests.support.tiny_models import VOCABULARY, quantize_to_int8, save_tiny_pair, tiny_model

PROMPTS = [random.Random(length).choices(range(VOCABULARY), k=length) for length in (1, 3, 17, 30, 16)]
MAX_TOKENS = 12
INT8 = "compressed-tensors"
"""Of GANGS, a target whose checkpoint is quantised so."""
GANGS = [
    ("llama", "float32", "none", "auto"),
    ("llama", "float32", INT8, "auto"),
    *(
        pytest.param(gang, marks=pytest.mark.slow)
        for gang in (
            ("qwen3", "bfloat16", "none", "auto"),
            ("qwen3", "bfloat16", "none", "int8"),
            ("qwen3", "bfloat16", "int4", "auto"),
            ("qwen3_moe", "bfloat16", "none", "auto"),
        )
    ),
]
"""Family, dtype, quantisation and KV."""
MORE = [("none", "int8"), ("int8", "auto"), ("Q4_K", "int8"), ("Q6_K", "auto"), ("Q8_0", "auto")]


class Gang(NamedTuple):
    """A target of two ranks, with a draft on the first one, and its folder."""

    engine: TargetEngine
    target: StepExecutor
    folder: Path


@pytest.fixture(scope="module", params=GANGS, ids="-".join)
def gang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    family, dtype, quantization, kv_cache_dtype = request.param
    target, draft = save_tiny_pair(family, tmp_path_factory.mktemp("ranks"), intermediate_size=128)
    alone = EngineSettings(str(draft), dtype, threads=1, kv_pages=120, max_num_batched_tokens=48)
    shared = replace(alone, model=str(target), tensor_parallel_size=2, kv_cache_dtype=kv_cache_dtype)
    if quantization == INT8:
        quantize_to_int8(target)
    else:
        shared = replace(shared, quantization=quantization)
    with target_of_ranks(shared) as engine:
        assert engine.description.quantization == quantization
        drafting = load_draft_engine(alone, lambda *_: None)
        yield Gang(engine, executor_of(engine, drafting, worker_epoch=1, prefix_cache=False), target)


def run(
    target: StepExecutor, temperature: float, policy: Policy, batch_size: int, draft_length: int
) -> dict[int, Output]:
    config = SchedulerConfig(batch_size, max_running=8, policy=policy, draft_length=draft_length, prefill_chunk=16)
    requests = requests_of(PROMPTS, MAX_TOKENS, (temperature,))
    return run_in_process(config, {"target": target}, requests)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_gives_the_bits_of_plain_decoding(gang: Gang, temperature: float) -> None:
    plain = run(gang.target, temperature, Policy.RAGGED, 1, 0)
    looking_up = executor_of(gang.engine, lookup_match=1, worker_epoch=1, prefix_cache=False)
    for target, policy in ((gang.target, Policy.RAGGED), (gang.target, Policy.EXSPEC), (looking_up, Policy.RAGGED)):
        outputs = run(target, temperature, policy, 4, 4)
        for index, output in outputs.items():
            assert output.tokens == plain[index].tokens
            assert output.logits_digests == plain[index].logits_digests
        drafted, accepted = (sum(each[at] for one in outputs.values() for each in one.rounds) for at in (0, 1))
        assert drafted > 0
        # Random weights seldom write what they wrote before.
        assert accepted > 0 or target is looking_up
    described = gang.engine.description
    if (described.dtype, described.quantization, temperature) == ("float32", "none", 0):
        model = AutoModelForCausalLM.from_pretrained(gang.folder, dtype=torch.float32)
        for index, prompt in enumerate(PROMPTS):
            assert plain[index].tokens == generated(model, prompt, MAX_TOKENS)


def feed(table: PageTable, tokens: list[int]) -> VerifyRow:
    return VerifyRow(table, tokens, [], True, tokens, len(tokens), SamplingParameters(), logits_digests=True)


def test_pages_hold_what_all_ranks_have(gang: Gang) -> None:
    """A sequence whose pages were read and written to others goes on with the same logits."""
    engine = gang.engine
    store, pool, prompt = engine.kv_store, engine.pool, PROMPTS[4]
    table, moved = PageTable(), PageTable()
    engine.step([feed(table, prompt)], lambda: None)
    pool.append(moved, len(prompt))
    contents = store.read_pages(table.pages)
    store.write_pages(moved.pages, contents)
    assert [len(content) for content in contents] == [store.layout.page_bytes] * len(table.pages)
    assert store.layout.ranks == 2
    with pytest.raises(ValueError, match="must be of"):
        store.write_pages(moved.pages[:1], [contents[0][:-1]])
    here, there = (engine.step([feed(each, [7])], lambda: None).rows[0] for each in (table, moved))
    assert here.logits_digests == there.logits_digests != ()
    for each in (table, moved):
        pool.free(each)


def test_a_row_that_is_not_finite_leaves_no_trace_on_any_rank(gang: Gang) -> None:
    engine = gang.engine
    store, pool, prompt = engine.kv_store, engine.pool, PROMPTS[4]
    table, broken = PageTable(), PageTable()
    right = engine.step([feed(table, prompt)], lambda: None).rows[0]
    pool.free(table)
    pool.append(broken, len(prompt))
    page = broken.pages[0]
    store.write_pages([page], [b"\xff" * store.layout.page_bytes])
    outcome = engine.step([feed(broken, [7])], lambda: None).rows[0]
    assert outcome.error == "the target's logits are not finite"
    pool.free(broken)
    engine.step([feed(table, prompt)], lambda: None)
    assert table.pages[0] == page
    pool.free(table)
    assert engine.step([feed(table, prompt)], lambda: None).rows[0].logits_digests == right.logits_digests
    pool.free(table)


# Ranks that share KV heads, and a rest of heads.
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 4), (9, 3, 2)])
def test_heads_biases_and_a_vocabulary_with_a_rest(
    heads: int, kv_heads: int, size: int, bits: int | None, tmp_path: Path
) -> None:
    """Tied embeddings of 97 tokens: the logits of the whole model, of rounded weights where `bits` says so."""
    sizes = {"hidden_size": 32 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = tiny_model("qwen2", vocab_size=97, pad_token_id=96, intermediate_size=128, **sizes)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    model.save_pretrained(tmp_path)
    settings = EngineSettings(
        str(tmp_path),
        "float32",
        threads=1,
        kv_pages=8,
        exact=False,
        max_num_batched_tokens=8,
        quantization="none" if bits is None else f"int{bits}",
        tensor_parallel_size=size,
    )
    tokens = [96, 3, 50, 24, 25, 71, 0, 49]
    with target_of_ranks(settings) as engine, torch.no_grad():
        table = PageTable()
        for name, parameter in model.named_parameters() if bits is not None else ():
            if parameter.dim() == 2:
                parameter.copy_(rounded(parameter, 8 if "embed" in name else bits).expanded())
        whole = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        outcome = engine.step(
            [VerifyRow(table, tokens, [], True, tokens, 8, SamplingParameters(), top_logprobs=5)], lambda: None
        )
        best = outcome.rows[0].logprobs[0]
        assert [token for token, _ in best.top] == whole.topk(5).indices.tolist()
        wanted = whole.log_softmax(-1).topk(5).values
        found = torch.tensor([logprob for _, logprob in best.top])
        assert torch.allclose(found, wanted, atol=1e-4 if bits is None else 0.05 * whole.std())


@pytest.mark.parametrize(
    ("family", "fields", "size", "message"),
    [
        ("glm4", {}, 2, "tensor_parallel_size is 2, must be 1 for models of type glm4: only llama, qwen2, qwen3"),
        ("qwen3_moe", {"moe_intermediate_size": 30}, 4, "must divide the model's moe_intermediate_size, which is 30"),
        ("llama", {"intermediate_size": 98}, 4, "must divide the model's intermediate_size, which is 98"),
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96},
            6,
            "must be at most the model's num_key_value_heads, which is 4, or be a multiple of it that divides",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, fields: dict[str, int], size: int, message: str) -> None:
    sizes = {"hidden_size": 36, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96} | fields
    with pytest.raises(UnsupportedModelError) as refused:
        check_divides(AutoConfig.for_model(family, **sizes), size)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("weights", "kv"),
    [("int4", "auto"), ("none", "auto"), *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)],
)
def test_two_and_four_ranks_give_the_golden_logits(weights: str, kv: str, tmp_path: Path) -> None:
    """As one rank does, on every processor."""
    compiled_kernels()
    folder, tokens = golden_folder("llama", weights, tmp_path), golden_tokens(40)
    found = []
    for size in (1, 2, 4):
        settings = EngineSettings(
            str(folder), numerics="universal", kv_cache_dtype=kv, threads=1, kv_pages=8, max_num_batched_tokens=48
        )
        if weights in ("int4", "int8"):
            settings = replace(settings, quantization=weights)
        whole = nullcontext(load_target_engine(settings, lambda *_: None))
        with target_of_ranks(replace(settings, tensor_parallel_size=size)) if size > 1 else whole as engine:
            digests = list[int]()
            for place in range(len(tokens)):
                table = PageTable()
                fed = tokens[: place + 1]
                row = VerifyRow(table, fed, [], True, fed, len(fed), SamplingParameters(), logits_digests=True)
                digests += engine.step([row], lambda: None).rows[0].logits_digests
                engine.pool.free(table)
            found.append((digests, engine.description.fingerprint))
    assert len(found[0][0]) == len(tokens)
    assert found[1] == found[2] == found[0]
