"""Two target processes on one device: one is killed amid decoding and the other goes on; KV moves between them.

Engines alone, without the scheduler and the wire, which tests/chaos has on CPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.gpu.decoding import GREEDY, Stream, prompts
from bench.gpu.engines import Bench
from bench.gpu.findings import Findings
from bench.gpu.pair import SHAPES, Pair
from spool.engine.kv.pages import PageTable
from spool.engine.models.loading import target_engine_of
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine

_PROMPT_TOKENS = 100
_TOKENS = 64
_KILLED_AFTER = 20
_KV_TOKENS = 8192

Written = list[tuple[int, int]]
"""Tokens and digests of their logits."""


def killed_and_moved(bench: Bench) -> None:
    """What two processes write must be what one writes by itself, with the same bits of logits."""
    with _target(bench) as first, _target(bench) as second, _target(bench) as third:
        # All of them load at the same time.
        process_ids = [target.submit(os.getpid) for target in (first, second, third)]
        (prompt,) = prompts(1, _PROMPT_TOKENS, SHAPES[bench.shape]().target.vocab_size, seed=2)
        whole: Written = second.submit(_decode, prompt, _TOKENS).result()

        begun: Written = []
        while len(begun) < _KILLED_AFTER:
            begun += first.submit(_decode, _joined(prompt, begun), 1).result()
        # The next step is under way when the process dies.
        under_way = first.submit(_decode, _joined(prompt, begun), _TOKENS)
        os.kill(process_ids[0].result(), signal.SIGKILL)
        with suppress(BrokenProcessPool):
            under_way.result()
        rest = second.submit(_decode, _joined(prompt, begun), _TOKENS - len(begun)).result()
        _compare(bench.findings, "killed and resumed by another process", whole, begun + rest)
        begun = second.submit(_decode, prompt, _KILLED_AFTER).result()
        pages = second.submit(_pages).result()
        rest = third.submit(_go_on, _joined(prompt, begun), pages, _TOKENS - len(begun)).result()
        _compare(bench.findings, "KV moved to another process", whole, begun + rest, pages=len(pages))


def _joined(prompt: Sequence[int], written: Written) -> list[int]:
    return [*prompt, *(token for token, _ in written)]


def _compare(findings: Findings, what: str, whole: Written, found: Written, **more: Any) -> None:
    findings.add(
        what,
        tokens=len(found),
        equal_tokens=sum(one[0] == other[0] for one, other in zip(whole, found, strict=True)),
        equal_logits=sum(one[1] == other[1] for one, other in zip(whole, found, strict=True)),
        **more,
    )


@contextmanager
def _target(bench: Bench) -> Iterator[ProcessPoolExecutor]:
    """One process with an engine."""
    arguments = (str(bench.device), bench.dtype, bench.shape)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_load, initargs=arguments) as target:
        yield target


# Of a process: its engine, and what was decoded last.
_engine: TargetEngine
_stream = Stream([])


def _load(device: str, dtype: torch.dtype, shape: str) -> None:
    global _engine
    bench = Bench(torch.device(device), dtype, shape, Findings(Path(os.devnull), lambda _: None))
    model = Pair(SHAPES[shape](), bench.device, dtype).target
    _engine = target_engine_of(model, bench.settings(_KV_TOKENS), lambda *_: None)


def _decode(known: Sequence[int], count: int) -> Written:
    global _stream
    _engine.pool.free(_stream.table)
    _stream = Stream(known)
    return _written(_engine, _stream, count)


def _pages() -> list[bytes]:
    return _engine.kv_store.read_pages(_stream.table.pages)


def _go_on(known: Sequence[int], pages: list[bytes], count: int) -> Written:
    table = PageTable()
    _engine.pool.append(table, len(known) - 1)
    _engine.kv_store.write_pages(table.pages, pages)
    return _written(_engine, Stream(known, table=table), count)


def _written(engine: TargetEngine, stream: Stream, count: int) -> Written:
    """The next tokens of a stream, whose KV is computed as far as it is not there yet."""
    written: Written = []
    while len(written) < count:
        missing = stream.history[stream.table.length :]
        fed = missing[: engine.description.max_num_batched_tokens]
        samples = len(fed) == len(missing)
        row = VerifyRow(stream.table, fed, (), samples, stream.history, len(stream.prompt), GREEDY, samples)
        (outcome,) = engine.step([row]).rows
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        stream.history += outcome.tokens
        written += zip(outcome.tokens, outcome.logits_digests, strict=True)
    return written
