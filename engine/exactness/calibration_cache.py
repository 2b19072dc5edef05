"""Calibrations on disk, one file each, named after everything that the bits of a pass may depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from spool.engine.cpu.isa import processor_name
from spool.engine.exactness.calibration import Calibration
from spool.engine.models.source import cache_folder
from spool.engine.settings import EngineSettings

# Raised when calibration itself changes, so that older results are not believed.
_CALIBRATION_RECIPE = 14


def calibration_file(model: PreTrainedModel, settings: EngineSettings, kernels: str | None) -> Path:
    """Where the calibration of this model on this device, with these library versions and threads, belongs."""
    return cache_folder() / "calibrations" / f"{calibration_key(model, settings, kernels)}.json"


def calibration_key(model: PreTrainedModel, settings: EngineSettings, kernels: str | None) -> str:
    """Names everything but the weights that the bits of a pass may depend on; hexadecimal digits. `kernels`: what
    names those in use."""
    conditions = {
        "recipe": _CALIBRATION_RECIPE,
        "model": model_conditions(model),
        "dtype": str(model.dtype),
        "device": device_name(model.device),
        "cublas": cublas_conditions() if model.device.type == "cuda" else None,
        "kernels": kernels,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "page_size": settings.page_size,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "max_num_batched_tokens": settings.batched_tokens,
        "ranks": settings.tensor_parallel_size,
    }
    return hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()[:32]


def model_conditions(model: PreTrainedModel) -> dict[str, object]:
    """Of a model's configuration, what its passes depend on."""
    return {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}


def read_calibration(file: Path) -> Calibration | None:
    """None where there is no file, or one that cannot be read as a calibration."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return Calibration(tuple(stored.pop("row_counts")), **stored)
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None


def write_calibration(file: Path, calibration: Calibration) -> None:
    write_whole(file, json.dumps(asdict(calibration)))


def write_whole(file: Path, text: str) -> None:
    """Or not at all: another worker may read at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as scratch:
        scratch.write(text)
    os.replace(scratch.name, file)


def cublas_conditions() -> dict[str, object]:
    """Versions of cuBLAS, and what chooses among its kernels."""
    matmul = torch.backends.cuda.matmul
    # torch's wheels bring cuBLAS along; torch itself gives only the version of CUDA.
    wheels = ("nvidia-cublas", "nvidia-cublas-cu12")
    return {
        "cuda": torch.version.cuda,
        "wheels": [_installed_version(wheel) for wheel in wheels],
        "reduced_bf16": matmul.allow_bf16_reduced_precision_reduction,
        "reduced_fp16": matmul.allow_fp16_reduced_precision_reduction,
        "accumulated_fp16": matmul.allow_fp16_accumulation,
        # Follows allow_tf32, which raises where this newer setting was used.
        "tf32": matmul.fp32_precision,
        "library": torch.backends.cuda.preferred_blas_library(),
        "workspaces": [os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")],
    }


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Names the processor, and what torch makes of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {processor_name()} {torch.backends.cpu.get_cpu_capability()}"
