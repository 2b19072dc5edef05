"""How a GPU's memory is divided: all of it, evenly by tokens, and never more than there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import GpuMemoryError
from engine.models.loaded_model import KvShape
from engine.models.memory_plan import MIN_KV_TOKENS, ModelMemory, model_memory, plan_memory
from engine.parallel.shards import part_of
from tests.support.tiny_models import save_tiny_pair, tiny_model

GB = 10**9
GPUS = (24, 141)
# Qwen3-8B and Qwen3-0.6B in bfloat16: parameters of their model cards, KV of their layers, KV heads and dimensions.
TARGET = ModelMemory("target", 2 * 8_190_735_360, 3 * GB // 2, 2 * 36 * 8 * 128 * 2)
DRAFT = ModelMemory("draft", 2 * 596_049_920, 3 * GB // 2, 2 * 28 * 8 * 128 * 2)
WORKERS = {"target": (TARGET,), "pair": (TARGET, DRAFT), "two pairs": (TARGET, DRAFT, TARGET, DRAFT)}
FITTING = [
    (gigabytes, workers) for gigabytes in GPUS for workers in WORKERS if (gigabytes, workers) != (24, "two pairs")
]


@pytest.mark.parametrize(("gigabytes", "workers"), FITTING)
@pytest.mark.parametrize("utilization", [0.9, 1.0])
def test_all_that_is_allowed_is_used_and_no_more(gigabytes: int, workers: str, utilization: float) -> None:
    total = gigabytes * GB
    kv = plan_memory(total, utilization, WORKERS[workers])
    taken = sum(kv) + sum(worker.weights + worker.workspace for worker in WORKERS[workers])
    of_a_token = sum(worker.kv_bytes_per_token for worker in WORKERS[workers])
    assert total * utilization - of_a_token < taken <= total * utilization
    tokens = [count / worker.kv_bytes_per_token for count, worker in zip(kv, WORKERS[workers], strict=True)]
    assert len(set(tokens)) == 1
    assert tokens[0] >= MIN_KV_TOKENS


def test_a_pair_on_a_gpu_of_24_gb_by_hand() -> None:
    """21.6 GB, less 17,573,570,560 bytes of weights and 3 GB of workspaces, are 3,915 tokens of 262,144 bytes."""
    assert plan_memory(24 * GB, 0.9, (TARGET, DRAFT)) == (3915 * 147_456, 3915 * 114_688)


@pytest.mark.parametrize(
    ("gigabytes", "workers", "said"),
    [
        (24, "two pairs", "has 22.4 GiB, of which gpu_memory_utilization 0.9 allows 20.1 GiB"),
        (16, "target", "needed are target 15.3 GiB of weights, 1.4 GiB of workspace and 0.3 GiB of KV for 2048 tokens"),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers(gigabytes: int, workers: str, said: str) -> None:
    with pytest.raises(GpuMemoryError) as refused:
        plan_memory(gigabytes * GB, 0.9, WORKERS[workers])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_a_checkpoint_says_is_what_its_model_takes(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    found = model_memory("target", folder, "float16", 100)
    assert found.weights == sum(weights.nbytes for weights in model.parameters())
    assert found.kv_bytes_per_token == KvShape.of(model.config).bytes_per_token(torch.float16)
    assert found.workspace > 1 << 30
    in_safetensors = model_memory("target", folder, "auto", 100).weights
    assert in_safetensors == 2 * found.weights  # float32
    (folder / "model.safetensors").unlink()
    torch.save(model.float().state_dict(), folder / "pytorch_model.bin")
    assert in_safetensors <= model_memory("target", folder, "auto", 100).weights < 1.3 * in_safetensors


@pytest.mark.parametrize(
    ("bits", "quantization"),
    [
        (4, {"quant_method": "awq", "bits": 4}),
        (8, {"quant_method": "gptq", "bits": 8}),
        (8, {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}),
    ],
)
def test_packed_weights_are_planned_for_as_expanded(bits: int, quantization: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("qwen3", tmp_path)
    plain = model_memory("target", folder, "bfloat16", 100)
    weights = load_file(folder / "model.safetensors")
    suffix = "weight_packed" if "config_groups" in quantization else "qweight"
    for name in [name for name in weights if name.endswith("proj.weight")]:
        out, inputs = weights.pop(name).shape
        packed = torch.zeros(out, inputs * bits // 32, dtype=torch.int32)
        weights[f"{name.removesuffix('weight')}{suffix}"] = packed
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert model_memory("target", folder, "bfloat16", 100) == plain


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (4, 2, 4), (9, 3, 2)])
def test_a_rank_takes_what_its_part_of_the_model_does(heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=288)
    model.save_pretrained(tmp_path)
    part = part_of(AutoConfig.from_pretrained(tmp_path), size)
    weights = AutoModelForCausalLM.from_config(part).num_parameters() * 4
    found = model_memory("target", tmp_path, "auto", 100, size)
    # Norms, of which each rank has all, are counted as if they were divided as well.
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.kv_bytes_per_token == KvShape.of(part).bytes_per_token(torch.float32)


@pytest.mark.parametrize("content", ["{}", "no JSON", "[]"])
def test_a_folder_that_does_not_say_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(GpuMemoryError, match="does not say how much memory its model takes"):
        model_memory("draft", tmp_path, "auto", 100)
