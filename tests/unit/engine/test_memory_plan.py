"""How a GPU's memory is divided: all of it, evenly by tokens, and never more than there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cpu.attention import KernelBackend
from spool.engine.description import EngineDescription
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.errors import GpuMemoryError
from spool.engine.kv.paged_kv import PagedKv, PagedKvStore
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models.loaded_model import KvShape
from spool.engine.models.memory_plan import MAX_LOGITS_ROWS, MIN_KV_TOKENS, ModelMemory, model_memory, plan_memory
from spool.engine.parallel.shards import part_of
from spool.engine.passes.runner import ModelRunner
from spool.engine.quantization.gguf_folder import gguf_folder
from spool.engine.quantization.model import build_model, open_weights, round_weights
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.steps import ProposeRow, RowOutcome, VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.messages import PromptScoring
from spool.scheduler.sampling import SamplingParameters
from tests.support.cpu_kernels import compiled_kernels
from tests.support.gguf_models import write_model
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, save_tiny_pair, tiny_model

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_quantized_kv_takes_what_its_pages_do(ranks: int, tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path, num_key_value_heads=2, head_dim=32)
    memory = partial(model_memory, "target", folder, "bfloat16", 100, ranks)
    plain, quantized = memory(), memory(quantized_kv=True)
    assert replace(quantized, kv_bytes_per_token=plain.kv_bytes_per_token) == plain
    shape = KvShape.of(AutoConfig.from_pretrained(folder))
    kv = PagedKv(shape.layers, 3, 8, shape.kv_heads // ranks, 32, torch.bfloat16, torch.device("cpu"), True)
    assert sum(layer.pool.nbytes for layer in kv.layers) == 4 * 8 * quantized.kv_bytes_per_token


def test_what_a_checkpoint_says_is_what_its_model_takes(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    found = model_memory("target", folder, "float16", 100)
    assert found.weights == sum(weights.nbytes for weights in model.parameters())
    assert found.kv_bytes_per_token == 2 * KvShape.of(model.config).bytes_of_layer(torch.float16)
    assert found.workspace > 1 << 30
    vectors, logits = 2 * (model.config.hidden_size + model.config.intermediate_size), 2 * model.config.vocab_size
    of_2048 = model_memory("target", folder, "float16", 2048).workspace
    assert of_2048 - found.workspace > 1948 * vectors + (MAX_LOGITS_ROWS - 100) * logits
    in_safetensors = model_memory("target", folder, "auto", 100).weights
    assert in_safetensors == 2 * found.weights  # float32
    weights = load_file(folder / "model.safetensors")
    beyond = {
        name.replace("layers.0", f"layers.{model.config.num_hidden_layers}"): one for name, one in weights.items()
    }
    save_file(weights | {name: one.clone() for name, one in beyond.items()}, folder / "model.safetensors")
    assert model_memory("target", folder, "auto", 100).weights == in_safetensors  # without the MTP layer
    (folder / "model.safetensors").unlink()
    torch.save(model.float().state_dict(), folder / "pytorch_model.bin")
    assert in_safetensors <= model_memory("target", folder, "auto", 100).weights < 1.3 * in_safetensors


def test_passes_compute_logits_of_no_more_rows_than_are_planned() -> None:
    """Of targets and drafts, sampled or scored, with the answers that each row has in a step of its own."""
    model = tiny_model("llama", **TORCH_SHAPE)
    model.set_attn_implementation(ATTENTION_NAME)
    config, cpu, computed = model.config, torch.device("cpu"), list[int]()
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: computed.append(logits.shape[1]))

    def parts() -> tuple[EngineDescription, ModelRunner, PagePool]:
        kernels = compiled_kernels(torch.float32)
        shape, backend = KvShape.of(config).for_kernels(kernels), KernelBackend(kernels, 16)
        kv = PagedKv(2, 1200, 16, shape.kv_heads, shape.head_dim, torch.float32, cpu)
        described = EngineDescription("tiny", b"", VOCABULARY, "float32", "cpu", 16, 1200, 4096, 2048)
        return described, ModelRunner(model, kv, backend, (8, 500, 600, 2048)), PagePool(1200, 16)

    prompt, sampling = [place * 7 % VOCABULARY for place in range(256)], SamplingParameters(temperature=1.0, seed=1)
    scoring = [PromptScoring(1, tuple(prompt[1:]), 0), None]

    def verify(number: int) -> VerifyRow:
        tokens = prompt if number % 300 == 0 else prompt[number % 100 : number % 100 + 1]
        drafted = [number % 7, 5, 3] if len(tokens) == 1 else []
        return VerifyRow(PageTable(), tokens, drafted, True, tokens, 1, sampling, scoring=scoring[len(tokens) == 1])

    def propose(number: int) -> ProposeRow:
        tokens = prompt[number % 100 : number % 100 + 1]
        return ProposeRow(PageTable(), tokens, 2, tokens, 1, sampling)

    def verified(numbers: Sequence[int]) -> list[RowOutcome]:
        described, runner, pool = parts()
        engine = TargetEngine(described, runner, pool, PagedKvStore(runner.kv, "tiny", b""), LogitsScan())
        return engine.step([verify(number) for number in numbers]).rows

    def proposed(numbers: Sequence[int]) -> list[RowOutcome]:
        return DraftEngine(*parts(), LogitsScan()).step([propose(number) for number in numbers]).rows

    for step, count in ((verified, 390), (proposed, 1100)):
        together = step(range(count))
        assert max(computed) == 500 < MAX_LOGITS_ROWS
        for number in range(0, count, 30):
            (alone,) = step([number])
            assert together[number].tokens == alone.tokens != []
            scores = [one.logprob for one in together[number].prompt_logprobs]
            assert scores == pytest.approx([one.logprob for one in alone.prompt_logprobs], abs=1e-4)
            assert len(scores) == (255 if step is verified and number % 300 == 0 else 0)
        computed.clear()


def taken(model: PreTrainedModel) -> int:
    """Bytes of all tensors."""
    tensors = chain(model.parameters(), model.buffers())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def write_codes(folder: Path, method: str, group: int) -> dict[str, Any]:
    """Puts random codes of 4 bits in the place of a saved model's linear layers; what config.json then says of them."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        out, inputs = weights.pop(name).shape
        layer, groups = name.removesuffix(".weight"), inputs // group

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)

        if method == "compressed-tensors":
            weights[f"{layer}.weight_packed"] = codes(out, inputs // 8)
            weights[f"{layer}.weight_shape"] = torch.tensor([out, inputs])
            weights[f"{layer}.weight_scale"] = torch.rand(out, groups)
            continue
        weights[f"{layer}.qweight"] = codes(inputs, out // 8) if method == "awq" else codes(inputs // 8, out)
        weights[f"{layer}.qzeros"] = codes(groups, out // 8)
        weights[f"{layer}.scales"] = torch.rand(groups, out)
        if method == "gptq":
            weights[f"{layer}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // group
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if method != "compressed-tensors":
        return {"quant_method": method, "bits": 4, "group_size": group}
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": group}}}
    return {"quant_method": method, "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_codes_of_a_checkpoint_take_what_its_model_does(method: str, group: int, tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("qwen3", tmp_path)
    plain = model_memory("target", folder, "bfloat16", 100)
    quantization = write_codes(folder, method, group)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    model = build_model(folder, AutoConfig.from_pretrained(folder), torch.bfloat16, keep=True)
    found = model_memory("target", folder, "bfloat16", 100)
    assert found.weights == pytest.approx(taken(model), rel=0.02)
    assert found.quantization == method
    assert model_memory("target", folder, "bfloat16", 100, quantization="none") == plain
    assert model_memory("target", folder, "bfloat16", 100, code_dtypes=()) == plain


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_takes_what_its_model_does(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path / "cache"))
    types = {"q_proj": "Q4_0", "k_proj": "Q5_1", "v_proj": "Q4_1", "gate_proj": "Q4_0", "up_proj": "Q4_1"}
    write_model(tmp_path / "small.gguf", "llama", tied, quantized=True, types=types)
    folder = gguf_folder(tmp_path / "small.gguf", lambda *_: None)
    model = build_model(open_weights(folder), AutoConfig.from_pretrained(folder), torch.bfloat16, keep=True)
    found = model_memory("target", folder, "auto", 100)
    assert found.weights == pytest.approx(taken(model), rel=0.02)
    assert found.quantization == "q8_0"
    assert model_memory("target", folder, "float32", 100).quantization == "none"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_take_what_their_model_does(bits: int, ranks: int, tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=128, intermediate_size=128)
    model.save_pretrained(tmp_path)
    part = AutoModelForCausalLM.from_config(part_of(model.config, ranks), dtype=torch.bfloat16)
    round_weights(part, bits)
    found = model_memory("target", tmp_path, "bfloat16", 100, ranks, f"int{bits}")
    assert found.weights == pytest.approx(taken(part), rel=0.02)
    assert found.quantization == f"int{bits}"


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (4, 2, 4), (9, 3, 2)])
def test_a_rank_takes_what_its_part_of_the_model_does(heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=288)
    model.save_pretrained(tmp_path)
    part = part_of(AutoConfig.from_pretrained(tmp_path), size)
    weights = AutoModelForCausalLM.from_config(part).num_parameters() * 4
    found = model_memory("target", tmp_path, "auto", 100, size)
    # Norms, of which each rank has all, are counted as if they were divided as well.
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.kv_bytes_per_token == 2 * KvShape.of(part).bytes_of_layer(torch.float32)


@pytest.mark.parametrize("content", ["{}", "no JSON", "[]"])
def test_a_folder_that_does_not_say_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(GpuMemoryError, match="does not say how much memory its model takes"):
        model_memory("draft", tmp_path, "auto", 100)
