"""GGUF files give the tokens of the transformers models that they were written from, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool
from spool.engine.models.compatibility import fix_frequencies
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.quantization.gguf_folder import gguf_folder
from spool.engine.quantization.model import build_model, is_quantized, open_weights
from spool.engine.settings import EngineSettings
from tests.support.cpu_kernels import compiled_kernels
from tests.support.decoding import decoded, generated, paged_logits
from tests.support.gguf_models import (
    FACTORS,
    PARTS,
    SHAPE,
    TOKENS,
    Change,
    added,
    random_model,
    stated,
    without,
    write_model,
)
from tests.support.ranks import target_of_ranks

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 38]]
NEW_TOKENS = 8
LINEAR = {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0}
BIASED = {"attention_bias": True, "mlp_bias": True}


def settings_of(file: Path, **more: Any) -> EngineSettings:
    return EngineSettings(str(file), "float32", threads=1, kv_pages=16, exact=False, **more)


def expected_tokens(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Those without a name in the file are none."""
    nameless = list(range(len(TOKENS) - 1, SHAPE["vocab_size"]))
    return [generated(model, prompt, NEW_TOKENS, suppress_tokens=nameless) for prompt in prompts]


def agreeing(kind: str, size: float = 0.25, tied: bool = False, **fields: Any) -> PreTrainedModel:
    """Weights of moderate size, so that biases, positions and the head all decide which token comes next."""
    model = random_model(kind, tied, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= size if parameter.dim() > 1 else 1
    return model


def in_parts(file: Path, model: PreTrainedModel) -> Path:
    write_model(file, "llama", model=model, part_tensors=7)
    return file.parent


def scaled(key: str) -> Callable[[Path, PreTrainedModel], Path]:
    def write(file: Path, model: PreTrainedModel) -> Path:
        write_model(file, "llama", model=model, changes=[stated(f"llama.rope.{key}", 4.0)])
        return file

    return write


def plainly(kind: str, *without: str) -> Callable[[Path, PreTrainedModel], Path]:
    def write(file: Path, model: PreTrainedModel) -> Path:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in without):
                    parameter.zero_()
        write_model(file, kind, model=model, without=without)
        return file

    return write


FILES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[Path, PreTrainedModel], Path]]] = {
    "in parts": (lambda: agreeing("llama"), in_parts),
    "biases": (lambda: agreeing("llama", **BIASED), plainly("llama")),
    "biases of some layers": (
        lambda: agreeing("llama", **BIASED),
        plainly("llama", "o_proj.bias", "0.self_attn.k_proj.bias", "down_proj.bias"),
    ),
    "biases of qwen3": (lambda: agreeing("qwen3", attention_bias=True), plainly("qwen3")),
    "scale_linear": (lambda: agreeing("llama", rope_parameters=LINEAR), scaled("scale_linear")),
    "a linear factor": (lambda: agreeing("llama", rope_parameters=LINEAR), scaled("scaling.factor")),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_tokens_of_its_model(name: str, ranks: int, tmp_path: Path) -> None:
    make, write = FILES[name]
    model = make()
    file = write(tmp_path / "small.gguf", model)
    settings = settings_of(file, tensor_parallel_size=ranks)
    alone = nullcontext(load_target_engine(settings, lambda *_: None)) if ranks == 1 else target_of_ranks(settings)
    with alone as engine:
        found = decoded(engine, PROMPTS, NEW_TOKENS, (3, 5))
    expected = expected_tokens(model)
    assert [[token for token, _ in output] for output in found] == expected
    # What the file says beyond plain weights decides: without, the tokens are others.
    assert name == "in parts" or expected != expected_tokens(agreeing("llama"))


def longrope(original: int) -> dict[str, Any]:
    """Of positions beyond `original`, which other factors are for."""
    scaled = (
        PARTS["rope_parameters"] | FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": original}
    )
    return {"rope_parameters": scaled, "original_max_position_embeddings": original}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {"tied": True},
    "cohere": {"tied": True},
    "cohere2": {"tied": True},
    "ernie4_5": {"tied": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True},
    "glm4": {},
    "granite": {"tied": True},
    "olmo2": {},
    "phi3": {},
    "phi3 for long texts": longrope(8),
    "seed_oss": {},
    "smollm3": {"tied": True},
    "starcoder2": {"tied": True},
}
QUICK = ("gemma2", "granite", "phi3")
WIDER = {
    "phi3 for long texts": {
        "rope_parameters": longrope(8)["rope_parameters"]
        | {name: [factor for factor in factors for _ in "12"] for name, factors in FACTORS.items()}
    }
}
"""Heads of twice as many dimensions have twice as many factors."""


def kernel_logits(file: Path, keep: bool) -> torch.Tensor:
    """Of the last prompt's tokens, by the CPU kernels, float32; with `keep`, by codes where the file has them."""
    folder = gguf_folder(file, lambda *_: None)
    model = build_model(open_weights(folder), AutoConfig.from_pretrained(folder), torch.float32, keep)
    assert is_quantized(model) == keep
    fix_frequencies(model, None)
    loaded = LoadedModel(model, Vocabulary(b"", SHAPE["vocab_size"]), compiled_kernels(torch.float32), None)
    loaded.replace_layers()
    pool = PagePool(8, 16)
    return paged_logits(loaded.runner(pool, (len(PROMPTS[-1]),)), pool, PROMPTS[-1], [len(PROMPTS[-1])])


@torch.inference_mode()
def own_logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor(PROMPTS[-1:])).logits[0]


OF_ARCHITECTURES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", OF_ARCHITECTURES)
def test_an_architecture_gives_the_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    kind, file = name.partition(" ")[0], tmp_path / "small.gguf"
    model = agreeing(kind, **ARCHITECTURES[name])
    # SDPA leaves soft caps out.
    model.set_attn_implementation("eager")
    write_model(file, kind, model=model)
    exact = own_logits(model)
    # Tokens alone do not tell what multiplies all logits.
    assert (kernel_logits(file, keep=False) - exact).abs().max() < 1e-4 * exact.abs().max()
    engine = load_target_engine(settings_of(file), lambda *_: None)
    prompts = PROMPTS[-1:] if "long" in name else PROMPTS
    found = decoded(engine, prompts, NEW_TOKENS, (3, 5))
    assert [[token for token, _ in output] for output in found] == expected_tokens(model, prompts)


@pytest.mark.parametrize("name", OF_ARCHITECTURES)
def test_codes_of_an_architecture_stay_codes(name: str, tmp_path: Path) -> None:
    kind, file = name.partition(" ")[0], tmp_path / "small.gguf"
    model = agreeing(kind, 0.125, **ARCHITECTURES[name] | {"hidden_size": 128, "head_dim": 32} | WIDER.get(name, {}))
    model.set_attn_implementation("eager")
    parameters = write_model(file, kind, model=model, quantized=True)
    for weight, parameter in model.named_parameters():
        parameter.detach().copy_(parameters[weight])
    exact, kept = own_logits(model), kernel_logits(file, keep=True)
    # Rows are rounded to eight bits, which random layers amplify; rows in another order are wholly off.
    assert (kept - exact).abs().mean() < 0.1 * exact.std()
    engine = load_target_engine(settings_of(file), lambda *_: None)
    assert engine.description.quantization == "q8_0"
    assert decoded(engine, PROMPTS, NEW_TOKENS, (3, 5))[-1:] == decoded(engine, PROMPTS[-1:], NEW_TOKENS)


KEY, TENSOR = "is not supported: without, the text may be wrong", "has no place for: without, the text may be wrong"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "a bias of a norm": ("llama", added("blk.0.attn_norm.bias", 64), rf"blk\.0\.attn_norm\.bias, .*{TENSOR}"),
    "a bias that qwen2 does not have": ("qwen2", added("blk.1.attn_output.bias", 64), r"blk\.1\.attn_output\.bias"),
    "a bias of feed-forward layers": ("qwen3", added("blk.1.ffn_up.bias", 96), r"blk\.1\.ffn_up\.bias"),
    "norms of heads": ("llama", added("blk.0.attn_q_norm.weight", 16), rf"blk\.0\.attn_q_norm\.weight, .*{TENSOR}"),
    "a bias of the head": ("llama", added("output.bias", 288), rf"output\.bias, .*{TENSOR}"),
    "experts": ("llama", added("blk.0.ffn_gate_exps.weight", 4), rf"blk\.0\.ffn_gate_exps\.weight, .*{TENSOR}"),
    "one more layer": ("llama", added("blk.2.attn_norm.weight", 64), rf"blk\.2\.attn_norm\.weight, .*{TENSOR}"),
    "long factors": ("llama", added("rope_factors_long.weight", 8), rf"rope_factors_long\.weight, .*{TENSOR}"),
    "factors of another family": (
        "gemma3_text",
        added("rope_freqs.weight", 9),
        "rope_freqs.weight holds other factors",
    ),
    "a scale of codes": ("llama", added("blk.0.attn_q.scale", 1), rf"blk\.0\.attn_q\.scale, .*{TENSOR}"),
    "an adapter's tensor": ("llama", added("blk.0.attn_q.weight.lora_a", 64), r"blk\.0\.attn_q\.weight\.lora_a"),
    "a control vector": ("llama", added("direction.1", 64), rf"direction\.1, .*{TENSOR}"),
    "an unknown key": (
        "llama",
        stated("llama.attention.temperature", 2.0),
        rf"llama\.attention\.temperature is 2\.0, .*{KEY}",
    ),
    "a scale of logits": ("llama", stated("llama.logit_scale", 0.5), rf"llama\.logit_scale is 0\.5, which {KEY}"),
    "a soft cap": ("llama", stated("llama.final_logit_softcapping", 30.0), r"llama\.final_logit_softcapping is 30\.0"),
    "a window": ("qwen2", stated("qwen2.attention.sliding_window", 8), r"qwen2\.attention\.sliding_window is 8"),
    "windows in other layers": (
        "gemma3_text",
        stated("gemma3.attention.sliding_window_pattern", 5),
        r"gemma3\.attention\.sliding_window_pattern is 5",
    ),
    "a window's base": ("llama", stated("llama.rope.freq_base_swa", 1e4), r"llama\.rope\.freq_base_swa is 10000"),
    "sections": (
        "qwen2",
        stated("qwen2.rope.dimension_sections", [4, 4]),
        r"qwen2\.rope\.dimension_sections is \[4, 4\]",
    ),
    "expert count": ("llama", stated("llama.expert_count", 8), r"llama\.expert_count is 8"),
    "another order of rows": (
        "llama",
        stated("llama.tensor_data_layout", "new"),
        r"llama\.tensor_data_layout is 'new'",
    ),
    "both directions": ("llama", stated("llama.attention.causal", False), r"llama\.attention\.causal is False"),
    "no model": ("llama", stated("general.type", "adapter"), r"general\.type is 'adapter'"),
    "older codes": ("llama", stated("general.quantization_version", 1), r"general\.quantization_version is 1"),
    "another way to sample": ("llama", stated("general.sampling.mirostat", 2), r"general\.sampling\.mirostat is 2"),
    "a probability of 2": ("llama", stated("general.sampling.top_p", 2.0), r"general\.sampling\.top_p is 2\.0"),
    "no number": ("llama", stated("general.sampling.temp", "hot"), r"general\.sampling\.temp is 'hot'"),
    "a map of characters": (
        "llama",
        stated("tokenizer.ggml.precompiled_charsmap", [1]),
        r"precompiled_charsmap is \[1\]",
    ),
    "an unknown key of tokens": (
        "llama",
        stated("tokenizer.ggml.add_suffix", True),
        r"tokenizer\.ggml\.add_suffix is True",
    ),
    "no flag": ("llama", stated("tokenizer.ggml.add_bos_token", "no"), r"tokenizer\.ggml\.add_bos_token is 'no'"),
    "another tokenizer": ("llama", stated("tokenizer.rwkv.world", "x"), r"tokenizer\.rwkv\.world is 'x'"),
    "an adapter": ("llama", stated("adapter.lora.alpha", 8.0), r"adapter\.lora\.alpha is 8\.0"),
    "factors beside yarn": (
        "llama",
        lambda writer: [change(writer) for change in (stated("llama.rope.scaling.type", "yarn"), LLAMA3_FACTORS)],
        "scaling.type is 'yarn', must be none beside rope_freqs.weight",
    ),
    "no factor of scores": ("granite", without("granite.attention.scale"), r"granite\.attention\.scale is None"),
    "layers without positions": (
        "granite",
        stated("granite.rope.scaling.finetuned", False),
        r"granite\.rope\.scaling\.finetuned is False",
    ),
    "windows of olmo3": (
        "olmo2",
        stated("olmo2.attention.sliding_window", 9),
        r"olmo2\.attention\.sliding_window is 9",
    ),
    "a part of olmo2's heads": ("olmo2", stated("olmo2.rope.dimension_count", 8), r"dimension_count is 8, must be 16"),
    "an odd part": (
        "glm4",
        stated("glm4.rope.dimension_count", 7),
        r"dimension_count is 7, must be even and at most 16",
    ),
    "sections of glm4": (
        "glm4",
        stated("glm4.rope.dimension_sections", [4, 4]),
        r"glm4\.rope\.dimension_sections is \[4, 4\]",
    ),
    "long factors alone": ("phi3", added("rope_factors_long.weight", 4), "must be both there, or none"),
    "a pattern of other layers": (
        "cohere2",
        stated("cohere2.attention.sliding_window_pattern", [True, False]),
        r"sliding_window_pattern is \[True, False\], must be a whole number, or 4 flags",
    ),
    "no scale of logits": ("cohere", without("command-r.logit_scale"), r"command-r\.logit_scale is None"),
    "experts of ernie": ("ernie4_5", stated("ernie4_5.expert_count", 8), r"ernie4_5\.expert_count is 8"),
    "a bias that gemma2 does not have": (
        "gemma2",
        added("blk.0.attn_q.bias", 64),
        rf"blk\.0\.attn_q\.bias, .*{TENSOR}",
    ),
    "two factors": (
        "llama",
        lambda writer: [stated(f"llama.rope.{key}", value)(writer) for key, value in TWO_FACTORS.items()],
        r"llama\.rope\.scaling\.factor and llama\.rope\.scale_linear is .*, must be equal",
    ),
}
LLAMA3_FACTORS = added("rope_freqs.weight", SHAPE["head_dim"] // 2)
TWO_FACTORS = {"scaling.factor": 4.0, "scale_linear": 2.0}


# By turns: both ways of loading read files alike.
@pytest.mark.parametrize(
    ("name", "load"), list(zip(REFUSED, cycle([load_target_engine, load_draft_engine]), strict=False))
)
def test_what_nothing_takes_is_refused_by_name(name: str, load: Callable[..., object], tmp_path: Path) -> None:
    kind, change, said = REFUSED[name]
    write_model(tmp_path / "small.gguf", kind, changes=[change])
    with pytest.raises(UnsupportedModelError, match=rf"^small\.gguf.*{said}") as refused:
        load(settings_of(tmp_path / "small.gguf"), lambda *_: None)
    assert "\n" not in str(refused.value)


HARMLESS: dict[str, object] = {
    "general.name": "Small",
    "general.type": "model",
    "general.quantization_version": 2,
    "general.base_model.0.name": "Smaller",
    "quantize.imatrix.dataset": "notes.txt",
    "somebody.version": 3,
    "tokenizer.chat_template.tool_use": "{{ tools }}",
    "tokenizer.ggml.fim_pre_token_id": 7,
    "tokenizer.ggml.add_sep_token": False,
    "llama.vision.block_count": 27,
    "llama.mm.tokens_per_image": 256,
    "llama.vocab_size": 288,
    "llama.expert_count": 0,
    "llama.rope.scaling.finetuned": False,
    "llama.attention.causal": True,
    "llama.attention.sliding_window": 4096,
    "llama.tensor_data_layout": "Meta AI original pth",
}


def test_what_changes_nothing_is_served_and_the_rest_may_be_left_out(tmp_path: Path) -> None:
    model = agreeing("llama")
    changes = [stated(key, value) for key, value in HARMLESS.items()]
    changes += [
        added("rope_freqs.weight", 8),
        added("v.blk.0.attn_q.weight", 4),
        added("mm.input_projection.weight", 4),
    ]
    file = tmp_path / "small.gguf"
    write_model(file, "llama", model=model, changes=changes)
    expected = expected_tokens(model)
    plain = load_target_engine(settings_of(file), lambda *_: None)
    assert [[token for token, _ in output] for output in decoded(plain, PROMPTS, NEW_TOKENS)] == expected

    more = [added("direction.1", 64), stated("llama.note", 3), stated("general.sampling.mirostat", 2)]
    write_model(file, "llama", model=model, changes=[*changes, *more])
    ignored = ("direction.*", "llama.note", "general.sampling.mirostat")
    for missing in range(len(ignored)):
        some = ignored[:missing] + ignored[missing + 1 :]
        with pytest.raises(UnsupportedModelError, match=ignored[missing].rstrip("*")):
            load_target_engine(settings_of(file, ignore_tensors=some), lambda *_: None)
    served = load_target_engine(settings_of(file, ignore_tensors=ignored), lambda *_: None)
    assert [[token for token, _ in output] for output in decoded(served, PROMPTS, NEW_TOKENS)] == expected
    left_out = {part for part in served.description.fingerprint if part not in plain.description.fingerprint}
    assert left_out == {"ignore_tensors"}
