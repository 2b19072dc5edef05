"""Packed and fused decoder layers compute what transformers' own do, as exactly as bfloat16 lets either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from bench.step_parts import by_parts
from engine.cpu_kernels import load_cpu_kernels
from engine.fused_layers import FusedDecoderLayer, KernelDecoder
from engine.loading import load_target_engine
from engine.packed_layers import FusedRmsNorm, PackedAttention, PackedMlp
from engine.packed_linear import KernelLinear, PackedLinear, can_pack
from engine.packed_pass import PackedSequence
from engine.pages import PagePool, PageTable
from engine.runner import ModelRunner
from engine.settings import EngineSettings

VOCABULARY = 96
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "glm4": Glm4Config,
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}

# Head dimension and page size: of these, the CPU kernels take the second.
SIZES = {"packed": (16, 8), "fused": (32, 16)}

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(1, dtype=torch.bfloat16)), reason="this CPU or this build of torch cannot pack bfloat16"
)


@pytest.fixture(scope="module", params=sorted(SIZES))
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    if request.param == "fused" and load_cpu_kernels(lambda *_: None) is None:
        pytest.skip("no C compiler makes the CPU kernels here")
    return SIZES[request.param]


@pytest.fixture
def pool(sizes: tuple[int, int]) -> PagePool:
    return PagePool(8, sizes[1])


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = CONFIGS[request.param](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes[0],
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    path = tmp_path_factory.mktemp("packed") / request.param
    model.save_pretrained(path)
    return path


def packed_runner(folder: Path, pool: PagePool) -> ModelRunner:
    engine = load_target_engine(
        EngineSettings(str(folder), threads=1, kv_pages=pool.total_pages, page_size=pool.page_size, exact=False),
        lambda *_: None,
    )
    return engine._runner


def paged_logits(runner: ModelRunner, pool: PagePool, tokens: list[int], pieces: tuple[int, ...]) -> torch.Tensor:
    """Logits `[len(tokens), vocabulary]`, the tokens fed in pieces of these lengths."""
    table = PageTable()
    logits = []
    for piece in pieces:
        fed, tokens = tokens[:piece], tokens[piece:]
        pool.append(table, len(fed))
        logits.append(runner.run([PackedSequence(table, fed, len(fed))]).logits.float())
    pool.free(table)
    return torch.cat(logits)


def test_logits_are_as_close_to_float32_as_those_of_transformers(folder: Path, pool: PagePool) -> None:
    tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        true, eager = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(input_ids=tokens[None]).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    ours = paged_logits(packed_runner(folder, pool), pool, tokens.tolist(), (17, 1, 5, 1, 16))
    error, eager_error = ((logits - true).pow(2).mean().sqrt() for logits in (ours, eager))
    assert error < 1.5 * eager_error
    assert error < 0.1 * true.std()


def test_what_is_known_is_replaced(folder: Path, sizes: tuple[int, int], pool: PagePool) -> None:
    model = packed_runner(folder, pool).model
    kinds = {type(module) for module in model.modules()}
    assert nn.Linear not in kinds
    assert kinds & {KernelLinear, PackedLinear}
    replacements = {FusedDecoderLayer, KernelDecoder, PackedAttention, PackedMlp, FusedRmsNorm}
    if folder.name == "glm4":
        expected = set()
    elif sizes == SIZES["fused"]:
        expected = {FusedDecoderLayer, KernelDecoder if KernelLinear in kinds else FusedRmsNorm}
    else:
        expected = {PackedAttention, PackedMlp, FusedRmsNorm}
    assert kinds & replacements == expected


def test_layers_in_one_call_are_their_parts(folder: Path, pool: PagePool) -> None:
    runner = packed_runner(folder, pool)
    decoder = runner.model.base_model
    if not isinstance(decoder, KernelDecoder):
        pytest.skip("layers are not a single call here")
    tokens, pieces = list(range(40)), (17, 1, 5, 1, 16)
    whole = paged_logits(runner, pool, tokens, pieces)
    decoder.add_layers = by_parts(decoder)  # type: ignore[method-assign]
    assert torch.equal(paged_logits(runner, pool, tokens, pieces), whole)
