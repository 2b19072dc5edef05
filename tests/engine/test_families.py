"""Families of models: tiny ones give the tokens of `model.generate`, and unsupported ones are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModelError
from engine.kv.pages import PageTable
from engine.models.compatibility import PROVED_FAMILIES, check_config
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from engine.steps import VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters

VOCABULARY = 96
WINDOW = 9
NEW_TOKENS = 12
LENGTHS = (2, 6, 11, 30)
PROMPTS = [[(7 * place + number) % VOCABULARY for place in range(length)] for number, length in enumerate(LENGTHS)]
WRONG_DRAFTS = (3, 5)
NOT_EXACT = {"aria_text"}
"""Served with `--no-exact` only: its experts, which do not use transformers' interface, compute rows of different
sequences together."""
QUICK = ("gpt2", "phi")
"""One projection for query, key and value with learned positions; separate ones with partial rotation."""
REFUSED = {
    "bert": "sees later positions",
    "bloom": "calls attention 0 times in 2 passes",
    "deepseek_v3": "cannot compute on paged KV",
    "doge": "masks its attention by itself",
    "jetmoe": "computes other logits on paged KV than by itself",
    "gptj": "does not use transformers' attention interface",
    "mamba": "has no attention heads",
    "stablelm": "does not pass keyword arguments on to its attention",
}
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **{"moe_num_experts": 4, "hidden_size_per_layer_input": 16, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
}
"""Set where a family's configuration has a number of this name."""


def tiny_config(family: str) -> PreTrainedConfig:
    """The family's default configuration with small sizes, and with sliding windows in some layers where it can have
    them."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    sizes: dict[str, Any] = {
        name: size
        for name, size in SIZES.items()
        if isinstance(getattr(default, name, None), int) and not isinstance(getattr(kind, name, None), property)
    }
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    optional: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    optional |= {"attn_logit_softcapping": 2.0, "layer_types": ["sliding_attention", "full_attention"]}
    more = {name: value for name, value in optional.items() if hasattr(default, name)}
    if not hasattr(default, "sliding_window"):
        more = {}
    if family == "ministral":
        more["head_dim"] = SIZES["head_dim"]  # its default is no number
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        return kind(**sizes, **more, **tokens, tie_word_embeddings=False)
    except StrictDataclassError:
        return kind(**sizes, **more, tie_word_embeddings=False)  # this family must have special tokens


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Weights spread widely enough that the next token depends on the context and no two logits are nearly equal."""
    torch.manual_seed(0)
    # Soft caps are left out by SDPA.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


def load(folder: Path, exact: bool = False, max_model_len: int | None = None) -> TargetEngine:
    settings = EngineSettings(
        str(folder),
        "float32",
        threads=1,
        page_size=8,
        kv_pages=64,
        max_num_batched_tokens=32,
        max_model_len=max_model_len,
        exact=exact,
    )
    return load_target_engine(settings, lambda *_: None)


def decode(engine: TargetEngine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The prompts in one batch. Every round also verifies wrong drafts, so that KV is written and dropped."""
    tables = [PageTable() for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    fed = list(prompts)
    while any(len(output) < NEW_TOKENS for output in outputs):
        rows = [
            VerifyRow(table, feed, WRONG_DRAFTS, True, [*prompt, *output], len(prompt), SamplingParameters())
            for table, feed, prompt, output in zip(tables, fed, prompts, outputs, strict=True)
        ]
        for index, outcome in enumerate(engine.step(rows).rows):
            assert outcome.error is None
            outputs[index] += outcome.tokens
            fed[index] = outcome.tokens[-1:]
    return [output[:NEW_TOKENS] for output in outputs]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    "family",
    [family if family in QUICK else pytest.param(family, marks=pytest.mark.long) for family in sorted(PROVED_FAMILIES)],
)
def test_a_proved_family_gives_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family))
    model.save_pretrained(tmp_path)
    assert decode(load(tmp_path, exact=family not in NOT_EXACT)) == [generated(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_other_families_are_refused(family: str, tmp_path: Path) -> None:
    assert family not in PROVED_FAMILIES
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
        load(tmp_path)


FACTORS = {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.0}


# Prompts of which `model.generate` picks the frequencies that all sequences of the engine have: those of its longest.
@pytest.mark.parametrize(
    ("family", "kind", "original", "max_model_len", "prompts"),
    [
        ("llama", "dynamic", None, None, PROMPTS),
        ("llama", "longrope", 32, 32, PROMPTS[:3]),
        ("phi3", "longrope", 8, None, PROMPTS[2:]),
    ],
)
def test_positions_do_not_depend_on_the_batch(
    family: str, kind: str, original: int | None, max_model_len: int | None, prompts: list[list[int]], tmp_path: Path
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope = LONGROPE | {"original_max_position_embeddings": original}
    config = tiny_config(family)
    positions = {"rope_parameters": rope, "original_max_position_embeddings": original}
    model = tiny_model(type(config)(**config.to_dict() | positions))
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, max_model_len=max_model_len)
    assert decode(engine, prompts) == [generated(model, prompt) for prompt in prompts]
    assert decode(engine, PROMPTS[:1]) == decode(engine, [PROMPTS[0], prompts[-1]])[:1]


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("phimoe", {"rope_parameters": LONGROPE | MSCALES}, "type longrope, which is supported in llama and phi3 only"),
        ("qwen2", {"rope_parameters": LONGROPE | {"rope_type": "dynamic"}}, "type dynamic, which is supported in"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8]}, "layers of 8 attention heads, must be of num_attention"),
    ],
)
def test_layers_that_no_test_has_tried_are_refused(family: str, changed: dict[str, Any], reason: str) -> None:
    config = tiny_config(family)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(type(config)(**config.to_dict() | changed))
