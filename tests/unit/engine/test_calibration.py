"""The order in which exact mode tries classes of row counts, and what a stored calibration depends on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine.exactness import calibration_cache
from engine.exactness.calibration import cheapest_first
from engine.exactness.calibration_cache import calibration_key, read_calibration
from engine.settings import EngineSettings

SMALL = (1, 2, 4, 8, 16, 24, 40)
MIDDLE = (8, 16, 32, 48)
LARGE = (96, 112, 128, 144, 160, 176, 192, 208)


def test_classes_that_compute_fewer_rows_for_small_passes_come_first() -> None:
    assert cheapest_first([LARGE, SMALL, MIDDLE]) == [SMALL, MIDDLE, LARGE]
    # A class that ends early takes several passes.
    assert cheapest_first([(1, 8, 16), (1, 8, 40)]) == [(1, 8, 40), (1, 8, 16)]


MODEL: Any = SimpleNamespace(config=LlamaConfig(), dtype=torch.bfloat16, device=torch.device("cuda"))
CPU_MODEL: Any = SimpleNamespace(config=LlamaConfig(), dtype=torch.float32, device=torch.device("cpu"))
SETTINGS = EngineSettings("any")
FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, flag) for flag in FLAGS]
    yield
    for flag, value in zip(FLAGS, before, strict=True):
        setattr(matmul, flag, value)


@pytest.mark.usefixtures("_gpu")
def test_what_chooses_among_cublas_kernels_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [calibration_key(MODEL, SETTINGS, None)]
    for flag in FLAGS:
        setattr(torch.backends.cuda.matmul, flag, not getattr(torch.backends.cuda.matmul, flag))
        keys.append(calibration_key(MODEL, SETTINGS, None))
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(variable, ":16:8")
        keys.append(calibration_key(MODEL, SETTINGS, None))
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    keys.append(calibration_key(MODEL, SETTINGS, None))
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "another")
    keys.append(calibration_key(MODEL, SETTINGS, None))
    monkeypatch.setattr(calibration_cache, "version", lambda distribution: f"{distribution} 13.99")
    keys.append(calibration_key(MODEL, SETTINGS, None))
    assert len(set(keys)) == len(keys) == 9


def test_no_key_of_a_cpu_depends_on_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    before = calibration_key(CPU_MODEL, SETTINGS, None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert calibration_key(CPU_MODEL, SETTINGS, None) == before


def test_a_broken_calibration_file_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text('{"shapes": {}}')
    assert read_calibration(tmp_path / "calibration.json") is None
