"""What config.json says of a drafter in the format of speculators, a package of vLLM's project (0.9.0). Knows no torch.

Every key is used, known to change no proposal, or refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool.engine.errors import UnsupportedModelError
from spool.engine.leftovers import WAY_OUT, is_ignored, listed

_DEFAULT_FAMILY = "qwen3"
_FAMILIES = {"eagle3": ("llama", "qwen3"), "peagle": ("llama", "qwen3"), "dflash": ("qwen3",)}
"""Whose layers drafters have."""

_OF_ALL = {"speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size"}
_FLAGS_OF_EAGLE = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
_FLAGS_OF_DFLASH = {"sample_from_anchor", "sliding_window_non_causal"}
_OF_EAGLE = _OF_ALL | _FLAGS_OF_EAGLE | {"eagle_aux_hidden_state_layer_ids"}
_USED = {
    "eagle3": _OF_EAGLE,
    "peagle": _OF_EAGLE | {"mask_token_id"},
    "dflash": _OF_ALL | _FLAGS_OF_DFLASH | {"aux_hidden_state_layer_ids", "block_size", "mask_token_id"},
}
"""Keys that say what a drafter of each type computes."""
_NUMBERS = ("draft_vocab_size", "block_size", "mask_token_id")
"""Those of them that have to be there where they are used."""

_UNUSED = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "has_no_defaults_at_init", "embed_requires_grad"),
    *("speculators_config", "speculators_version", "tie_word_embeddings", "transformers_version"),
}
"""Keys that change no proposal: the package makes nothing of them when it proposes, and never ties embeddings."""
_OF_SPECULATORS_CONFIG = {"algorithm", "proposal_methods", "default_proposal_method", "verifier"}
"""How many tokens are proposed and which are accepted, which here others decide; and the target's name."""

_OF_LAYERS = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
}
_UNUSED_OF_LAYERS = {
    *("architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("initializer_range", "pretraining_tp", "tie_word_embeddings", "transformers_version", "use_cache"),
}
_OF_ROPE = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """`layers`: of the decoder layers, as transformers' `family` has them; `fields`: what is said beside them.
    `prefix`: of the tensors of a layer, by its number. `is_speculator`: whether it is in the format of speculators."""

    family: str
    layers: dict[str, Any]
    fields: dict[str, Any]
    prefix: str = "layers.{}"
    is_speculator: bool = True

    def flag(self, name: str) -> bool:
        return bool(self.fields.get(name))


def read_drafter_config(folder: Path, ignored: Sequence[str]) -> DrafterConfig:
    """Of a type that `drafter_class` knows. Raises UnsupportedModelError that names a key which is unknown, but those
    of `ignored`, or which says what cannot be."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{folder.name}/config.json cannot be read: {error}") from error
    kind = fields["speculators_model_type"]
    layers, about = (_object(folder, fields, name) for name in ("transformer_layer_config", "speculators_config"))
    rope = {name: _object(folder, layers, name) for name in ("rope_parameters", "rope_scaling")}
    unknown = _beside(fields, _USED[kind] | _UNUSED)
    unknown += [f"speculators_config.{name}" for name in _beside(about, _OF_SPECULATORS_CONFIG)]
    unknown += [f"transformer_layer_config.{name}" for name in _beside(layers, _OF_LAYERS | _UNUSED_OF_LAYERS)]
    for key, one in rope.items():
        unknown += [f"transformer_layer_config.{key}.{name}" for name in _beside(one, _OF_ROPE)]
    if unknown := [name for name in unknown if not is_ignored(name, ignored)]:
        raise UnsupportedModelError(f"{folder.name}/config.json has {listed(unknown)}, which is not known: {WAY_OUT}")
    family = layers.get("model_type", _DEFAULT_FAMILY)
    expected: dict[str, tuple[Any, Collection[Any]]] = {
        "transformer_layer_config.model_type": (family, _FAMILIES[kind]),
        "speculators_config.algorithm": (about.get("algorithm", kind), (kind,)),
        "target_hidden_size": (fields.get("target_hidden_size"), (None, layers.get("hidden_size"))),
    }
    of_numbers = {name: fields.get(name) for name in _NUMBERS if name in _USED[kind]}
    for name, number in of_numbers.items():
        if type(number) is not int or number < 0:
            raise UnsupportedModelError(f"{folder.name}: {name} is {number!r}, must be a number")
    expected |= {name: (fields[name], (False, True)) for name in (_FLAGS_OF_EAGLE | _FLAGS_OF_DFLASH) & fields.keys()}
    if fields.get("norm_before_fc"):
        expected["fc_norm with norm_before_fc"] = fields.get("fc_norm", False), (False,)
    for name, (found, allowed) in expected.items():
        if found not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise UnsupportedModelError(f"{folder.name}: {name} is {found!r}, must be {wanted}")
    return DrafterConfig(family, layers, fields)


def _object(folder: Path, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name)
    if found is not None and not isinstance(found, dict):
        raise UnsupportedModelError(f"{folder.name}/config.json: {name} is {found!r}, must be an object")
    return found or {}


def _beside(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [name for name in fields if name not in known]
