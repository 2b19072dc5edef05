"""Quantised models compute what their expanded weights do, but for the rounding of rows to eight bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cpu.fused_layers import KernelDecoder
from spool.engine.cpu.linear import KernelEmbedding, KernelLinear, replace_linears
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool
from spool.engine.models.dtype import converted
from spool.engine.models.families import DENSE_FAMILIES
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.loading import load_target_engine
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.quantization.gguf_architectures import ARCHITECTURES
from spool.engine.quantization.gguf_folder import PRES
from spool.engine.quantization.layers import QuantizedEmbedding, QuantizedLinear
from spool.engine.quantization.model import build_model, is_quantized, moved, round_weights
from spool.engine.quantization.rounding import rounded
from spool.engine.settings import EngineSettings
from tests.engine.test_families import NEW_TOKENS, PAGE, PROMPTS, WRONG_DRAFTS, tiny_config
from tests.engine.test_families import tiny_model as of_family
from tests.support.cpu_kernels import compiled_kernels
from tests.support.decoding import decoded, paged_logits
from tests.support.tiny_models import VOCABULARY, quantize_to_int8, save_tiny_pair

TOKENS = [(7 * place + 3) % VOCABULARY for place in range(40)]
QUICK = ("gemma3_text", "gpt_neox", "phi3")
"""An embedding with a scale; one projection of all heads, one after the other, with biases; joined projections."""
JOINED = ("_proj.weight", "dense.weight", "query_key_value.weight", "_h.weight", "_4h.weight")


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of all tokens, by the kernels, float32."""
    loaded = LoadedModel(model, Vocabulary(b"", VOCABULARY), compiled_kernels(torch.float32), None)
    loaded.replace_layers()
    pool = PagePool(8, 16)
    return paged_logits(loaded.runner(pool, (len(TOKENS),)), pool, TOKENS, [len(TOKENS)])


def plain_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME)


@torch.inference_mode()
def expected(folder: Path, bits: int) -> torch.Tensor:
    """Of transformers' own model, whose weights are those that the codes stand for."""
    # SDPA leaves soft caps out.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.copy_(rounded(module.weight, 8 if module in ends else bits).expanded())
    return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_model(family: str, bits: int, tmp_path: Path) -> None:
    folder, _ = save_tiny_pair(family, tmp_path)
    exact = expected(folder, bits)
    model = plain_model(folder)
    round_weights(model, bits)
    error = (logits(model) - exact).abs()
    # A row's codes are half a step off at most, a step being a 127th of its group's largest number.
    assert error.mean() < 0.05 * exact.std()
    # Without rounding the logits are others: what is compared is the rounded weights.
    assert bits == 8 or (logits(plain_model(folder)) - exact).abs().mean() > 3 * error.mean()


def save_family(family: str, folder: Path, head_dim: int = 32) -> Path:
    """A tiny model whose heads have `head_dim` dimensions: multiples of 32 are what the CPU kernels take."""
    config = tiny_config(family)
    sizes = {"hidden_size": 4 * head_dim, "intermediate_size": 192, "num_attention_heads": 4}
    optional = {"num_key_value_heads": 2, "head_dim": head_dim}
    sizes |= {name: size for name, size in optional.items() if getattr(config, name, None)}
    of_family(type(config)(**config.to_dict() | sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "family",
    [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in sorted(DENSE_FAMILIES)],
)
def test_a_rounded_model_of_a_described_family(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    exact = expected(folder, 4)
    model = plain_model(folder)
    round_weights(model, 4)
    error = (logits(model) - exact).abs()
    assert error.mean() < 0.05 * exact.std()
    assert (logits(plain_model(folder)) - exact).abs().mean() > 3 * error.mean()
    settings = EngineSettings(str(folder), "float32", threads=1, quantization="int4", kv_pages=32, exact=True)
    engine = load_target_engine(settings, lambda *_: None)
    assert engine.description.quantization == "int4"
    alone = decoded(engine, PROMPTS[-1:], NEW_TOKENS)
    assert decoded(engine, PROMPTS, NEW_TOKENS, WRONG_DRAFTS)[-1:] == alone
    assert decoded(engine, PROMPTS[-1:], NEW_TOKENS, [token for token, _ in alone[0]][1:4]) == alone


def test_routers_are_not_rounded(tmp_path: Path) -> None:
    """Of this family, transformers looks at the router's own weight."""
    model = plain_model(save_family("hunyuan_v1_moe", tmp_path))
    round_weights(model, 4)
    layer = model.base_model.layers[0]
    assert type(layer.mlp.gate.wg) is torch.nn.Linear
    assert isinstance(layer.self_attn.q_proj, QuantizedLinear)
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("family", ["gemma2", pytest.param("glm4", marks=pytest.mark.slow)])
def test_layers_of_other_sizes_are_transformers_own_with_packed_products(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path, head_dim=16)
    exact = expected(folder, 4)
    model = plain_model(folder)
    round_weights(model, 4)
    error = (logits(model) - exact).abs()
    assert not isinstance(model.base_model, KernelDecoder)
    assert isinstance(model.base_model.layers[0].mlp.down_proj, KernelLinear)
    assert error.mean() < 0.05 * exact.std()
    assert (logits(plain_model(folder)) - exact).abs().mean() > 3 * error.mean()


def test_embeddings_of_codes_are_scaled_as_transformers_scales_them(tmp_path: Path) -> None:
    """In bfloat16, where the factor is rounded, and the product once more."""
    folder = save_family("gemma3_text", tmp_path, head_dim=40)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own, tokens = model.get_input_embeddings(), torch.tensor([TOKENS])
    assert float(own.embed_scale) != own.scalar_embed_scale
    with torch.no_grad():
        own.weight.copy_(rounded(own.weight, 8).expanded())
    exact = own(tokens)
    round_weights(model, 8)
    assert torch.equal(model.get_input_embeddings()(tokens), exact)
    replace_linears(model, compiled_kernels(torch.bfloat16))
    assert isinstance(model.get_input_embeddings(), KernelEmbedding)
    assert torch.equal(model.get_input_embeddings()(tokens), exact)


def test_factors_of_embeddings_are_rounded_once(tmp_path: Path) -> None:
    folder = save_family("gemma3_text", tmp_path, head_dim=40)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    converted(model, torch.float16)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    assert model.get_input_embeddings().embed_scale == wanted.get_input_embeddings().embed_scale


def test_a_quantised_weight_of_another_module_is_refused(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("qwen3_moe", tmp_path)
    quantize_to_int8(folder, ("mlp.gate.weight",))
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.mlp\.gate\.weight of a Qwen3MoeTopKRouter, must be of"
    ):
        build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=True)


def test_codes_of_a_module_that_the_model_names_otherwise_are_refused(tmp_path: Path) -> None:
    folder = save_family("gpt_neox", tmp_path)
    quantize_to_int8(folder, ("embed_out.weight",))
    with pytest.raises(UnsupportedModelError, match=r"gpt_neox has a quantised weight embed_out\.weight of no module"):
        build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=True)


@pytest.mark.parametrize("family", ["gemma3_text", "glm4", "gpt_neox", "phi3"])
def test_a_checkpoint_with_codes_of_all_layers_and_of_the_embedding(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    plain = plain_model(folder).eval()
    numbers = quantize_to_int8(folder, (*JOINED, "embed_tokens.weight", "embed_in.weight"))
    # As transformers names the head of gpt_neox.
    plain.load_state_dict({name.replace("embed_out", "lm_head"): weight for name, weight in numbers.items()})
    exact = logits(plain)
    kept = build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=True)
    assert sum(isinstance(module, QuantizedLinear) for module in kept.modules()) >= 2 * 4
    assert isinstance(kept.get_input_embeddings(), QuantizedEmbedding)
    assert (logits(kept) - exact).abs().mean() < 0.05 * exact.std()
    expanded = build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=False)
    assert torch.allclose(logits(expanded), exact, rtol=1e-4, atol=1e-4)
    described = load_target_engine(EngineSettings(str(folder), kv_pages=40), lambda *_: None).description
    assert described.quantization == "compressed-tensors"


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path)
    plain = plain_model(folder).eval()
    plain.load_state_dict(quantize_to_int8(folder))
    exact = logits(plain)
    kept = build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=True)
    assert is_quantized(kept)
    assert (logits(kept) - exact).abs().mean() < 0.05 * exact.std()
    expanded = build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=False)
    assert not is_quantized(expanded)
    assert torch.allclose(logits(expanded), exact, rtol=1e-4, atol=1e-4)
    for quantization, found in (("auto", "compressed-tensors"), ("none", "none")):
        settings = EngineSettings(str(folder), quantization=quantization, kv_pages=40)
        assert load_target_engine(settings, lambda *_: None).description.quantization == found


def test_a_head_shares_the_codes_of_its_embedding_on_any_device(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path)
    model = plain_model(folder)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    round_weights(model, 4)
    moved(model, torch.device("meta"))
    embedding, head = model.get_input_embeddings().quantized, model.get_output_embeddings().quantized
    assert embedding.codes.device.type == "meta"
    assert all(getattr(head, name) is getattr(embedding, name) for name in ("codes", "scales", "minimums"))


def test_rounding_asks_for_plain_weights(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path)
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8").rstrip().removesuffix("}")
    config.write_text(text + ', "quantization_config": {"quant_method": "fp8"}}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="quantization is 'int4', must be auto or none"):
        load_target_engine(EngineSettings(str(folder), quantization="int4", kv_pages=40), lambda *_: None)


def test_a_head_of_its_own_beside_an_embedding_of_codes_is_used(tmp_path: Path) -> None:
    """Though config.json says that they are one, as transformers finds two that differ."""
    folder, _ = save_tiny_pair("llama", tmp_path)
    quantize_to_int8(folder)
    stored = load_file(folder / "model.safetensors")
    codes = stored["model.embed_tokens.weight"]
    scales = codes.abs().amax(1, keepdim=True) / 127
    stored |= {"model.embed_tokens.weight": (codes / scales).round().to(torch.int8)}
    stored["model.embed_tokens.weight_scale"] = scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
    model = build_model(folder, AutoConfig.from_pretrained(folder), torch.float32, keep=True)
    assert torch.equal(model.get_output_embeddings().weight, stored["lm_head.weight"])


def test_the_page_of_models_lists_the_files_that_are_read() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Quantised weights")[2].partition("\n## ")[0]
    lists = [{*re.findall(r"[\w-]+", found)} for found in re.findall(r"(?:`[\w-]+`,\s+)+`[\w-]+`", section)]
    assert lists == [set(ARCHITECTURES), set(PRES)]
