"""What must be alike on two workers for equal bits, part by part (docs/exactness.md)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from spool.engine.cpu.fused_layers import KernelDecoder
from spool.engine.exactness.calibration_cache import cublas_conditions, device_name, model_conditions, write_whole
from spool.engine.models.compatibility import has_moving_rope
from spool.engine.models.dtype import dtype_name
from spool.engine.models.loaded_model import LoadedModel, attention_name
from spool.engine.models.source import cache_folder, weights_path
from spool.engine.models.weights import safetensors_files
from spool.engine.passes.runner import ModelRunner
from spool.engine.quantization.gguf_file import part_paths
from spool.engine.quantization.sizes import QUANTIZATION_FILE
from spool.engine.settings import EngineSettings

# Raised when the same parts give other logits than before (engine/cpu/csrc, engine/layers/rotation.py).
_UNIVERSAL = 1
# Raised when they give other bits or tokens than before: sampling, grammars, the digest of a row of logits.
_RECIPE = 4
_DIGITS = 16
# Of a file's state.
_CHANGED_BY_WRITING = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
# Bytes from which on a file's digest is looked up faster than it is made.
_SLOWLY_READ = 1 << 22
_CLOCK_SECONDS = 2.0
# Of each tensor of weights in memory, the elements that tell one model from another.
SAMPLED_WEIGHTS = 256


def folder_parts(folder: Path) -> dict[str, str]:
    """Of all bytes of a model folder's weights and of its configuration. Raises UnsupportedModelError, OSError."""
    source = weights_path(folder)
    if source != folder:
        files = part_paths(source)
    else:
        files = safetensors_files(folder) or sorted(folder.glob("pytorch_model*.bin"))
    configurations = [folder / "config.json", folder / QUANTIZATION_FILE]
    return {"weights": _of_files(files), "model": _of_files(file for file in configurations if file.is_file())}


def memory_parts(model: PreTrainedModel) -> dict[str, str]:
    """The same of a model that came from no folder, of its weights by a sample of each tensor."""
    digest = hashlib.sha256()
    for name, weights in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight_sample(weights))
    config = json.dumps(model_conditions(model), sort_keys=True, default=str).encode()
    return {"weights": digest.hexdigest()[:_DIGITS], "model": hashlib.sha256(config).hexdigest()[:_DIGITS]}


def weight_sample(weights: torch.Tensor) -> bytes:
    sample = weights.flatten()[:SAMPLED_WEIGHTS].contiguous().cpu().view(torch.uint8)
    return sample.numpy().tobytes()


def fingerprint_parts(
    source: dict[str, str],
    loaded: LoadedModel,
    runner: ModelRunner,
    settings: EngineSettings,
    exact_row_counts: tuple[int, ...],
) -> dict[str, str]:
    """All parts, of which `source` are those of `folder_parts` or `memory_parts`. `loaded` has its layers replaced."""
    model, kernels, device = loaded.model, loaded.kernels, loaded.model.device
    parts = {
        **source,
        "tokenizer": loaded.vocabulary.digest.hex()[:_DIGITS] or "none",
        "dtype": dtype_name(model.dtype),
        "quantization": loaded.quantization,
        "kv_cache_dtype": dtype_name(runner.kv.layers[0].pool.dtype),
        "exact": "on" if settings.exact else "off",
        "llguidance": _installed("llguidance"),
    }
    if settings.ignore_tensors:
        parts["ignore_tensors"] = " ".join(sorted(settings.ignore_tensors))
    if has_moving_rope(model.config):
        parts["max_model_len"] = str(settings.max_model_len)
    if loaded.universal and isinstance(model.base_model, KernelDecoder):
        layers = _of_text(model.base_model.described)
        return parts | {"numerics": f"universal {_UNIVERSAL}", "layers": layers, "sampling": f"recipe {_RECIPE}"}
    parts |= {
        "ranks": str(settings.tensor_parallel_size),
        "kernels": f"{kernels.isa} {kernels.identity}" if kernels else loaded.kernel_identity or "none",
        "attention": attention_name(runner.backend),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "spool": f"{_installed('spool-serve')}, recipe {_RECIPE}",
    }
    if device.type == "cpu":
        # Decides which of its functions torch takes, for sines too.
        parts["torch"] += f" {torch.backends.cpu.get_cpu_capability()}"
    else:
        parts["cublas"] = _of_text(str(cublas_conditions()))
    if not loaded.by_cpu_kernels:
        parts |= {"processor": device_name(device), "row counts": _of_text(str(exact_row_counts))}
        parts |= {"page_size": str(settings.page_size), "max_num_batched_tokens": str(settings.batched_tokens)}
        if device.type == "cpu":
            parts["threads"] = str(torch.get_num_threads())
    return parts


def _of_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(_of_file(file))
    return digest.hexdigest()[:_DIGITS]


def _of_file(file: Path) -> bytes:
    """Of all its bytes, which are not read again as long as nobody has written to a large file."""
    read = file.stat()
    state = [str(file.resolve()), *(getattr(read, name) for name in _CHANGED_BY_WRITING)]
    known = cache_folder() / "digests" / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}.txt"
    with suppress(OSError, ValueError):
        digest = bytes.fromhex(known.read_text(encoding="ascii"))
        if len(digest) == hashlib.sha256().digest_size:
            return digest
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").digest()
    # What was written a moment ago may be written again at the same time, as far as the system's clock tells times.
    if read.st_size >= _SLOWLY_READ and time.time() - read.st_mtime > _CLOCK_SECONDS:
        with suppress(OSError):
            write_whole(known, digest.hex())
    return digest


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
