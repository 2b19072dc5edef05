"""How long steps of a target take: decoding at batch 1 and 8, and a prefill in chunks."""

from __future__ import annotations

import time

from spool.engine.kv.pages import PageTable
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters

PAGES = 128
"""Of 16 positions, that the steps need."""
_PROMPT = [(7 * place * place + 3) % 40_000 for place in range(512)]
_CHUNK, _HISTORY, _STEPS = 128, 100, 12
_BATCHES = (1, 8)


def step_times(engine: TargetEngine) -> dict[str, float]:
    """Seconds of a step by batch, and of a prefill of 512 tokens."""
    return {f"decoding, batch {batch}": _decoding(engine, batch) for batch in _BATCHES} | {"prefill": _prefill(engine)}


def _decoding(engine: TargetEngine, batch: int) -> float:
    tables = [PageTable() for _ in range(batch)]
    engine.step([_row(table, _PROMPT[:_HISTORY]) for table in tables])
    began = time.perf_counter()
    for step in range(_STEPS):
        engine.step([_row(table, _PROMPT[step : step + 1]) for table in tables])
    return _freed(engine, tables, (time.perf_counter() - began) / _STEPS)


def _prefill(engine: TargetEngine) -> float:
    table, began = PageTable(), time.perf_counter()
    for first in range(0, len(_PROMPT), _CHUNK):
        engine.step([_row(table, _PROMPT[first : first + _CHUNK])])
    return _freed(engine, [table], time.perf_counter() - began)


def _row(table: PageTable, tokens: list[int]) -> VerifyRow:
    return VerifyRow(table, tokens, (), True, tokens, len(tokens), SamplingParameters())


def _freed(engine: TargetEngine, tables: list[PageTable], seconds: float) -> float:
    for table in tables:
        engine.pool.free(table)
    return seconds
