"""Which models can be served: those of families that tests compare with transformers, with nothing that pages lack."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spool.engine.attention.backends import AttentionBackend, AttentionPlan, AttentionRule, Span
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.kv.paged_kv import LayerKv
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.layers.describing import family_of
from spool.engine.layers.rotation import inverse_frequencies
from spool.engine.models.families import PAGED_FAMILIES, SOLO_FAMILIES
from spool.engine.models.source import longest_sequence
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.quantization.checkpoints import check_quantization

# Its layers are Qwen2's, and transformers does not know the type.
_MIMO = "mimo"
CONFIG_MAPPING.register(_MIMO, Qwen2Config, exist_ok=True)

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Frequencies that transformers computes for the longest sequence of a pass.
_MOVING_ROPE = {"dynamic", "longrope"}
# Those whose rotary modules were tried with it. Others have such types of their own under the same names.
_MOVING_ROPE_FAMILIES = {"llama", "phi3"}
# Of frequencies that transformers computes by a library's powers.
_FREQUENCY_TOLERANCE = 1e-4


def check_config(config: PreTrainedConfig) -> None:
    """Refuses what can be told from a model's configuration. Raises UnsupportedModelError."""
    family = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{family} has an encoder, only decoders are supported")
    if family not in PAGED_FAMILIES | SOLO_FAMILIES | {_MIMO}:
        raise UnsupportedModelError(
            f"model_type is {family!r}, must be one of those that docs/models.md lists: these are known to be "
            "computed right, and the page says how another is added"
        )
    if family not in SOLO_FAMILIES:
        _check_attention(config)
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        [field] = (name for name, value in vars(config).items() if value is text)
        raise UnsupportedModelError(f"{family} has a {field}, must have none")
    check_sizes(text)
    if not getattr(text, "is_causal", True):
        raise UnsupportedModelError(f"{family} has is_causal {text.is_causal}, only causal models are supported")
    _check_windows(text)
    rope = getattr(text, "rope_parameters", None) or {}
    of_layers = {place: one for place, one in rope.items() if isinstance(one, dict) and "rope_type" in one}
    for kind in {one["rope_type"] for one in of_layers.values()} & _MOVING_ROPE:
        raise UnsupportedModelError(f"{family} has rotary positions of type {kind} by layers, which is not supported")
    if has_moving_rope(text) and family not in _MOVING_ROPE_FAMILIES:
        raise UnsupportedModelError(
            f"{family} has rotary positions of type {rope['rope_type']}, which is supported in "
            f"{' and '.join(sorted(_MOVING_ROPE_FAMILIES))} only"
        )
    check_quantization(config)


def _check_attention(config: PreTrainedConfig) -> None:
    """What pages ask for."""
    family = config.model_type
    if not getattr(config, "num_attention_heads", None):
        raise UnsupportedModelError(f"{family} has no attention heads, only models of attention are supported")
    if config.output_attentions:
        raise UnsupportedModelError(f"{family} has output_attentions, which paged attention does not give: unset it")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise UnsupportedModelError(
            f"{family} has layers of type {', '.join(sorted(others))}, must be of {' or '.join(sorted(_LAYER_TYPES))}"
        )
    heads = set(getattr(config, "num_attention_heads_per_layer", None) or ()) - {config.num_attention_heads}
    if heads:
        raise UnsupportedModelError(
            f"{family} has layers of {', '.join(map(str, sorted(heads)))} attention heads, must be of "
            f"num_attention_heads, which is {config.num_attention_heads}"
        )


def check_sizes(text: PreTrainedConfig) -> None:
    """Refuses what modules cannot be built of, by the name of the field. Raises UnsupportedModelError."""
    for field in _SIZES:
        size = getattr(text, field, None)
        if isinstance(size, int) and size < 1:
            raise UnsupportedModelError(f"{text.model_type} has {field} {size}, must be at least 1")
    for field in _ACTIVATIONS:
        name = getattr(text, field, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise UnsupportedModelError(f"{text.model_type} has {field} {name!r}, which transformers does not know")


def _check_windows(text: PreTrainedConfig) -> None:
    """Windows and chunks are of families that know them: the modules of any other see everything."""
    positions = getattr(text, "max_position_embeddings", None) or sys.maxsize
    longest = longest_sequence(positions, getattr(text, "rope_parameters", None))
    for field in ("sliding_window", "attention_chunk_size"):
        # Those of many published models are off, or as long as the longest text.
        length = getattr(text, field, None) if getattr(text, "use_sliding_window", True) else None
        sees_all = not length or length >= longest
        if not sees_all and not hasattr(type(text), field) and not hasattr(type(text)(), field):
            raise UnsupportedModelError(f"{text.model_type} has {field} {length}, which its layers do not have")
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()) and not hasattr(text, "sliding_window"):
        raise UnsupportedModelError(f"{text.model_type} has layers of type sliding_attention, which it does not know")


def has_moving_rope(config: PreTrainedConfig) -> bool:
    """Whether what the model computes depends on the longest sequence that is served (`fix_frequencies`)."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in _MOVING_ROPE


def fix_frequencies(model: PreTrainedModel, max_model_len: int | None) -> None:
    """Gives rotary positions, in place, the frequencies of the longest sequence that is served: those that transformers
    picks depend on the other sequences of a pass. To described families, those that every processor computes alike.
    Raises UnsupportedModelError."""
    is_described = family_of(model) is not None
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if is_described and isinstance(kind, str):
            _fix_table(module, "", module.config.rope_parameters, max_model_len)
            module.rope_type = "default"
        elif is_described and isinstance(kind, dict):
            for layer_type in kind:
                _fix_table(module, f"{layer_type}_", module.config.rope_parameters[layer_type], max_model_len)
        elif isinstance(kind, str) and kind in _MOVING_ROPE:
            of_kind, longest = ROPE_INIT_FUNCTIONS[kind], max_model_len or module.config.max_position_embeddings
            module.inv_freq, module.attention_scaling = of_kind(module.config, module.inv_freq.device, seq_len=longest)
            module.rope_type = "default"


def _fix_table(module: Any, prefix: str, rope: Mapping[str, Any], longest: int | None) -> None:
    """Of a rotary module, the table whose names begin with `prefix`."""
    own, positions = getattr(module, f"{prefix}inv_freq"), module.config.max_position_embeddings
    kind = rope["rope_type"]
    try:
        frequencies, scaling = inverse_frequencies(rope, 2 * len(own), positions, longest)
    except KeyError as error:
        raise UnsupportedModelError(f"rotary positions of type {kind} lack {error} or are unknown") from error
    if kind not in _MOVING_ROPE and not torch.allclose(frequencies, own.float().cpu(), rtol=_FREQUENCY_TOLERANCE):
        raise UnsupportedModelError(f"rotary positions of type {kind} are not those that transformers computes")
    setattr(module, f"{prefix}inv_freq", frequencies.to(own.device))
    setattr(module, f"{prefix}attention_scaling", scaling)


def windows_in_pass(runner: ModelRunner, pool: PagePool) -> tuple[int | None, ...]:
    """Of the layers, None for those that see everything, as a pass over one token has them. `pool` has a free page of
    the runner's KV. Raises UnsupportedModelError for a model that fails in it."""
    seen = SeenRules(runner.backend, runner.kv.layers)
    table = PageTable()
    pool.append(table, 1)
    try:
        ModelRunner(runner.model, runner.kv, seen, lead=runner.lead).run([BatchedSequence(table, [0], 1)])
    except UnsupportedModelError:
        raise
    # A model that pages do not suit fails in ways of its own.
    except Exception as error:
        family = runner.model.config.model_type
        raise UnsupportedModelError(f"{family} cannot compute on paged KV: {one_line(error)}") from error
    finally:
        pool.free(table)
    return tuple(rule.window for rule in seen.rules)


class SeenRules:
    """A backend, and the rules that its layers had in the latest pass."""

    def __init__(self, backend: AttentionBackend, layers: Sequence[LayerKv]) -> None:
        self._backend = backend
        self.layers = layers
        self.rules = [AttentionRule(0.0)] * len(layers)

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> AttentionPlan:
        return _SeeingPlan(self, self._backend.plan(spans, batched_tokens))


class _SeeingPlan:
    def __init__(self, seen: SeenRules, plan: AttentionPlan) -> None:
        self._seen = seen
        self._plan = plan

    def attend(self, layer: LayerKv, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        self._seen.rules[self._seen.layers.index(layer)] = rule
        return self._plan.attend(layer, query, rule)
