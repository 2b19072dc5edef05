"""Reads quantised checkpoints of Hugging Face: compressed-tensors, AWQ, GPTQ and FP8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from spool.engine.errors import UnsupportedModelError
from spool.engine.leftovers import changes_nothing, is_ignored, refuse_unused
from spool.engine.models.weights import PLAIN_FLOATS, safetensors_files, stored_tensors
from spool.engine.quantization.sizes import ACTIVATION_PARTS, CODE_PARTS
from spool.engine.quantization.weights import QuantizedWeight

_FORMATS = {
    "compressed-tensors": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    "awq": ("gemm",),
    "gptq": ("gptq", "gptq_v2"),
    "fp8": ("fp8",),
}
"""Formats of each method that are read, the usual one of AWQ, GPTQ and FP8 first."""

_FLOATS = ("F16", "BF16", "F32")
_FLOATS_8 = ("F8_E4M3", "F8_E5M2")
_INTS = ("I32", "I64")
# Last parts of the names under which a checkpoint holds a weight: one of them for each.
_WEIGHT_FORMS = ("qweight", "weight", "weight_packed")
# AWQ spreads eight neighbouring outputs over a word: where each of them is, in four bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def quantization_method(config: PreTrainedConfig) -> str | None:
    """What config.json calls the way in which the weights are quantised; None where they are not."""
    method = _quantization(config).get("quant_method")
    return None if method is None else str(method)


def check_quantization(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError for weights that `checkpoint_weights` does not read."""
    quantization = _quantization(config)
    if not quantization:
        return
    family, method = config.model_type, str(quantization.get("quant_method"))
    if method not in _FORMATS:
        raise UnsupportedModelError(f"{family} has weights quantised by {method}, which are not supported")
    if not isinstance(quantization.get("config_groups") or {}, Mapping):
        raise UnsupportedModelError(f"{family} has config_groups {quantization['config_groups']}, must be an object")
    groups = [group for group in (quantization.get("config_groups") or {}).values() if group.get("weights")]
    if method == "compressed-tensors":
        formats = {quantization.get("format"), *(group.get("format") for group in groups)} - {None}
        bits = {group["weights"].get("num_bits") for group in groups}
    else:
        formats = _named_formats(quantization)
        bits = {quantization.get("bits", quantization.get("w_bit", 8 if method == "fp8" else 4))}
    if str(quantization.get("backend")).lower() == "llm-awq":
        formats = {"llm-awq"}
    if not formats <= {*_FORMATS[method]}:
        raise UnsupportedModelError(
            f"{family} has weights quantised by {method} in format {', '.join(sorted(map(str, formats)))}, "
            f"must be {' or '.join(_FORMATS[method])}"
        )
    if method != "compressed-tensors" and len(formats) > 1:
        raise UnsupportedModelError(
            f"{family} has weights quantised by {method} in format {' and '.join(sorted(formats))}, must be in one"
        )
    if not bits <= ({4} if method == "awq" else {4, 8}):
        raise UnsupportedModelError(
            f"{family} has weights quantised by {method} to {', '.join(sorted(map(str, bits)))} bits, must be "
            f"{'4' if method == 'awq' else '4 or 8'}"
        )
    for field, kind in (("transform_config", "config_groups"), ("sparsity_config", "format")):
        if ((quantization.get(field) or {}).get(kind) or "dense") != "dense":
            raise UnsupportedModelError(f"{family} has weights quantised by {method} with a {field}, must have none")


def checkpoint_weights(
    folder: Path, config: PreTrainedConfig, prefix: str = "", ignored: Sequence[str] = ()
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Weights of the model in `folder` by the names of its parameters, one after the other: those with `prefix`.

    A weight that is quantised but fits no `QuantizedWeight` is float32; any other tensor is as stored. Activations are
    not quantised, whatever the configuration says of them. Raises UnsupportedModelError, naming the tensor; at the end
    for scales and other parts of codes that belong to no weight, but those of `ignored`.
    """
    check_quantization(config)
    quantization = _quantization(config)
    with ExitStack() as stack:
        checkpoint = _Checkpoint(folder, stack)
        for name, stored in checkpoint.stored.items():
            layer, _, kind = name.rpartition(".")
            if not name.startswith(prefix):
                continue
            forms = [f"{layer}.{form}" for form in _WEIGHT_FORMS if f"{layer}.{form}" in checkpoint.stored]
            if kind in _WEIGHT_FORMS and len(forms) > 1:
                raise UnsupportedModelError(f"{folder.name} holds {' and '.join(forms)}, which are one weight")
            if kind == "weight_packed":
                yield f"{layer}.weight", _packed_weight(checkpoint, layer)
            elif kind == "qweight" and quantization["quant_method"] == "awq":
                yield f"{layer}.weight", _awq_weight(checkpoint, layer)
            elif kind == "qweight":
                yield f"{layer}.weight", _gptq_weight(checkpoint, layer, _named_formats(quantization) != {"gptq_v2"})
            elif kind == "weight" and stored.dtype == "I8":
                yield name, _int_weight(checkpoint, layer)
            elif kind == "weight" and stored.dtype in _FLOATS_8:
                yield name, _float_weight(checkpoint, layer, _block(quantization))
            elif kind not in CODE_PARTS:
                may_be_left_out = changes_nothing(name) or is_ignored(name, ignored)
                if stored.dtype in PLAIN_FLOATS or not may_be_left_out:
                    yield name, checkpoint.read(name, (*PLAIN_FLOATS,))
        refuse_unused(folder.name, checkpoint.left_over(prefix), ignored)


class _Checkpoint:
    """Tensors of all files of a folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = safetensors_files(folder)
        if not files:
            raise UnsupportedModelError(f"{folder.name} holds pickled weights, those of a quantised model must not be")
        self.stored = stored_tensors(files)
        self._read: set[str] = set()
        self._folder = folder
        self._files = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}

    def read(
        self, name: str, dtypes: tuple[str, ...] | None, shape: tuple[int, ...] | None = None, dims: int | None = None
    ) -> torch.Tensor:
        if name not in self.stored:
            raise UnsupportedModelError(f"{self._folder.name} holds no {name}")
        stored = self.stored[name]
        if dtypes is not None and stored.dtype not in dtypes:
            raise self.refused(name, f"is of dtype {stored.dtype}, must be {' or '.join(dtypes)}")
        if shape is not None and stored.shape != shape:
            raise self.refused(name, f"has the shape {list(stored.shape)}, must have {list(shape)}")
        if dims is not None and (len(stored.shape) != dims or 0 in stored.shape):
            raise self.refused(name, f"has the shape {list(stored.shape)}, must have {dims} dimensions, none of them 0")
        self._read.add(name)
        tensor: torch.Tensor = self._files[stored.file].get_tensor(name)
        return tensor

    def left_over(self, prefix: str) -> list[str]:
        """Tensors with `prefix` that nothing has read, and that are not known to change nothing."""
        names = {name for name in self.stored.keys() - self._read if name.startswith(prefix)}
        return [
            name
            for name in names
            if name.rpartition(".")[2] not in ACTIVATION_PARTS
            and not changes_nothing(name)
            and not self._is_no_shift(name)
        ]

    def _is_no_shift(self, name: str) -> bool:
        """Whether a tensor has zero points of codes whose zero is 0 anyway."""
        return name.endswith(".weight_zero_point") and not self.read(name, None).float().any()

    def read_scales(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """float32, all of them finite."""
        scales = self.read(name, (*_FLOATS, "F8_E8M0"), shape).float()
        if not scales.isfinite().all():
            raise self.refused(name, "holds a value that is not a finite number")
        return scales

    def read_group_scales(self, name: str, out: int, inputs: int) -> torch.Tensor:
        """`[out, groups]`, of scales of a weight, of each output or of groups of inputs."""
        scales = self.read_scales(name)
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(out, 1)
        groups = scales.reshape(out, -1) if scales.dim() == 1 and len(scales) == out else scales
        if groups.dim() != 2 or len(groups) != out or not 1 <= groups.shape[1] <= inputs:
            raise self.refused(
                name, f"has the shape {list(scales.shape)}, must have [{out}, groups] for a weight of {inputs} inputs"
            )
        return groups

    def read_group_index(self, name: str, inputs: int, groups: int) -> torch.Tensor | None:
        """The group of each input; None where the file does not say."""
        if name not in self.stored:
            return None
        index = self.read(name, _INTS, (inputs,)).long()
        if (index == -1).all():
            return None
        if index.min() < 0 or index.max() >= groups:
            raise self.refused(name, f"holds a group outside of 0 to {groups - 1}")
        return index

    def refused(self, name: str, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.stored[name].file.name}: {name} {reason}")


def _packed_weight(checkpoint: _Checkpoint, layer: str) -> torch.Tensor | QuantizedWeight:
    name = f"{layer}.weight_packed"
    packed = checkpoint.read(name, ("I32",), dims=2)
    out, inputs = checkpoint.read(f"{layer}.weight_shape", _INTS, (2,)).tolist()
    bits = next((bits for bits in (4, 8) if packed.shape == (out, -(-inputs * bits // 32))), None)
    if bits is None:
        raise checkpoint.refused(
            name, f"has the shape {list(packed.shape)}, which is not that of {out} x {inputs} numbers of 4 or 8 bits"
        )
    scales = checkpoint.read_group_scales(f"{layer}.weight_scale", out, inputs)
    zeros = _zero_points(checkpoint, layer, scales, bits)
    index = checkpoint.read_group_index(f"{layer}.weight_g_idx", inputs, scales.shape[1])
    return _grouped(checkpoint, name, _unpacked(packed, bits)[:, :inputs], scales, zeros, bits, index)


def _int_weight(checkpoint: _Checkpoint, layer: str) -> torch.Tensor | QuantizedWeight:
    name = f"{layer}.weight"
    codes = checkpoint.read(name, ("I8",), dims=2)
    scales = checkpoint.read_group_scales(f"{layer}.weight_scale", *codes.shape)
    zeros = _zero_points(checkpoint, layer, scales, 8)
    index = checkpoint.read_group_index(f"{layer}.weight_g_idx", codes.shape[1], scales.shape[1])
    return _grouped(checkpoint, name, codes.view(torch.uint8) ^ 128, scales, zeros, 8, index)


def _zero_points(checkpoint: _Checkpoint, layer: str, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The code of 0 of each group, where codes are not negative."""
    name, middle, (out, groups) = f"{layer}.weight_zero_point", 2 ** (bits - 1), scales.shape
    if name not in checkpoint.stored:
        return torch.full((out, groups), middle)
    if checkpoint.stored[name].dtype == "I8":
        shape = checkpoint.stored[name].shape
        fits = shape in ((out, groups), (out,)) or (groups == 1 and shape in ((), (1,)))
        zeros = checkpoint.read(name, ("I8",), None if fits else (out, groups))
        return zeros.int().reshape(-1, groups).expand(out, groups) + middle
    packed = checkpoint.read(name, ("I32", "I8"), (-(-out * bits // 32), groups))
    return _unpacked(packed.T, bits)[:, :out].T


def _awq_weight(checkpoint: _Checkpoint, layer: str) -> torch.Tensor | QuantizedWeight:
    name = f"{layer}.qweight"
    packed = checkpoint.read(name, ("I32",), dims=2)
    words, groups = packed.shape[1], _group_count(checkpoint, layer)
    scales = checkpoint.read_scales(f"{layer}.scales", (groups, words * 8)).T
    zeros = checkpoint.read(f"{layer}.qzeros", ("I32",), (groups, words))
    codes, zeros = (_unpacked(part, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T for part in (packed, zeros))
    return _grouped(checkpoint, name, codes, scales, zeros, 4)


def _gptq_weight(checkpoint: _Checkpoint, layer: str, one_less: bool) -> torch.Tensor | QuantizedWeight:
    """`one_less`: zero points are stored less one."""
    name = f"{layer}.qweight"
    packed = checkpoint.read(name, ("I32",), dims=2)
    out, groups = packed.shape[1], _group_count(checkpoint, layer)
    scales = checkpoint.read_scales(f"{layer}.scales", (groups, out)).T
    zeros = checkpoint.read(f"{layer}.qzeros", ("I32",), dims=2)
    bits = next((bits for bits in (4, 8) if zeros.shape == (groups, -(-out * bits // 32))), None)
    if bits is None:
        raise checkpoint.refused(
            f"{layer}.qzeros",
            f"has the shape {list(zeros.shape)}, which is not that of {groups} x {out} numbers of 4 or 8 bits",
        )
    if one_less:
        # Of the whole word, as the one was taken off it: a carry goes on to the next number.
        zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)
    codes = _unpacked(packed.T, bits)
    index = checkpoint.read_group_index(f"{layer}.g_idx", codes.shape[1], groups)
    return _grouped(checkpoint, name, codes, scales, _unpacked(zeros, bits)[:, :out].T, bits, index)


def _group_count(checkpoint: _Checkpoint, layer: str) -> int:
    return len(checkpoint.read(f"{layer}.scales", _FLOATS, dims=2))


def _float_weight(checkpoint: _Checkpoint, layer: str, block: tuple[int, int] | None) -> torch.Tensor:
    weight = checkpoint.read(f"{layer}.weight", _FLOATS_8, dims=2).float()
    (out, inputs), name = weight.shape, f"{layer}.weight_scale"
    if f"{name}_inv" in checkpoint.stored:
        name = f"{name}_inv"
    if block is not None:
        scales = checkpoint.read_scales(name)
        if scales.shape == (-(-out // block[0]), -(-inputs // block[1])):
            scales = scales.repeat_interleave(block[0], dim=0)[:out].repeat_interleave(block[1], dim=1)[:, :inputs]
            return weight.mul_(scales)
    scales = checkpoint.read_group_scales(name, out, inputs)
    if inputs % scales.shape[1]:
        raise checkpoint.refused(name, f"has {scales.shape[1]} groups, which {inputs} inputs cannot be divided into")
    return weight.mul_(scales.repeat_interleave(inputs // scales.shape[1], dim=1))


def _grouped(
    checkpoint: _Checkpoint,
    name: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    index: torch.Tensor | None = None,
) -> torch.Tensor | QuantizedWeight:
    """`codes` `[out, in]`, `scales` and `zeros` `[out, groups]`; `index` is the group of each input."""
    inputs, groups = codes.shape[1], scales.shape[1]
    minimums = -zeros.float() * scales
    size = inputs // groups
    plain = None if inputs % groups else torch.arange(inputs) // size
    if index is None:
        if plain is None:
            raise checkpoint.refused(name, f"has {inputs} inputs, which cannot be divided into {groups} groups")
        index = plain
    if inputs % 32 or size % 16 or plain is None or not torch.equal(index, plain):
        return codes * scales[:, index] + minimums[:, index]
    group = 16 if size % 32 else 32
    scales, minimums = (part.repeat_interleave(size // group, dim=1) for part in (scales, minimums))
    return QuantizedWeight.of_codes(codes, scales, minimums, bits, group)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of int32 words, uint8; those in lower bits are first."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale of FP8."""
    groups = (quantization.get("config_groups") or {}).values()
    named = [(group.get("weights") or {}).get("block_structure") for group in groups]
    block = quantization.get("weight_block_size") or next(filter(None, named), None)
    return None if block is None else (block[0], block[1])


def _named_formats(quantization: Mapping[str, Any]) -> set[str]:
    """Formats of AWQ, GPTQ and FP8 that a configuration names, or the usual one."""
    method = quantization["quant_method"]
    named = [quantization.get(field) for field in ("version", "checkpoint_format", "format")]
    found = {str(name).lower() for name in named if name} if method != "fp8" else set()
    return found or {_FORMATS[method][0]}


def _quantization(config: PreTrainedConfig) -> Mapping[str, Any]:
    quantization = getattr(config, "quantization_config", None) or {}
    return quantization if isinstance(quantization, dict) else quantization.to_dict()
