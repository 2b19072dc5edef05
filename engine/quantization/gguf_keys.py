"""Keys of GGUF files: those that Spool reads, those that change no number or token, and the refusal of all others.

Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spool.engine.errors import UnsupportedModelError
from spool.engine.leftovers import WAY_OUT, is_ignored
from spool.engine.quantization.gguf_architectures import ARCHITECTURES
from spool.engine.quantization.gguf_file import GgufFile

_SAMPLING = {
    "temp": ("temperature", 0.0, 100.0),
    "top_k": ("top_k", 0.0, math.inf),
    "top_p": ("top_p", 0.0, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 0.01, 100.0),
}
"""After `general.sampling.`: what generation_config.json calls the same, and the least and the most that it may be."""

_Rule = Callable[[Any, GgufFile], bool]
"""Whether a key with this value is read, or changes nothing."""


def _any(value: object, file: GgufFile) -> bool:
    return True


def _only(*allowed: object) -> _Rule:
    return lambda value, file: value in allowed


def _within(least: float, most: float) -> _Rule:
    return lambda value, file: isinstance(value, int | float) and value is not True and least <= value <= most


def _as_wide_as_a_head(value: object, file: GgufFile) -> bool:
    kind = file.metadata["general.architecture"]
    heads, hidden = (file.metadata.get(f"{kind}.{name}") for name in ("attention.head_count", "embedding_length"))
    own = hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None
    return value == file.metadata.get(f"{kind}.attention.key_length", own)


def _sees_everything(value: object, file: GgufFile) -> bool:
    """A window that no sequence fills."""
    kind = file.metadata["general.architecture"]
    longest = file.metadata.get(f"{kind}.context_length")
    return value == 0 or (isinstance(value, int) and isinstance(longest, int) and value >= longest)


_GEMMA3_LAYERS = 6
"""Of so many layers of Gemma 3, the last sees everything."""


def _is_gemma3_pattern(value: object, file: GgufFile) -> bool:
    layers = file.metadata.get("gemma3.block_count")
    if isinstance(value, list) and isinstance(layers, int):
        return value == [bool((layer + 1) % _GEMMA3_LAYERS) for layer in range(min(layers, len(value) + 1))]
    return value == _GEMMA3_LAYERS


_OF_ARCHITECTURE: Mapping[str, _Rule] = {
    **dict.fromkeys(("context_length", "embedding_length", "feed_forward_length", "block_count"), _any),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "attention.key_length"), _any),
    **dict.fromkeys(("attention.value_length", "rope.dimension_count"), _any),
    **dict.fromkeys(("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"), _any),
    **dict.fromkeys(("rope.scaling.original_context_length", "vocab_size"), _any),
    "rope.scaling.finetuned": _only(True, False),
    "attention.sliding_window": _sees_everything,
    "attention.sliding_window_pattern": _is_gemma3_pattern,
    **dict.fromkeys(
        ("rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa"), _as_wide_as_a_head
    ),
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "nextn_predict_layers", "leading_dense_block_count"), _only(0)
    ),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "pooling_type"), _only(0)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers"), _only(0)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), _only(1.0)),
    "attention.causal": _only(True),
    "use_parallel_residual": _only(False),
    # How converters of the first Llama models named the order of rows that all files of this architecture have.
    "tensor_data_layout": _only("Meta AI original pth"),
}
_TOKENS: Mapping[str, _Rule] = {
    **dict.fromkeys(("model", "pre", "tokens", "token_type", "scores", "merges"), _any),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), _only(True, False)),
    **dict.fromkeys((f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")), _any),
    # Names of tokens that nothing adds to a text by itself.
    **dict.fromkeys((f"{name}_token_id" for name in ("seperator", "separator", "mask", "cls")), _any),
    **dict.fromkeys((f"{name}_token_id" for name in ("prefix", "suffix", "middle")), _any),
    **dict.fromkeys((f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")), _any),
    "token_type_count": _any,
    "add_sep_token": _only(False),
    "remove_extra_whitespaces": _only(False),
}
_GENERAL: Mapping[str, _Rule] = {
    "type": _only("model"),
    "quantization_version": _only(2),
    **{f"sampling.{name}": _within(*limits) for name, (_, *limits) in _SAMPLING.items()},
}
_TOWERS = ("vision.", "audio.", "mm.")
"""Of an architecture's keys, those that are of towers for images and sound beside the text model."""
_OTHER_KINDS = ("adapter", "clip", "diffusion", "xielu")
"""Namespaces of what is no plain decoder. Any further ones are notes of whoever made the file."""


def sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """What the file says of sampling, by the names of generation_config.json; without values that `check_keys`
    refuses."""
    found: dict[str, Any] = {}
    for key, (name, *limits) in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if _within(*limits)(value, file):
            found[name] = value
    return found


def check_keys(file: GgufFile, ignored: Sequence[str]) -> None:
    """Raises UnsupportedModelError for a key whose value may change numbers or tokens without Spool knowing how, unless
    it is one of `ignored`, names or patterns as in a shell."""
    kind = file.metadata.get("general.architecture")
    for key, value in file.metadata.items():
        space, _, name = key.partition(".")
        if space == kind:
            of_kind = {*ARCHITECTURES[kind].keys, ARCHITECTURES[kind].epsilon[1]} if kind in ARCHITECTURES else ()
            known = _any if name.startswith(_TOWERS) or name in of_kind else _OF_ARCHITECTURE.get(name)
        elif key.startswith("tokenizer.ggml."):
            known = _TOKENS.get(key.removeprefix("tokenizer.ggml."))
        elif space == "tokenizer":
            # Other templates than the default one, and the tokenizer once more.
            known = _any if name.startswith("chat_template") or name == "huggingface.json" else None
        elif space == "general":
            known = _GENERAL.get(name, None if name.startswith("sampling.") else _any)
        else:
            known = None if space in _OTHER_KINDS else _any
        if (known is None or not known(value, file)) and not is_ignored(key, ignored):
            raise UnsupportedModelError(f"{file.path.name}: {key} is {value!r:.60}, which is not supported: {WAY_OUT}")
