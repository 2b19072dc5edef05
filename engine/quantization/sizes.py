"""What a model's weights take as they are kept, told from the headers of their files. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from spool.engine.errors import UnsupportedModelError
from spool.engine.models.drafting_head import is_of_mtp_layer
from spool.engine.models.source import weights_path
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_types import TYPES

NOT_QUANTIZED = "none"
ROUNDED_BITS = {"int8": 8, "int4": 4}
"""By settings of `quantization`."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HEAD_BITS = 8
"""Of embeddings and heads, whatever the other layers are rounded to: a model notices errors there most."""

# As engine/quantization/weights.py keeps codes: inputs that share a scale, and the bytes of that and of a minimum.
_GROUP, _SMALL_GROUP = 32, 16
_SCALE_BYTES = 2 * 4

_ENDS = ("embed_tokens", "lm_head", "embed_in", "embed_out")
# Last parts of the names of tensors with several codes in each of their int32 words, and of tensors that go with codes.
_PACKED = ("weight_packed", "qweight")
_WEIGHT_PARTS = {"weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"}
_WEIGHT_PARTS |= {"qzeros", "scales", "g_idx"}
ACTIVATION_PARTS = {f"{what}_{part}" for what in "qkv" for part in ("scale", "zero_point")}
ACTIVATION_PARTS |= {
    f"{what}_{part}" for what in ("input", "output") for part in ("scale", "zero_point", "global_scale")
}
ACTIVATION_PARTS |= {"activation_scale", "act_scale", "kv_scale", "prob_scale", "prob_output_scale"}
"""Of activations and KV, which Spool does not quantise as a checkpoint says."""
CODE_PARTS = _WEIGHT_PARTS | ACTIVATION_PARTS

QUANTIZATION_FILE = "hf_quant_config.json"
"""Beside config.json, what ModelOpt says of the weights that it quantised."""
# ModelOpt's formats that are those of FP8: a scale for a weight, or for each of its outputs.
_FP8_OF_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


class _Weight(NamedTuple):
    """Floats, or codes of `bits` bits in groups of `group`."""

    name: str
    shape: tuple[int, ...]
    bits: int = 0
    group: int = _GROUP


def stated_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the model in `folder` says of how its weights are quantised, in the form of a `quantization_config`; empty
    where they are not. `config` is that of config.json, where older checkpoints say it under `compression_config`, and
    some not at all. Raises UnsupportedModelError."""
    stated = config.get("quantization_config")
    if not stated and config.get("compression_config"):
        stated = {"quant_method": "compressed-tensors"} | config["compression_config"]
    file = folder / QUANTIZATION_FILE
    if not stated and file.is_file():
        try:
            stated = json.loads(file.read_text(encoding="utf-8"))["quantization"]
            stated = {"quant_method": "modelopt", "quant_algo": stated["quant_algo"]} if stated["quant_algo"] else {}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UnsupportedModelError(f"{folder.name}/{file.name} cannot be read: {error}") from error
    stated = dict(stated or {})
    if stated.get("quant_method") == "modelopt":
        algorithm = stated.get("quant_algo")
        stated["quant_method"] = "fp8" if algorithm in _FP8_OF_MODELOPT else f"modelopt to {algorithm}"
    return stated


def kept_bytes(folder: Path, config: Mapping[str, Any], size: int, quantization: str, codes: bool) -> tuple[int, str]:
    """Bytes of a model's weights as they are kept under a setting of `quantization`, with floats of `size` bytes and,
    if `codes`, codes where the checkpoint has them; and as which codes, in a word. `config` is that of config.json.

    Layers whose codes become one tensor are counted as if they were alike, as are the parts of ranks.
    """
    if (path := weights_path(folder)) != folder:
        file = GgufFile(path)
        types = ((name, tensor.shape, TYPES[tensor.type]) for name, tensor in file.tensors.items())
        weights = [_Weight(name, shape, type.bits, type.group) for name, shape, type in types]
        word = file.commonest_type()
    else:
        method = stated_quantization(folder, config)
        weights = list(_checkpoint_weights(folder, config, method))
        word = str(method.get("quant_method"))
    if not codes:
        weights, word = [_Weight(weight.name, weight.shape) for weight in weights], NOT_QUANTIZED
    elif not any(weight.bits for weight in weights):
        bits = ROUNDED_BITS.get(quantization)
        word = NOT_QUANTIZED if bits is None else quantization
        weights = [_rounded(weight, bits) for weight in weights] if bits else weights
    total = 0
    for weight in weights:
        numbers = prod(weight.shape)
        of_codes = numbers * weight.bits // 8 + numbers // (weight.group or _GROUP) * _SCALE_BYTES
        total += of_codes if weight.bits else numbers * size
    return total, word


def _rounded(weight: _Weight, bits: int) -> _Weight:
    """As engine/quantization/model.py rounds the plain weights of a model."""
    layer, _, kind = weight.name.rpartition(".")
    if kind != "weight" or len(weight.shape) != 2 or weight.shape[1] % _GROUP:
        return weight
    return _Weight(weight.name, weight.shape, HEAD_BITS if layer.endswith(_ENDS) else bits)


def _checkpoint_weights(folder: Path, config: Mapping[str, Any], method: Mapping[str, Any]) -> Iterator[_Weight]:
    """As engine/quantization/checkpoints.py reads them: FP8, and groups in an order of their own, are expanded."""
    files = list(folder.glob("*.safetensors"))
    if not files:
        # Pickled: next to the numbers these files hold little.
        own_size = DTYPE_BYTES[config.get("dtype") or config.get("torch_dtype") or "float32"]
        yield _Weight("", (sum(file.stat().st_size for file in folder.glob("*.bin")) // own_size,))
    groups = [group["weights"] for group in (method.get("config_groups") or {}).values() if group.get("weights")]
    packed_bits = min([group["num_bits"] for group in groups] or [method.get("bits") or method.get("w_bit") or 4])
    sizes = [group.get("group_size") or 0 for group in groups or [method]]
    group = _SMALL_GROUP if any(size > 0 and size % _GROUP for size in sizes) else _GROUP
    in_order = not (method.get("desc_act") or any(group.get("actorder") for group in groups))
    for file in files:
        for name, tensor in _header(file).items():
            kind, shape = name.rpartition(".")[2], tuple(tensor["shape"])
            if kind in CODE_PARTS or is_of_mtp_layer(name, config["num_hidden_layers"]):
                continue
            packed = kind in _PACKED
            if packed:
                shape = (*shape[:-1], shape[-1] * 32 // packed_bits)
            bits = packed_bits if packed else 8 if kind == "weight" and tensor["dtype"] == "I8" else 0
            yield _Weight(name, shape, bits if in_order else 0, group)


def _header(file: Path) -> dict[str, Any]:
    """Of a file of safetensors, which begins with eight bytes that say how long its header is, then that, as JSON."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        tensors: dict[str, Any] = json.loads(content.read(length))
    return {name: tensor for name, tensor in tensors.items() if name != "__metadata__"}
