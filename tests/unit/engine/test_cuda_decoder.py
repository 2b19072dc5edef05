"""A GPU's decoder by its description, with its kernels in Triton's interpreter, beside transformers' own."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    OlmoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from spool.engine.attention.backends import AttentionRule, Span
from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cuda.setup import GpuPasses
from spool.engine.description import EngineDescription
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.kv.paged_kv import LayerKv, PagedKv, PagedKvStore
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.layers.families import FAMILIES
from spool.engine.layers.linear import linear_of
from spool.engine.models.loaded_model import KvShape, LoadedModel
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.passes.features import Features
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.quantization.layers import QuantizedEmbedding, QuantizedLinear
from spool.engine.quantization.model import round_weights
from spool.engine.sampling.grammars import Grammars
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.steps import ProposeRow, VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.messages import PromptScoring, Role
from spool.scheduler.sampling import Grammar, SamplingParameters
from spool.services.gateway.grammar_check import definition
from tests.support.command_line import tokenizer_of
from tests.support.family_models import KERNEL_SIZES, tiny_config
from tests.support.family_models import tiny_model as tiny_model_of_family
from tests.support.gpu_work import Work
from tests.support.triton_kernel import interpreted_attention, multiply_in_one_order

PAGE, PAGES, VOCABULARY = 16, 32, 96
CPU = torch.device("cpu")
CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
PIECES = (7, 1, 3, 1)


@pytest.fixture(scope="module")
def fused_decoder() -> ModuleType:
    interpreted_attention()
    return importlib.import_module("spool.engine.cuda.fused_decoder")


def tiny_model(config: type[PreTrainedConfig], **more: object) -> PreTrainedModel:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 80,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(**(sizes | more)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


class RowByRow:
    """Attention in float32 of each row by itself, in the place of a GPU's kernel."""

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = spans

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> RowByRow:
        return RowByRow(spans)

    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        output = torch.zeros_like(query)
        for span in self._spans:
            keys, values = layer.pool[:, list(span.pages)].float().transpose(1, 2).flatten(2, 3)
            for place in range(span.rows):
                seen = span.start + place + 1
                first = max(0, seen - (rule.window or seen))
                row = query[span.first_row + place].float().view(layer.kv_heads, -1, query.shape[2])
                scores = row @ keys[:, first:seen].transpose(1, 2) * rule.scaling
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                if rule.sinks is not None:
                    scores = torch.cat((scores, rule.sinks.view(layer.kv_heads, -1, 1)), -1)
                weights = torch.softmax(scores, -1)[..., : seen - first]
                output[span.first_row + place] = (weights @ values[:, first:seen]).flatten(0, 1)
        return output


class Sequences:
    """Sequences of known tokens on the pages of a model with a decoder of ours."""

    def __init__(self, model: PreTrainedModel) -> None:
        shape = KvShape.of(model.config)
        kv = PagedKv(shape.layers, PAGES, PAGE, shape.kv_heads, shape.head_dim, model.dtype, CPU)
        self._runner = ModelRunner(model, kv, RowByRow())
        self._pool = PagePool(PAGES, PAGE)
        self._tables: dict[int, PageTable] = {}

    def feed(self, *steps: tuple[int, Sequence[int]]) -> torch.Tensor:
        """Logits of all tokens of a pass; a step is a sequence and what it feeds."""
        batch = []
        for number, tokens in steps:
            table = self._tables.setdefault(number, PageTable())
            self._pool.append(table, len(tokens))
            batch.append(BatchedSequence(table, list(tokens), len(tokens)))
        return self._runner.run(batch).logits.clone()


def tokens_of(number: int, count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(number)).tolist()


def assert_as_close_as_transformers(fused_decoder: ModuleType, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """To the logits in float64, of a prompt in pieces."""
    tokens = tokens_of(0, sum(PIECES))
    same = copy.deepcopy(model).to(dtype)
    # Experts by torch's grouped products know no float64.
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        exact, eager = (given(torch.tensor([tokens])).logits[0].double() for given in (model.double(), same))
    assert fused_decoder.fuse_decoder(same)
    assert type(same.base_model) is fused_decoder.CudaDecoder
    sequences, rest, found = Sequences(same), tokens, []
    for piece in PIECES:
        found.append(sequences.feed((0, rest[:piece])))
        rest = rest[piece:]
    error, eager_error = ((logits.double() - exact).square().mean().sqrt() for logits in (torch.cat(found), eager))
    assert error < 1.5 * eager_error
    assert error < (0.03 if dtype == torch.bfloat16 else 0.01) * exact.std()


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float16), ("qwen2", torch.float32), ("qwen3", torch.float16)]
)
def test_logits_are_as_close_to_float32_as_those_of_transformers(
    fused_decoder: ModuleType, name: str, dtype: torch.dtype
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} if name == "qwen2" else {}
    assert_as_close_as_transformers(fused_decoder, tiny_model(CONFIGS[name], **window), dtype)


QUICK = ("cohere2", "gemma3_text", "olmo2", "nanochat")
"""Parallel layers, some without rotation; norms around, and two rotations; norms of whole queries; no gates, and heads
that are normalized once they are rotated, the other way."""


ALL_CHOSEN = {"num_experts_per_tok": 4, "moe_k": 4}
"""Experts: a rounding is to change none of them."""


def model_of_family(family: str, **more: Any) -> PreTrainedModel:
    config = tiny_config(family, KERNEL_SIZES | ALL_CHOSEN)
    model = tiny_model_of_family(type(config)(**config.to_dict() | more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


KINDS = (
    *("llama", "qwen3", "gemma3_text", "olmo2", "cohere2", "phi", "glm4", "granite", "gpt_neox", "exaone4"),
    *("nanochat", "hunyuan_v1_dense"),
)
"""Families whose layers differ in what lies between products and attention."""


def mark_of(family: str) -> list[pytest.MarkDecorator]:
    return [] if family in QUICK else [pytest.mark.slow if family in KINDS else pytest.mark.long]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [pytest.param(family, marks=mark_of(family)) for family in FAMILIES])
def test_all_described_families_give_the_logits_of_transformers(
    fused_decoder: ModuleType, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_one_order(monkeypatch)
    assert_as_close_as_transformers(fused_decoder, model_of_family(family), dtype)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2"])
def test_features_are_what_goes_into_layers_and_comes_out_of_the_last_norm(
    fused_decoder: ModuleType, family: str
) -> None:
    model, tokens = model_of_family(family), tokens_of(0, 9)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert fused_decoder.fuse_decoder(model)
    features = Features(model, range(3), len(tokens))
    Sequences(model).feed((0, tokens))
    found = features.rows.view(len(tokens), 3, -1).transpose(0, 1)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_a_rounded_model_gives_the_bits_of_its_expanded_weights(
    fused_decoder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_one_order(monkeypatch)
    products = importlib.import_module("spool.engine.cuda.triton_product")
    gpu = GpuPasses("", lambda page_size: RowByRow(), None, products.TritonLinear)
    found = []
    for kept in (True, False):
        model = tiny_model(Qwen3Config, hidden_size=96).to(torch.float16)
        round_weights(model, 4)
        if not kept:
            expand(model)
        gpu.fuse_decoder(model)
        gpu.replace_linears(model)
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
        found.append(Sequences(model).feed((0, tokens_of(0, sum(PIECES)))))
    assert torch.equal(*found)


def expand(model: PreTrainedModel) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, QuantizedEmbedding):
                setattr(module, name, torch.nn.Embedding.from_pretrained(child.quantized.expanded().to(model.dtype)))
            elif isinstance(child, QuantizedLinear):
                setattr(module, name, linear_of(child.quantized.expanded().to(model.dtype), child.bias))


def on_kernels(model: PreTrainedModel) -> LoadedModel:
    products, attention = (
        importlib.import_module(f"spool.engine.cuda.triton_{name}") for name in ("product", "attention")
    )
    heads = model.config.num_attention_heads, KvShape.of(model.config).kv_heads
    gpu = GpuPasses("", lambda page: attention.TritonBackend(*heads, page, CPU), None, products.TritonLinear)
    model.set_attn_implementation(ATTENTION_NAME)
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), None, gpu)
    loaded.replace_layers()
    return loaded


@pytest.mark.parametrize(
    "family",
    [family if family in ("cohere2", "olmo2") else pytest.param(family, marks=pytest.mark.slow) for family in KINDS],
)
def test_a_dense_layer_launches_nine_kernels(
    fused_decoder: ModuleType, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four products, attention, and what lies between."""
    kernels = []
    for layers in (2, 4):
        types = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        # Of some families in which not all layers are of one type.
        more = types if family in ("gemma3_text", "cohere2", "exaone4") else {"layer_types": None}
        model = model_of_family(family, num_hidden_layers=layers, **more).to(torch.float16)
        pool, table = PagePool(PAGES, PAGE), PageTable()
        runner = on_kernels(model).runner(pool, ())
        assert type(model.base_model) is fused_decoder.CudaDecoder
        pool.append(table, 3)
        with monkeypatch.context() as patch, Work(patch) as work:
            runner.run([BatchedSequence(table, [1, 2, 3], 1)])
        kernels.append(work.kernels)
    assert (kernels[1] - kernels[0]) / 2 <= 9


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gpt_oss"))]
)
def test_experts_of_a_fused_decoder_are_replaced(
    fused_decoder: ModuleType, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_one_order(monkeypatch)
    experts = importlib.import_module("spool.engine.cuda.triton_experts").TritonExperts
    model, tokens = model_of_family(family).to(torch.float16), tokens_of(0, 9)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].float()
    loaded, pool, table = on_kernels(model), PagePool(PAGES, PAGE), PageTable()
    assert type(model.base_model) is fused_decoder.CudaDecoder
    assert sum(type(module) is experts for module in model.modules()) == model.config.num_hidden_layers
    pool.append(table, len(tokens))
    found = loaded.runner(pool, ()).run([BatchedSequence(table, tokens, len(tokens))]).logits
    assert (found - expected).square().mean().sqrt() < 0.01 * expected.std()


def engines_of(model: PreTrainedModel, scan: LogitsScan | None = None) -> tuple[TargetEngine, DraftEngine]:
    """Of one model, all by kernels unless the scan is another one, each with pages of its own."""
    sampling = importlib.import_module("spool.engine.cuda.triton_sampling")
    loaded = on_kernels(model)
    pools = [PagePool(PAGES, PAGE) for _ in Role]
    runners = [loaded.runner(pool, ()) for pool in pools]
    description = EngineDescription("tiny", b"", VOCABULARY, "float16", "cpu", PAGE, PAGES, PAGE * PAGES, 256)
    store, scan = PagedKvStore(runners[0].kv, "tiny", b""), scan or sampling.TritonScan()
    grammars = Grammars(tokenizer_of(), beside_model=True)
    target = TargetEngine(description, runners[0], pools[0], store, scan, grammars)
    return target, DraftEngine(description, runners[1], pools[1], scan, chained=True)


def test_a_step_of_36_layers_launches_few_kernels_and_is_waited_for_once(
    fused_decoder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = []
    changed = SamplingParameters(temperature=0.7, seed=1, presence_penalty=0.5, logit_bias={3: 1.0})
    for layers in (1, 2):
        model = tiny_model(Qwen3Config, num_hidden_layers=layers).to(torch.float16)
        target, draft = engines_of(model)
        history = tokens_of(0, 9)
        sampling = SamplingParameters(temperature=0.7, top_k=20, top_p=0.95, seed=1)
        rows = [VerifyRow(PageTable(), history, (), True, history, 9, sampling) for _ in range(2)]
        proposing = [ProposeRow(PageTable(), history, 3, history, 9, each) for each in (sampling, changed)]
        for engine, given in ((target, rows), (draft, proposing)):
            with monkeypatch.context() as patch, Work(patch) as work:
                outcomes = engine.step(given).rows
            assert all(outcome.error is None and outcome.tokens for outcome in outcomes)
            assert work.waits == 1
            kernels.append(work.kernels)
    of_one, _, of_two, _ = kernels
    assert of_two - of_one > 5
    assert of_one + 35 * (of_two - of_one) <= 400


EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
    "logit_bias": {3: 1.5},
    "bad_words": ((4,),),
    "min_tokens": 100,
    "end_token_ids": frozenset([2]),
    "grammar": Grammar(definition("regex", r"[\s\S]*"), frozenset([2])),
}


def kernels_of_a_step(
    model: PreTrainedModel, rows: int, scan: LogitsScan, monkeypatch: pytest.MonkeyPatch, sample: bool = True
) -> int:
    """Of some rows with a draft token each and all parameters, or which are only fed. The host waits once."""
    target, _ = engines_of(model, scan)
    history = tokens_of(0, 9)
    sampling = SamplingParameters(seed=1, **EVERYTHING)
    given = [
        VerifyRow(PageTable(), history, (5,), sample, history, 3, sampling, sample, top_logprobs=3 if sample else None)
        for _ in range(rows)
    ]
    if sample:
        scored = PromptScoring(1, tuple(history[1:]), 2)
        given.append(VerifyRow(PageTable(), history, (), False, history, 9, sampling, scoring=scored))
    with monkeypatch.context() as patch, Work(patch) as work:
        outcomes = target.step(given).rows
    assert all(outcome.error is None for outcome in outcomes)
    assert all(len(outcome.logits_digests) == len(outcome.tokens) > 0 for outcome in outcomes[:rows] if sample)
    assert not sample or len(outcomes[-1].prompt_logprobs) == len(history) - 1
    assert work.waits == 1
    return work.kernels


@pytest.mark.slow
def test_what_follows_a_pass_launches_few_kernels_whatever_is_asked_for(
    fused_decoder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows are sampled in three parts, as 512 of the largest vocabularies are."""
    model = tiny_model(Qwen3Config, num_hidden_layers=1).to(torch.float16)
    make_scan = importlib.import_module("spool.engine.cuda.triton_sampling").TritonScan
    whole, in_parts = make_scan(), make_scan(2 * VOCABULARY)
    fed = kernels_of_a_step(model, 3, whole, monkeypatch, sample=False)
    few, more, parts = (
        kernels_of_a_step(model, rows, scan, monkeypatch) - fed
        for rows, scan in ((1, whole), (3, whole), (3, in_parts))
    )
    assert few == more < parts <= 40


def test_a_step_gives_what_it_gives_by_torch(fused_decoder: ModuleType) -> None:
    model, found = tiny_model(Qwen3Config, num_hidden_layers=1).to(torch.float16), []
    for scan in (None, LogitsScan()):
        target, _ = engines_of(model, scan)
        rows = []
        for number in range(4):
            sampling = SamplingParameters(0.8, top_k=number * 5, seed=number, presence_penalty=number % 2)
            history, top = tokens_of(number, 9), (None, 0, 4)[number % 3]
            drafts = (3, 4)[: number % 3]
            rows.append(
                VerifyRow(PageTable(), history, drafts, True, history, 3, sampling, number % 4 != 1, top_logprobs=top)
            )
        found.append(target.step(rows).rows)
    for own, other in zip(*found, strict=True):
        assert (own.tokens, own.accepted, own.logits_digests) == (other.tokens, other.accepted, other.logits_digests)
        for entry, expected in zip(own.logprobs or (), other.logprobs or (), strict=True):
            assert entry.token_id == expected.token_id
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert [token for token, _ in entry.top] == [token for token, _ in expected.top]
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in expected.top], abs=1e-5)


OTHERS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "another family": (StableLmConfig, {}),
    "another activation": (LlamaConfig, {"hidden_act": "tanh"}),
    "clipped projections": (OlmoConfig, {"clip_qkv": 1.0}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_model_without_a_description_stays_as_it_is(fused_decoder: ModuleType, case: str) -> None:
    config, more = OTHERS[case]
    model = tiny_model(config, **more)
    before = list(model.modules())
    assert not fused_decoder.fuse_decoder(model)
    assert all(one is other for one, other in zip(model.modules(), before, strict=True))
