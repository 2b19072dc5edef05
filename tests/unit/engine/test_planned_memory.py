"""What is planned of a GPU's memory is what an engine allocates there, for the shapes of real models.

Their tensors are on the meta device, and their kernels are launched nowhere: what is counted is the memory of every
tensor that lives.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cuda.setup import GpuPasses
from spool.engine.kv.groups import lanes_of, page_groups
from spool.engine.kv.pages import PagePool
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.memory_plan import (
    BESIDE_TENSORS,
    MAX_LOGITS_ROWS,
    SHAPED_AT_ONCE,
    SHAPING_BYTES,
    model_memory,
    plan_memory,
)
from spool.engine.models.vocabulary import Vocabulary
from spool.engine.passes.graph_sizes import MOST_ROWS
from spool.engine.passes.warm_up import warm_up
from spool.engine.quantization.layers import QuantizedEmbedding, QuantizedLinear
from spool.engine.quantization.rounding import rounded
from spool.engine.quantization.sizes import HEAD_BITS
from spool.engine.settings import BATCHED_TOKENS_ON_GPU
from tests.support.triton_kernel import interpreted

PAGE = 16
GIB = 1 << 30
META = torch.device("meta")
KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Kind, vocabulary, hidden and inner size, layers, heads, KV heads, dimensions of a head, positions, tied embeddings.
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, int, bool]] = {
    "Qwen3-0.6B": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, True),
    "Qwen3-1.7B": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, True),
    "Qwen3-4B": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 40960, True),
    "Qwen3-8B": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, False),
    "Qwen3-14B": ("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, 40960, False),
    "Qwen3-32B": ("qwen3", 151936, 5120, 25600, 64, 64, 8, 128, 40960, False),
    "Llama-3.2-1B": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, True),
    "Llama-3.2-3B": ("llama", 128256, 3072, 8192, 28, 24, 8, 128, 131072, True),
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, False),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, True),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, False),
    "Qwen2.5-14B": ("qwen2", 152064, 5120, 13824, 48, 40, 8, 128, 32768, False),
}
# Of the layers of some, half see a window of positions only.
WINDOWED = "Qwen2.5-7B with windows"
SHAPES[WINDOWED] = SHAPES["Qwen2.5-7B"]
WINDOWS = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}
# With GiB of a GPU and bits of the weights.
CASES = [
    *(("Qwen3-0.6B", 16, 16), ("Qwen3-1.7B", 16, 8), ("Qwen3-4B", 16, 4), ("Qwen3-8B", 24, 16), ("Qwen3-14B", 24, 4)),
    *(("Qwen3-32B", 141, 16), ("Llama-3.2-1B", 16, 16), ("Llama-3.2-3B", 24, 8), ("Llama-3.1-8B", 80, 16)),
    *(("Qwen2.5-1.5B", 16, 4), ("Qwen2.5-7B", 48, 16), ("Qwen2.5-14B", 48, 8), (WINDOWED, 48, 16)),
]


class Living(TorchDispatchMode):
    """Counts the bytes of tensors on the meta device that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        found = func(*args, **(kwargs or {}))
        new = False
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages or self._storages[storage._cdata][0].expired():
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    new = True
        if new:
            self.peak = max(self.peak, self.bytes)
        return found

    @contextmanager
    def more(self, found: list[int]) -> Iterator[None]:
        """Adds to `found` what is needed meanwhile beside what was there."""
        before = self.peak = self.bytes
        yield
        found.append(self.peak - before)


def meta_model(name: str) -> PreTrainedModel:
    kind, vocabulary, hidden, inner, layers, heads, kv_heads, head_dim, positions, tied = SHAPES[name]
    config = KINDS[kind](
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **(WINDOWS if name == WINDOWED else {}),
    )
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    if tied:
        model.tie_weights()
    return model.eval()


def round_meta(model: PreTrainedModel, bits: int) -> None:
    """As `round_weights`, which tells tied weights by their addresses: tensors here have none."""
    embedding = QuantizedEmbedding(rounded(model.get_input_embeddings().weight.detach(), HEAD_BITS), model.dtype)
    model.set_input_embeddings(embedding)
    head = embedding.quantized
    if not model.config.tie_word_embeddings:
        head = rounded(model.get_output_embeddings().weight.detach(), HEAD_BITS)
    model.set_output_embeddings(QuantizedLinear(head))
    for module in list(model.base_model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, QuantizedLinear(rounded(child.weight.detach(), bits), child.bias))


def save_headers(model: PreTrainedModel, folder: Path) -> None:
    """A checkpoint whose tensors are a hole in a file."""
    model.config.save_pretrained(folder)
    header: dict[str, object] = {}
    end = 0
    for name, parameter in model.named_parameters():
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + parameter.nbytes]}
        end += parameter.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gib", "bits"), CASES)
def test_what_is_planned_is_what_is_allocated(name: str, gib: int, bits: int, tmp_path: Path) -> None:
    attention, products, launches = (
        interpreted(f"spool.engine.cuda.{module}") for module in ("triton_attention", "triton_product", "launches")
    )
    save_headers(meta_model(name), tmp_path)
    tokens, quantization = BATCHED_TOKENS_ON_GPU, "none" if bits == 16 else f"int{bits}"
    planned = model_memory(name, tmp_path, "bfloat16", tokens, quantization=quantization)
    (kv_bytes,) = plan_memory(gib * GIB, 0.9, [planned])
    living, passes = Living(), list[int]()

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        if len(passes) == 1:
            # The first graph is the largest: the others find room in its memory.
            with living.more(passes):
                compute()
        return compute

    with living, torch.inference_mode(), launches.made_ahead():
        model = meta_model(name)
        if bits < 16:
            with META:
                round_meta(model, bits)
        config = model.config
        heads = config.num_attention_heads, config.num_key_value_heads
        gpu = GpuPasses("", lambda page: attention.TritonBackend(*heads, page, META), capture, products.TritonLinear)
        loaded = LoadedModel(model, Vocabulary(b"", config.vocab_size), None, gpu)
        loaded.replace_layers()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        groups = page_groups([None if kind == "full_attention" else config.sliding_window for kind in kinds])
        page_bytes = planned.kv_bytes_per_token * PAGE * lanes_of(groups, len(kinds)) // len(kinds)
        pool = PagePool(kv_bytes // page_bytes, PAGE, groups)
        runner = loaded.runner(pool, (1, MAX_LOGITS_ROWS, tokens))
        with living.more(passes):
            warm_up(tokens, runner, pool)
        assert runner.graphs is not None
        runner.graphs.capture((1, MOST_ROWS), min(config.max_position_embeddings, pool.total_pages * PAGE))
        allocated = living.bytes + sum(passes)
    # What a step takes to choose tokens is computed by torch after a pass.
    shaping = SHAPING_BYTES * min(SHAPED_AT_ONCE, MAX_LOGITS_ROWS * config.vocab_size)
    allocated += BESIDE_TENSORS + shaping
    assert allocated <= 0.9 * gib * GIB
    assert allocated == pytest.approx(planned.fixed + kv_bytes, rel=0.03)
