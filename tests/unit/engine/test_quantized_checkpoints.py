"""Quantised checkpoints, written here by the arithmetic of their formats, read as the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from spool.engine.errors import UnsupportedModelError
from spool.engine.models.compatibility import check_config
from spool.engine.models.reading import read_config
from spool.engine.quantization.checkpoints import checkpoint_weights
from spool.engine.quantization.weights import QuantizedWeight

LAYER = "model.layers.0.mlp.up_proj"
WEIGHT = f"{LAYER}.weight"
NORM = "model.norm.weight"


@dataclass
class Case:
    """A checkpoint: tensors of one layer by the last part of their names, and the numbers that they stand for."""

    quantization: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    expected: np.ndarray
    form: tuple[int, int] | None
    """Bits and group of the weight as it is read; None for plain numbers."""


def write(folder: Path, case: Case) -> LlamaConfig:
    tensors = {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in case.tensors.items()}
    save_file({**tensors, NORM: torch.arange(3.0)}, folder / "model.safetensors")
    return LlamaConfig(quantization_config=case.quantization)


def words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """int32 `[rows, words]` of numbers `[rows, count]`, the first in the lowest bits."""
    count = 32 // bits
    padded = np.zeros((len(numbers), -(-numbers.shape[1] // count) * count), np.uint32)
    padded[:, : numbers.shape[1]] = numbers
    packed = np.zeros((len(numbers), padded.shape[1] // count), np.uint32)
    for place in range(count):
        packed |= padded[:, place::count] << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def numbers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape)


def some_scales(out: int, groups: int) -> np.ndarray:
    return np.random.default_rng(7).uniform(0.01, 0.1, (out, groups)).astype(np.float16)


def spread(groups: np.ndarray, inputs: int) -> np.ndarray:
    """What each input has of numbers of its group, float64."""
    return groups.astype(np.float64)[:, np.arange(inputs) // (-(-inputs // groups.shape[1]))]


def compressed(name: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


def packed(bits: int, groups: int, inputs: int, out: int = 24, zeros: bool = False, order: bool = False) -> Case:
    half = 2 ** (bits - 1)
    codes, scales = numbers(0, -half, half, out, inputs), some_scales(out, groups)
    zero = numbers(1, -half, half, out, groups) if zeros else np.zeros((out, groups), int)
    expected = (codes - spread(zero, inputs)) * spread(scales, inputs)
    tensors = {
        "weight_packed": words(codes + half, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([out, inputs]),
    }
    if zeros:
        tensors["weight_zero_point"] = words((zero + half).T, bits).T
    size = inputs // groups
    if order:
        index = np.random.default_rng(3).permutation(inputs) % groups
        tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        expected = (codes - zero[:, index]) * scales.astype(np.float64)[:, index]
    plain = order or inputs % 32 or size % 16
    return Case(
        compressed("pack-quantized", bits), tensors, expected, None if plain else (bits, 16 if size % 32 else 32)
    )


def whole_bytes(groups: int, zeros: bool = False, flat: bool = False) -> Case:
    """int8, as W8A8 has them."""
    codes, scales = numbers(0, -128, 128, 24, 96), some_scales(24, groups)
    zero = numbers(1, -128, 128, 24, groups) if zeros else np.zeros((24, groups), int)
    expected = (codes - spread(zero, 96)) * spread(scales, 96)
    scale = torch.from_numpy(scales).bfloat16()
    expected = expected / spread(scales, 96) * spread(scale.float().numpy(), 96)
    tensors = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scale.flatten() if flat else scale}
    if zeros:
        tensors["weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
    return Case(compressed("int-quantized", 8), tensors, expected, (8, 32))


def awq(groups: int = 2, inputs: int = 128, **quantization: Any) -> Case:
    codes, zero, scales = numbers(0, 0, 16, 24, inputs), numbers(1, 0, 16, 24, groups), some_scales(24, groups)

    def interleaved(values: np.ndarray) -> torch.Tensor:
        """Eight outputs to a word, at bits 0, 4, 8 ... the even ones before the odd ones."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return words(values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape), 4)

    tensors = {
        "qweight": interleaved(codes.T),
        "qzeros": interleaved(zero.T),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    expected = (codes - spread(zero, inputs)) * spread(scales, inputs)
    return Case({"quant_method": "awq", "bits": 4, **quantization}, tensors, expected, (4, 32))


def gptq(bits: int, groups: int = 2, inputs: int = 128, order: str = "plain", version: str | None = None) -> Case:
    codes, zero = numbers(0, 0, 2**bits, 24, inputs), numbers(1, 1, 2**bits, 24, groups)
    scales, size = some_scales(24, groups), -(-inputs // groups)
    index = np.arange(inputs) // size
    if order == "mixed":
        index = np.random.default_rng(3).permutation(index)
    tensors = {
        "qweight": words(codes, bits).T,
        "qzeros": words(zero.T if version == "gptq_v2" else zero.T - 1, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    if order == "unsaid":
        del tensors["g_idx"]
    expected = (codes - zero[:, index]) * scales.astype(np.float64)[:, index]
    quantization = {"quant_method": "gptq", "bits": bits, "desc_act": order == "mixed"}
    if version is not None:
        quantization["checkpoint_format"] = version
    form = None if order == "mixed" or inputs % groups or inputs % 32 else (bits, 32)
    return Case(quantization, tensors, expected, form)


def gptq_v2(**quantization: Any) -> Case:
    """Whose configuration says so in fields of its own."""
    case = gptq(4, version="gptq_v2")
    return replace(case, quantization={**case.quantization, "checkpoint_format": None, **quantization})


def borrowed() -> Case:
    """Zero points that are 0: one less is taken off the whole word, so the next number lends to it."""
    case = gptq(4)
    zero = numbers(1, 0, 3, 24, 2)
    word = words(zero.T, 4).numpy().view(np.uint32) - np.uint32(0x11111111)
    codes, scales = numbers(0, 0, 16, 24, 128), some_scales(24, 2)
    tensors = {**case.tensors, "qzeros": torch.from_numpy(word.view(np.int32))}
    return Case(case.quantization, tensors, (codes - spread(zero, 128)) * spread(scales, 128), (4, 32))


def float8(scale: np.ndarray, full: np.ndarray, name: str, quantization: dict[str, Any], shape: Any = None) -> Case:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    stored = torch.from_numpy(scale.astype(np.float32))
    tensors = {"weight": weight, name: stored if shape is None else stored.reshape(shape)}
    return Case(quantization, tensors, weight.double().numpy() * full.astype(np.float32), None)


def blocks(name: str, quantization: dict[str, Any]) -> Case:
    scale = np.random.default_rng(5).uniform(0.5, 2, (3, 5))
    full = np.array([[scale[row // 16, column // 16] for column in range(72)] for row in range(40)])
    return float8(scale, full, name, quantization)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {"block_structure": [16, 16], "strategy": "block", "type": "float"}
PER_OUTPUT = np.linspace(0.5, 2, 40)[:, None]

CASES: dict[str, Callable[[], Case]] = {
    "pack-quantized, 4 bits, groups of 128": lambda: packed(4, 2, 256),
    "pack-quantized, 4 bits, groups of 64, zero points": lambda: packed(4, 3, 192, zeros=True),
    "pack-quantized, 4 bits, groups of 16": lambda: packed(4, 4, 64),
    "pack-quantized, 4 bits, groups of 48": lambda: packed(4, 2, 96, zeros=True),
    "pack-quantized, 4 bits, groups of 8": lambda: packed(4, 8, 64),
    "pack-quantized, 4 bits, per output": lambda: packed(4, 1, 96, zeros=True),
    "pack-quantized, 4 bits, 27 outputs": lambda: packed(4, 2, 64, out=27, zeros=True),
    "pack-quantized, 4 bits, 72 inputs": lambda: packed(4, 1, 72, zeros=True),
    "pack-quantized, 4 bits, 45 inputs": lambda: packed(4, 3, 45),
    "pack-quantized, 4 bits, inputs in another order": lambda: packed(4, 2, 128, zeros=True, order=True),
    "pack-quantized, 8 bits, groups of 64": lambda: packed(8, 2, 128),
    "pack-quantized, 8 bits, per output, zero points": lambda: packed(8, 1, 128, out=23, zeros=True),
    "int-quantized, per output": lambda: whole_bytes(1),
    "int-quantized, per output, a scale each": lambda: whole_bytes(1, flat=True),
    "int-quantized, groups of 32, zero points": lambda: whole_bytes(3, zeros=True),
    "awq": awq,
    "awq, groups of 32, version GEMM": lambda: awq(4, version="GEMM", zero_point=True),
    "awq, per output": lambda: awq(1),
    "gptq, 4 bits": lambda: gptq(4),
    "gptq, 4 bits, v1 by name": lambda: gptq(4, version="gptq"),
    "gptq, 4 bits, v2": lambda: gptq(4, version="gptq_v2"),
    "gptq, 4 bits, v2 by format": lambda: gptq_v2(format="gptq_v2"),
    "gptq, 4 bits, v2 by version": lambda: gptq_v2(version="gptq_v2"),
    "gptq, 4 bits, v2 in capitals": lambda: gptq_v2(checkpoint_format="GPTQ_V2"),
    "gptq, 8 bits": lambda: gptq(8, groups=4),
    "gptq, 8 bits, per output, v2": lambda: gptq(8, groups=1, version="gptq_v2"),
    "gptq, no order in the file": lambda: gptq(4, order="unsaid"),
    "gptq, inputs in another order": lambda: gptq(4, order="mixed"),
    "gptq, the last group shorter": lambda: gptq(4, groups=3, inputs=160),
    "gptq, zero points of 0": borrowed,
    "fp8, blocks": lambda: blocks("weight_scale_inv", {**FP8, "weight_block_size": [16, 16]}),
    "fp8, one scale": lambda: float8(np.array(0.25), np.array(0.25), "weight_scale", FP8),
    "float-quantized, per output": lambda: float8(
        PER_OUTPUT, PER_OUTPUT, "weight_scale", compressed("float-quantized", 8, type="float")
    ),
    "float-quantized, blocks": lambda: blocks("weight_scale", compressed("float-quantized", 8, **BLOCKS)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    config = write(tmp_path, case)
    check_config(config)
    read = dict(checkpoint_weights(tmp_path, config))
    assert read.keys() == {WEIGHT, NORM}
    weight = read[WEIGHT]
    if case.form is None:
        assert isinstance(weight, torch.Tensor)
        found = weight
    else:
        assert isinstance(weight, QuantizedWeight)
        assert (weight.bits, weight.group) == case.form
        found = weight.expanded()
    np.testing.assert_allclose(found.numpy(), case.expected, rtol=2e-6, atol=2e-6)
    norm = read[NORM]
    assert isinstance(norm, torch.Tensor)
    assert norm.tolist() == [0, 1, 2]


def test_parts_of_a_weight_may_be_in_different_files(tmp_path: Path) -> None:
    case = packed(4, 2, 128)
    config = write(tmp_path, case)
    whole = dict(checkpoint_weights(tmp_path, config))
    (tmp_path / "model.safetensors").unlink()
    names = {f"{LAYER}.{name}": f"model-{number}.safetensors" for number, name in enumerate(case.tensors)}
    for name, file in names.items():
        save_file({name: case.tensors[name.removeprefix(f"{LAYER}.")]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    [(name, weight)] = checkpoint_weights(tmp_path, config)
    expected = whole[name]
    assert isinstance(weight, QuantizedWeight)
    assert isinstance(expected, QuantizedWeight)
    assert torch.equal(weight.expanded(), expected.expanded())


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def endless(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.inf


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1]


PACKED, BYTES, FP8_ONE = packed(4, 2, 128), whole_bytes(1), CASES["fp8, one scale"]()
WITH_ZEROS, IN_ORDER = packed(4, 2, 128, zeros=True), packed(4, 2, 128, order=True)
SHAPE, MISSING = "{}.%s has the shape", "holds no {}.%s"
DAMAGES = [
    *((PACKED, name, None, MISSING) for name in ("weight_scale", "weight_shape")),
    (PACKED, "weight_shape", lambda shape: shape + 64, "{}.weight_packed has the shape"),
    (PACKED, "weight_scale", cut, SHAPE),
    (PACKED, "weight_scale", lambda scale: torch.cat([scale, scale[:, :1]], dim=1), "{}.weight_packed has 128 inputs"),
    (PACKED, "weight_scale", endless, "{}.%s holds a value that is not a finite number"),
    (PACKED, "weight_packed", torch.Tensor.float, "{}.%s is of dtype F32, must be I32"),
    (WITH_ZEROS, "weight_zero_point", cut, SHAPE),
    (IN_ORDER, "weight_g_idx", lambda index: index + 1, "{}.%s holds a group"),
    (BYTES, "weight", lambda weight: weight[None], SHAPE),
    (whole_bytes(3, zeros=True), "weight_zero_point", narrow, SHAPE),
    (BYTES, "weight_scale", None, MISSING),
    (BYTES, "weight", torch.Tensor.int, "{}.%s is of dtype I32, must be"),
    (awq(), "qzeros", None, MISSING),
    (awq(), "scales", narrow, SHAPE),
    (awq(), "qweight", torch.Tensor.char, "{}.%s is of dtype I8, must be I32"),
    (gptq(4), "scales", None, MISSING),
    (gptq(4), "qzeros", cut, SHAPE),
    (gptq(4), "qweight", cut, "{}.g_idx has the shape"),
    (FP8_ONE, "weight_scale", None, MISSING),
    (CASES["fp8, blocks"](), "weight_scale_inv", cut, SHAPE),
]


@pytest.mark.parametrize(("case", "name", "damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    case: Case, name: str, damage: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    """The tensor of this name is changed, or missing."""
    tensors = dict(case.tensors)
    tensor = tensors.pop(name)
    if damage is not None:
        tensors[name] = damage(tensor)
    config = write(tmp_path, Case(case.quantization, tensors, case.expected, case.form))
    with pytest.raises(UnsupportedModelError) as refused:
        list(checkpoint_weights(tmp_path, config))
    assert message.replace("%s", name).format(LAYER) in str(refused.value)
    assert "\n" not in str(refused.value)


PLAIN = Case(FP8, {"weight": torch.ones(24, 96)}, np.ones((24, 96)), None)
ZERO, ONE = torch.zeros(24, 1), torch.ones(24, 1)
LEFT_OVER = [
    (PACKED, "weight_scale_inv", ONE),
    (PACKED, "qzeros", ONE.int()),
    (BYTES, "scales", ONE),
    (BYTES, "weight_shape", torch.tensor([24, 96])),
    (BYTES, "g_idx", torch.arange(96)),
    (awq(), "g_idx", torch.arange(128)),
    (gptq(4), "weight_scale", ONE),
    (FP8_ONE, "weight_scale_inv", torch.ones(1)),
    (FP8_ONE, "weight_zero_point", torch.ones(1)),
    (PLAIN, "weight_scale", ONE),
    (PLAIN, "weight_zero_point", ONE.char()),
]


@pytest.mark.parametrize(("case", "name", "tensor"), LEFT_OVER)
def test_a_part_of_codes_that_no_weight_takes_is_refused(
    case: Case, name: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    # Of two scales of FP8, one is taken.
    left = "weight_scale" if case is FP8_ONE and name == "weight_scale_inv" else name
    config = write(tmp_path, Case(case.quantization, {**case.tensors, name: tensor}, case.expected, case.form))
    with pytest.raises(
        UnsupportedModelError, match=rf"holds {LAYER}\.{left}, which its configuration has no place for"
    ):
        list(checkpoint_weights(tmp_path, config))
    assert dict(checkpoint_weights(tmp_path, config, ignored=["*"])).keys() == {WEIGHT, NORM}


@pytest.mark.parametrize(
    ("case", "name", "tensor"),
    [
        (gptq(4), "weight", torch.ones(24, 128)),
        (awq(), "weight", torch.ones(24, 128).char()),
        (whole_bytes(1), "weight_packed", packed(4, 1, 96).tensors["weight_packed"]),
    ],
)
def test_a_weight_that_is_stored_twice_is_refused(case: Case, name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    other = next(part for part in case.tensors if part in ("weight", "qweight"))
    config = write(tmp_path, replace(case, tensors={**case.tensors, name: tensor}))
    names = " and ".join(rf"{LAYER}\.{part}" for part in sorted([name, other]))
    with pytest.raises(UnsupportedModelError, match=f"holds {names}, which are one weight"):
        list(checkpoint_weights(tmp_path, config))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_under_another_name_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    more = {"experts": torch.ones(24, 96).to(dtype)}
    config = write(tmp_path, Case(FP8, {**FP8_ONE.tensors, **more}, FP8_ONE.expected, None))
    with pytest.raises(UnsupportedModelError, match=rf"{LAYER}\.experts is of dtype \w+, must be"):
        list(checkpoint_weights(tmp_path, config))


def test_scales_of_activations_and_of_no_shift_change_nothing(tmp_path: Path) -> None:
    more = {
        name: torch.ones(1) for name in ("input_scale", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale")
    }
    tensors = {**FP8_ONE.tensors, **more, "weight_zero_point": ZERO, "position_ids": torch.arange(3)}
    config = write(tmp_path, Case(FP8, tensors, FP8_ONE.expected, None))
    read = dict(checkpoint_weights(tmp_path, config))
    assert read.keys() == {WEIGHT, NORM}
    np.testing.assert_allclose(read[WEIGHT].numpy(), FP8_ONE.expected, rtol=2e-6, atol=2e-6)


STATED = {
    "config.json": {"quantization_config": FP8},
    "config.json, as older ones": {
        "compression_config": {"format": "float-quantized", "config_groups": {}, "quantization_status": "frozen"}
    },
    "config.json, by ModelOpt": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    "hf_quant_config.json": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
    "hf_quant_config.json, by outputs": {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
}


@pytest.mark.parametrize("place", STATED)
def test_a_quantization_is_found_wherever_checkpoints_state_it(place: str, tmp_path: Path) -> None:
    write(tmp_path, FP8_ONE)
    LlamaConfig().save_pretrained(tmp_path)
    file = tmp_path / place.partition(",")[0]
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | STATED[place]))
    read = dict(checkpoint_weights(tmp_path, read_config(tmp_path)))
    np.testing.assert_allclose(read[WEIGHT].numpy(), FP8_ONE.expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "aqlm"}, "quantised by aqlm, which are not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "in format gemv, must be gemm"),
        ({"quant_method": "modelopt to NVFP4"}, "quantised by modelopt to NVFP4, which are not supported"),
        ({"quant_method": "awq", "bits": 8}, "to 8 bits, must be 4"),
        ({"quant_method": "gptq", "bits": 3}, "to 3 bits, must be 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in format marlin, must be gptq or"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"},
            "in format gptq and gptq_v2, must be in one",
        ),
        ({"quant_method": "awq", "bits": 4, "backend": "LLM-AWQ"}, "in format llm-awq, must be gemm"),
        (compressed("nvfp4-pack-quantized", 4), "in format nvfp4-pack-quantized, must be pack-quantized"),
        (compressed("pack-quantized", 2), "to 2 bits, must be 4 or 8"),
        ({**compressed("pack-quantized", 4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
        ({**compressed("pack-quantized", 4), "transform_config": {"config_groups": {"u": {}}}}, "a transform_config"),
    ],
)
def test_other_formats_are_refused_by_the_configuration(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_config(LlamaConfig(quantization_config=quantization))
