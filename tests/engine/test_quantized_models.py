"""Quantised models compute what their expanded weights do, but for the rounding of rows to eight bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.loading import load_target_engine
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.quantization.model import build_model, is_quantized, moved, round_weights
from spool.engine.quantization.rounding import rounded
from spool.engine.settings import EngineSettings
from tests.support.cpu_kernels import compiled_kernels
from tests.support.decoding import paged_logits
from tests.support.tiny_models import VOCABULARY, quantize_to_int8, save_tiny_pair

TOKENS = [(7 * place + 3) % VOCABULARY for place in range(40)]


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
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends = "embed_tokens" in name or "lm_head" in name
            parameter.copy_(rounded(parameter, 8 if ends else bits).expanded())
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
