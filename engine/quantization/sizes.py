"""What a model's weights take as they are kept, told from the headers of their files. No torch here."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from engine.models.source import GGUF_WEIGHTS
from engine.quantization.gguf_file import GgufFile
from engine.quantization.gguf_types import TYPES

NOT_QUANTIZED = "none"
ROUNDED_BITS = {"int8": 8, "int4": 4}
"""By settings of `quantization`."""
HEAD_BITS = 8
"""Of embeddings and heads, whatever the other layers are rounded to: a model notices errors there most."""
QUANTIZED_FAMILIES = ("llama", "qwen2", "qwen3")
"""Of these, weights stay quantised as a checkpoint has them: all but biases and norms are of linear layers and of the
embedding."""

# As engine/quantization/weights.py keeps codes: inputs that may share a scale, and its bytes with those of a minimum.
_GROUP, _SMALL_GROUP = 32, 16
_SCALE_BYTES = 2 * 4

# Last parts of the names of tensors with several codes in each of their int32 words, and types of those with one.
_PACKED = ("weight_packed", "qweight")
_CODES = ("I8", "F8_E4M3", "F8_E5M2")

# Layers by their names in checkpoints of Hugging Face and in GGUF files: those whose codes become one tensor
# (engine/layers/families.py), those whose inputs are divided among ranks, and those that are rounded to HEAD_BITS.
_JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_q", "attn_k", "attn_v"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "ffn_gate", "ffn_up"), "gate_up"),
}
_OUT, _DOWN = ("o_proj", "attn_output"), ("down_proj", "ffn_down")
_ENDS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """`numbers` in rows of `inputs`: floats, or codes of `bits` bits (0: floats) in groups of `group`."""

    numbers: int
    inputs: int = 0
    bits: int = 0
    group: int = 0


def kept_weights(
    folder: Path, own_size: int, method: Mapping[str, Any], quantization: str
) -> tuple[dict[str, KeptWeight], str]:
    """Weights of a model by their names, as kernels for codes keep them under a setting of `quantization`, and what
    those codes are, in a word. `method`: what config.json says of quantised weights. Floats are stored in `own_size`
    bytes."""
    if (folder / GGUF_WEIGHTS).is_file():
        file = GgufFile(folder / GGUF_WEIGHTS)
        types = {name: (tensor.shape, TYPES[tensor.type]) for name, tensor in file.tensors.items()}
        weights = {
            name: KeptWeight(prod(shape), shape[-1], type.bits, type.group) for name, (shape, type) in types.items()
        }
        word = file.commonest_type()
    else:
        weights, word = _checkpoint_weights(folder, own_size, method), str(method.get("quant_method"))
    if any(weight.bits for weight in weights.values()):
        return weights, word
    if quantization in ROUNDED_BITS:
        return {name: _rounded(name, weight, quantization) for name, weight in weights.items()}, quantization
    return weights, NOT_QUANTIZED


def kept_bytes(weights: Mapping[str, KeptWeight], size: int, out_inputs: int, down_inputs: int) -> int:
    """With floats of `size` bytes. A rank has `out_inputs` and `down_inputs` of the layers whose inputs are divided.

    Weights that are joined have the bits of the widest and the groups of the smallest, and are all floats where one is.
    """
    part_inputs = dict.fromkeys(_OUT, out_inputs) | dict.fromkeys(_DOWN, down_inputs)
    together = defaultdict(list)
    for name, weight in weights.items():
        above, layer, kind = _places(name)
        whole_groups = part_inputs.get(layer, weight.inputs) % _GROUP == 0
        together[above, _JOINED.get(layer, layer), kind].append(weight if whole_groups else KeptWeight(weight.numbers))
    total = 0
    for joined in together.values():
        numbers = sum(weight.numbers for weight in joined)
        if all(weight.bits for weight in joined):
            bits, group = max(weight.bits for weight in joined), min(weight.group for weight in joined)
            total += numbers * bits // 8 + numbers // group * _SCALE_BYTES
        else:
            total += numbers * size
    return total


def _places(name: str) -> tuple[str, str, str]:
    """What a layer is part of, the layer, and which of its tensors this is."""
    path, _, kind = name.rpartition(".")
    above, _, layer = path.rpartition(".")
    return above, layer, kind


def _rounded(name: str, weight: KeptWeight, quantization: str) -> KeptWeight:
    """As engine/quantization/model.py rounds the plain weights of a model."""
    _, layer, kind = _places(name)
    if kind != "weight" or layer not in (*_JOINED, *_OUT, *_DOWN, *_ENDS) or weight.inputs % _GROUP:
        return weight
    return KeptWeight(
        weight.numbers, weight.inputs, HEAD_BITS if layer in _ENDS else ROUNDED_BITS[quantization], _GROUP
    )


def _checkpoint_weights(folder: Path, own_size: int, method: Mapping[str, Any]) -> dict[str, KeptWeight]:
    files = list(folder.glob("*.safetensors"))
    if not files:
        # Pickled: next to the numbers these files hold little.
        return {"": KeptWeight(sum(file.stat().st_size for file in folder.glob("*.bin")) // own_size)}
    tensors = dict(chain.from_iterable(map(_tensors, files)))
    coded = {name.rpartition(".")[0]: name for name, tensor in tensors.items() if _is_coded(name, tensor["dtype"])}
    weights = {f"{layer}.weight": _coded_weight(layer, name, tensors, method) for layer, name in coded.items()}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if layer not in coded or kind == "bias":
            weights[name] = KeptWeight(prod(tensor["shape"]), (tensor["shape"] or [1])[-1])
    return weights


def _is_coded(name: str, dtype: str) -> bool:
    return name.endswith(_PACKED) or (name.endswith(".weight") and dtype in _CODES)


def _coded_weight(
    layer: str, name: str, tensors: Mapping[str, Mapping[str, Any]], method: Mapping[str, Any]
) -> KeptWeight:
    """As engine/quantization/checkpoints.py reads it: FP8, groups of other sizes, and those of inputs in an order of
    their own are expanded."""
    shape, dtype = tensors[name]["shape"], tensors[name]["dtype"]
    bits = _packed_bits(method) if name.endswith(_PACKED) else 8
    numbers = prod(shape) * (32 // bits if name.endswith(_PACKED) else 1)
    if dtype.startswith("F8") or method.get("desc_act") or f"{layer}.weight_g_idx" in tensors:
        return KeptWeight(numbers)
    by_groups = name.endswith("qweight")
    scales: Sequence[int] = tensors[f"{layer}.scales" if by_groups else f"{layer}.weight_scale"]["shape"]
    inputs, size = numbers // (scales[1] if by_groups else shape[0]), numbers // prod(scales)
    if inputs % _GROUP or size % _SMALL_GROUP:
        return KeptWeight(numbers)
    return KeptWeight(numbers, inputs, bits, _SMALL_GROUP if size % _GROUP else _GROUP)


def _packed_bits(method: Mapping[str, Any]) -> int:
    """Of a number that is packed with others; the fewest, where weights differ."""
    groups = [group["weights"] for group in (method.get("config_groups") or {}).values() if group.get("weights")]
    return min([group["num_bits"] for group in groups] or [method.get("bits") or method.get("w_bit") or 4])


def _tensors(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """From the beginning of a file of safetensors: eight bytes that say how long its header is, then that, as JSON."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    return [(name, tensor) for name, tensor in header.items() if name != "__metadata__"]
