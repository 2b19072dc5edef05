"""The order in which exact mode tries classes of row counts, and what names a calibration on disk."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine.exactness import calibration_cache
from engine.exactness.calibration import cheapest_first
from engine.exactness.calibration_cache import calibration_key
from engine.settings import EngineSettings

SMALL = (1, 2, 4, 8, 16, 24, 40)
MIDDLE = (8, 16, 32, 48)
LARGE = (96, 112, 128, 144, 160, 176, 192, 208)


def test_a_class_of_large_counts_alone_comes_last_however_many_it_has() -> None:
    asked: list[int] = []

    def seconds(rows: int) -> float:
        asked.append(rows)
        return 1.0 + rows / 100

    assert cheapest_first([LARGE, SMALL, MIDDLE], seconds) == [SMALL, MIDDLE, LARGE]
    assert sorted(asked) == sorted(set(asked))


def test_counts_that_take_longer_than_larger_ones_are_dear() -> None:
    """One row by a kernel for single rows, say, that is slow for this layer."""
    assert cheapest_first([SMALL, MIDDLE], lambda rows: 9.0 if rows == 1 else 1.0) == [MIDDLE, SMALL]


def test_a_class_that_ends_early_takes_several_passes() -> None:
    assert cheapest_first([(1, 8, 16), (1, 8, 40)], lambda rows: 1.0) == [(1, 8, 40), (1, 8, 16)]


@pytest.mark.parametrize("classes", [[LARGE, SMALL], [SMALL, LARGE]])
def test_classes_about_as_cheap_keep_their_order(classes: list[tuple[int, ...]]) -> None:
    assert cheapest_first(classes, lambda rows: 1.0 + rows / 10_000) == classes


MODEL: Any = SimpleNamespace(config=LlamaConfig(), dtype=torch.bfloat16, device=torch.device("cuda"))
SETTINGS = EngineSettings("any")


FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, flag) for flag in FLAGS]
    yield
    for flag, value in zip(FLAGS, before, strict=True):
        setattr(matmul, flag, value)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_cublas_makes_another_key(gpu: None, flag: str) -> None:
    keys = set()
    for value in (False, True):
        setattr(torch.backends.cuda.matmul, flag, value)
        keys.add(calibration_key(MODEL, SETTINGS, None))
    assert len(keys) == 2


@pytest.mark.parametrize("name", ["CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"])
def test_a_variable_of_cublas_makes_another_key(gpu: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for value in (":4096:8", ":16:8"):
        monkeypatch.setenv(name, value)
        keys.add(calibration_key(MODEL, SETTINGS, None))
    assert len(keys) == 2


def test_other_libraries_make_another_key(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {calibration_key(MODEL, SETTINGS, None)}
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", "99.9")
        keys.add(calibration_key(MODEL, SETTINGS, None))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "another")
        keys.add(calibration_key(MODEL, SETTINGS, None))
    with monkeypatch.context() as patch:
        patch.setattr(calibration_cache, "version", lambda distribution: f"{distribution} 13.99")
        keys.add(calibration_key(MODEL, SETTINGS, None))
    assert len(keys) == 4
    assert calibration_key(MODEL, SETTINGS, None) in keys


def test_no_key_of_a_cpu_depends_on_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> str:
        raise RuntimeError("no CUDA here")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", absent)
    monkeypatch.setattr(torch.cuda, "get_device_name", absent)
    model: Any = SimpleNamespace(config=LlamaConfig(), dtype=torch.float32, device=torch.device("cpu"))
    before = calibration_key(model, SETTINGS, None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert calibration_key(model, SETTINGS, None) == before
