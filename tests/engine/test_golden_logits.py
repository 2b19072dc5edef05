"""Universal numerics: logits have one expected result, whatever computes them.

The digests are of all bits. They change with what is computed on purpose, and the part `numerics` of fingerprints then
does as well (engine/exactness/fingerprint.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from spool.engine.cpu.build import compiled_library
from spool.engine.cpu.isa import InstructionSet, available_isas, best_build
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.demo.build import build_demo_models
from spool.engine.kv.pages import PagePool
from spool.engine.models.fetching import fetch_model
from spool.engine.models.reading import read_model
from spool.engine.models.source import DemoPart, resolve_model
from spool.engine.passes.runner import ModelRunner
from spool.engine.settings import EngineSettings
from spool.scheduler.messages import Role
from tests.support.cpu_kernels import CROSS_COMPILER, compiled_kernels, kernel_program
from tests.support.decoding import paged_logits
from tests.support.golden_models import FAMILIES, STORED, WEIGHTS, golden_folder, golden_tokens
from tests.support.recorded_pass import RecordingKernels

GOLDEN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("golden_logits.json").read_text())
"""By the number of rows and the form of the model."""

PAGE_SIZE = 16
ROWS = 64
MANY_ROWS = 4096
KV = ("auto", "int8")
FORMS = [f"{family}-{weights}-{kv}" for family in FAMILIES for weights in WEIGHTS for kv in KV]
PROGRAM = Path(__file__).parent / "kernels" / "run_model.c"
# The instruction set, whether in the best build for this processor or in that for all that have the set, the compiler.
Build = tuple[InstructionSet, bool, str]
ISAS = available_isas()
SOME: list[Build] = [*((isa, True, "gcc") for isa in ISAS), (ISAS[0], False, "gcc"), (ISAS[0], True, "clang")]
ALL: list[Build] = [
    (isa, whole, compiler)
    for isa in ISAS
    for whole in (True, False)
    for compiler in ("gcc", "clang")
    if whole or best_build(isa) is not isa.builds[-1]
]


def named(build: Build) -> str:
    isa, whole, compiler = build
    return f"{isa.name}{'' if whole else '-alone'}-{compiler}"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def kernels_of(build: Build, monkeypatch: pytest.MonkeyPatch, kind: type[CpuKernels] = CpuKernels) -> CpuKernels:
    isa, whole, compiler = build
    monkeypatch.setenv("CC", compiler)
    compiled_kernels(isa=isa.name, universal=True)
    isa = isa if whole else replace(isa, builds=isa.builds[-1:])
    library = compiled_library(isa, "bfloat16", True, lambda *_: None)
    return kind(ctypes.CDLL(str(library.path)), torch.bfloat16, isa.name, library.identity, universal=True)


def runner_of(folder: Path, kernels: CpuKernels, quantization: str, kv: str, rows: int) -> tuple[ModelRunner, PagePool]:
    """With room for so many rows."""
    settings = EngineSettings(str(folder), quantization=quantization, kv_cache_dtype=kv, page_size=PAGE_SIZE)
    source = fetch_model(resolve_model(str(folder), Role.TARGET), lambda *_: None)
    loaded = replace(read_model(source, settings, Role.TARGET, lambda *_: None), kernels=kernels)
    loaded.replace_layers()
    assert loaded.universal
    pool = PagePool(rows // PAGE_SIZE, PAGE_SIZE)
    return loaded.runner(pool, ()), pool


def digest_of(folder: Path, kernels: CpuKernels, quantization: str, kv: str, rows: int) -> str:
    """Of the logits of a sequence, computed by a prefill, by pieces as in verification, and one by one."""
    runner, pool = runner_of(folder, kernels, quantization, kv, rows)
    pieces = [*[128] * (rows // 128 - 1), *[min(rows, 128) // 2 - 4], 7, 1, 3, 5, 8, 1, 1]
    pieces += [1] * (rows - sum(pieces))
    logits = paged_logits(runner, pool, golden_tokens(rows), pieces)
    return digest(logits.contiguous().view(torch.uint8).numpy().tobytes())


def digest(logits: bytes) -> str:
    return hashlib.sha256(logits).hexdigest()[:16]


@cache
def _folder(family: str, weights: str, root: Path) -> Path:
    folder = root / f"{family}-{weights}"
    folder.mkdir()
    return golden_folder(family, weights, folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


def check(build: Build, rows: int, threads: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of(build, monkeypatch)
    found = {}
    for number, form in enumerate(FORMS):
        family, weights, kv = form.split("-")
        torch.set_num_threads((threads + number) % 3 + 1)
        quantization = "auto" if weights in STORED else weights
        found[form] = digest_of(_folder(family, weights, root), kernels, quantization, kv, rows)
    assert found == {form: GOLDEN[str(rows)][form] for form in FORMS}


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=[] if named(build) in ("amx-gcc", "avx2-gcc") else pytest.mark.slow) for build in SOME],
    ids=named,
)
def test_all_forms_of_models_give_the_golden_logits(build: Build, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(build, ROWS, 0, root, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize("build", ALL, ids=named)
def test_many_rows_of_all_forms_give_the_golden_logits(
    build: Build, threads: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(build, MANY_ROWS, threads, root, monkeypatch)


@pytest.mark.sampled(len(SOME), 1)
@pytest.mark.parametrize("build", SOME, ids=named)
def test_the_demo_gives_the_golden_logits(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of(build, monkeypatch)
    folder = build_demo_models(lambda *_: None, [DemoPart.TARGET])[DemoPart.TARGET]
    torch.set_num_threads(2)
    assert digest_of(folder, kernels, "auto", "auto", ROWS) == GOLDEN[str(ROWS)]["demo"]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["-march=armv8-a", "-march=armv8.2-a+bf16+dotprod"])
def test_arm_gives_the_golden_logits(isa: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and head in an emulator, of a pass that was recorded here."""
    options = ["-O3", "-DNDEBUG", "-DUNIVERSAL", isa, "-static"]
    run_model = kernel_program(PROGRAM, CROSS_COMPILER, "BF16", options, tmp_path)
    recorded = tmp_path / "recorded"
    kernels = kernels_of(SOME[0], monkeypatch, RecordingKernels)
    assert isinstance(kernels, RecordingKernels)
    found = {}
    for form in FORMS:
        family, weights, kv = form.split("-")
        quantization = "auto" if weights in STORED else weights
        runner, pool = runner_of(_folder(family, weights, root), kernels, quantization, kv, ROWS)
        kernels.record()
        paged_logits(runner, pool, golden_tokens(ROWS), [ROWS])
        recorded.write_bytes(kernels.recorded())
        found[form] = digest(run_model(recorded).stdout)
    assert found == {form: GOLDEN[str(ROWS)][form] for form in FORMS}
