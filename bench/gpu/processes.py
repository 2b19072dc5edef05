"""Two target processes on one device: one is killed amid decoding and the other goes on; KV moves between them.

Engines alone, without the scheduler and the wire, which tests/chaos has on CPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.gpu.decoding import GREEDY, Stream, prompts
from bench.gpu.engines import MAX_TOKENS, Bench
from bench.gpu.findings import Findings
from bench.gpu.pair import SHAPES, Pair
from engine.kv.pages import PageTable
from engine.models.loading import target_engine_of
from engine.steps import VerifyRow
from engine.target import TargetEngine

_PROMPT_TOKENS = 100
_TOKENS = 64
_KILLED_AFTER = 20
_START_SECONDS = 150.0
_KV_TOKENS = 8192

Written = list[tuple[int, int]]
"""Tokens and digests of their logits."""


def killed_and_moved(bench: Bench) -> None:
    """What two processes write must be what one writes by itself, with the same bits of logits."""
    with _targets(bench, 3) as (first, second, third):
        (prompt,) = prompts(1, _PROMPT_TOKENS, SHAPES[bench.shape]().target.vocab_size, seed=2)
        whole = second.ask("decode", prompt, _TOKENS)

        begun: Written = []
        while len(begun) < _KILLED_AFTER:
            begun += first.ask("decode", [*prompt, *(token for token, _ in begun)], 1)
        # The next step is under way when the process dies.
        first.begin("decode", [*prompt, *(token for token, _ in begun)], _TOKENS)
        first.kill()
        rest = second.ask("decode", [*prompt, *(token for token, _ in begun)], _TOKENS - len(begun))
        _compare(bench.findings, "killed and resumed by another process", whole, begun + rest)
        begun = second.ask("decode", prompt, _KILLED_AFTER)
        pages = second.ask("pages")
        rest = third.ask("go on", [*prompt, *(token for token, _ in begun)], pages, _TOKENS - len(begun))
        _compare(bench.findings, "KV moved to another process", whole, begun + rest, pages=len(pages))


def _compare(findings: Findings, what: str, whole: Written, found: Written, **more: Any) -> None:
    findings.add(
        what,
        tokens=len(found),
        equal_tokens=sum(one[0] == other[0] for one, other in zip(whole, found, strict=True)),
        equal_logits=sum(one[1] == other[1] for one, other in zip(whole, found, strict=True)),
        **more,
    )


class _TargetProcess:
    def __init__(self, process: Any, connection: Connection) -> None:
        self._process = process
        self._connection = connection

    def begin(self, *order: Any) -> None:
        self._connection.send(order)

    def ask(self, *order: Any) -> Any:
        """Raises RuntimeError with the process's own words where it fails, TimeoutError where it does not answer."""
        self.begin(*order)
        return self.answer(_START_SECONDS)

    def answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"a target process did not answer within {seconds:.0f} s")
        succeeded, answer = self._connection.recv()
        if not succeeded:
            raise RuntimeError(f"a target process failed: {answer}")
        return answer

    def kill(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()


@contextmanager
def _targets(bench: Bench, count: int) -> Iterator[list[_TargetProcess]]:
    """All of them are ready."""
    context = get_context("spawn")
    targets = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            arguments = (theirs, str(bench.device), bench.dtype, bench.shape)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            targets.append(_TargetProcess(process, ours))
        for target in targets:
            target.answer(_START_SECONDS)
        yield targets
    finally:
        for target in targets:
            target.kill()


def _serve(connection: Connection, device: str, dtype: torch.dtype, shape: str) -> None:
    """Answers orders until it is killed."""
    try:
        quiet = Findings(Path(os.devnull), lambda _: None)
        bench = Bench(torch.device(device), dtype, shape, quiet)
        model = Pair(SHAPES[shape](), bench.device, dtype).target
        engine = target_engine_of(model, bench.settings(_KV_TOKENS), lambda *_: None)
        stream = Stream([])
        connection.send((True, None))
        while True:
            order, *arguments = connection.recv()
            match order:
                case "decode":
                    engine.pool.free(stream.table)
                    stream = Stream(arguments[0])
                    connection.send((True, _written(engine, stream, arguments[1])))
                case "pages":
                    pages = [engine.kv_store.read_page(page) for page in stream.table.pages]
                    connection.send((True, pages))
                case "go on":
                    engine.pool.free(stream.table)
                    known, pages, count = arguments
                    stream = Stream(known, table=_written_pages(engine, pages, len(known) - 1))
                    connection.send((True, _written(engine, stream, count)))
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"))


def _written_pages(engine: TargetEngine, pages: list[bytes], length: int) -> PageTable:
    table = PageTable()
    engine.pool.append(table, length)
    for page, content in zip(table.pages, pages, strict=True):
        engine.kv_store.write_page(page, content)
    return table


def _written(engine: TargetEngine, stream: Stream, count: int) -> Written:
    """The next tokens of a stream, whose KV is computed as far as it is not there yet."""
    written: Written = []
    while len(written) < count:
        missing = stream.history[stream.table.length :]
        fed = missing[:MAX_TOKENS]
        samples = len(fed) == len(missing)
        row = VerifyRow(stream.table, fed, (), samples, stream.history, len(stream.prompt), GREEDY, samples)
        (outcome,) = engine.step([row]).rows
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        stream.history += outcome.tokens
        written += zip(outcome.tokens, outcome.logits_digests, strict=True)
    return written
