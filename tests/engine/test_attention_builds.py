"""The attention kernel compiles for every GPU that Spool supports, by the assembler in Triton's wheel."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="Triton is made for Linux only")

SAMPLE = 105
"""One in so many variants: every architecture, dtype, head dimension and group is among them."""


def test_a_sample_of_all_variants_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import attention_builds

    # Where Triton has its interpreter, it compiles nothing.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wanted = list(attention_builds.variants())[::SAMPLE]
    assert {one.architecture for one in wanted} == {80, 89, 90, 100}
    assert {one.dtype for one in wanted} == {"bf16", "fp16", "fp32"}
    assert {one.head_dim for one in wanted} == {64, 96, 128, 256}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as compilers:
        for build in compilers.map(attention_builds.build, wanted):
            assert build.fault == "", build
            assert 0 < build.registers <= 255, build
            assert build.shared_memory > 0, build
