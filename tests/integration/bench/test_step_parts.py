"""The breakdown of a step, on a tiny model and a real worker process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench.exact_steps import ExactPrice, price
from bench.step_parts import parts_of, wire_ms, wire_steps
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from services.rpc.worker_codec import step_to_wire
from tests.support.tiny_models import tiny_model


@pytest.mark.slow
def test_parts_add_up_to_the_pass(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    engine = load_target_engine(EngineSettings(str(tmp_path), threads=1, kv_pages=256), lambda *_: None)
    found = parts_of(engine, 2, 3)
    assert engine.pool.free_pages == 256
    assert found["step"] > 0
    assert all(milliseconds >= 0 for milliseconds in found["parts"].values())
    assert found["parts"]["linear layers"] > 0
    # `dispatch` is the rest of the pass; nothing is left where the profiler made the operations slower than the pass.
    total = sum(found["parts"].values())
    if found["parts"]["dispatch"] > 0:
        assert total == pytest.approx(found["forward"])
    else:
        assert total >= found["forward"]


def test_price_of_exact_mode_compares_pair_by_pair(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    settings = EngineSettings(str(tmp_path), threads=1, kv_pages=256)
    engines = [load_target_engine(replace(settings, exact=exact), lambda *_: None) for exact in (True, False)]
    found = price((engines[0], engines[1]), (2, 3), pairs=4)
    assert [engine.pool.free_pages for engine in engines] == [256, 256]
    assert (found.sequences, found.rows_each) == (2, 3)
    assert min(found.exact_ms, found.other_ms, found.ratio) > 0

    # The machine is twice as slow in the second half, and exact steps always take a tenth longer.
    found = ExactPrice.of((1, 1), [1.1, 1.1, 2.2, 2.2], [1.0, 1.0, 2.0, 2.0])
    assert found.ratio == pytest.approx(1.1)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_the_wire_takes_time_beyond_the_step() -> None:
    found = asyncio.run(wire_ms(3, 2))
    assert 0 < found["of_it_encoding"] < found["round_trip"] <= found["round_trip_p99"]
    # The size is that of the last step. Only the epoch of the worker, a number of 1 to 10 bytes, is not known here.
    last = wire_steps(3, 2)[-1]
    shortest, longest = (step_to_wire(last, epoch, 1).ByteSize() for epoch in (1, 2**64 - 1))
    assert shortest <= found["request_bytes"] <= longest == shortest + 9
