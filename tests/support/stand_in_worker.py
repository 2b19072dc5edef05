"""A worker whose engine is arithmetic: `python -m tests.support.stand_in_worker --role target --settings '{...}'`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spool.engine.drafting.proposer import LocalProposer, Proposers
from spool.engine.steps import Computing, EngineTimings, Interrupted, RowOutcome, StepOutcome, VerifyRow, no_callback
from spool.scheduler.messages import Role, TokenLogprobs
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.server import DraftServer
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import Progress, Serve, WorkerArguments, parse_arguments, run_worker, serving
from tests.support.paged_model import AnyRow, PagedModel, Whole, true_guess, true_output, true_scores, with_top

MODEL = "stand-in"
VOCABULARY = 1000
TOKENS = range(101, VOCABULARY)
"""What comes out: none of those below."""
MAX_LENGTH = 2000
AGREEMENT = 0.7

# Tokens that make the engine misbehave when they are fed, unless told not to.
ROW_FAILS = 13
STEP_FAILS = 14
DEVICE_FAILS = 99  # in no ASCII text


def guess(tokens: Sequence[int]) -> int:
    """The draft model: right in about seven of ten cases."""
    return true_guess(tokens, AGREEMENT, TOKENS)


def prompt_logprobs(prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of every token of a prompt but the first."""
    return [with_top(score, count) for score in true_scores(prompt)]


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What must come out, one token at a time."""
    return true_output(prompt, count, frozenset(), tokens=TOKENS)


class StandInEngine(PagedModel):
    def __init__(
        self,
        pages: int = 1000,
        page_size: int = 4,
        step_seconds: float = 0.0,
        tokenizer_digest: str = "aa",
        vocabulary_size: int = VOCABULARY,
        model_id: str = MODEL,
        threads: int = 1,
        unlucky: bool = True,
        exact: bool = True,
        processor: str = "any",
        guesses: bool = False,
    ) -> None:
        """`guesses`: the target proposes itself. Grammars are taken and ignored."""
        super().__init__(
            pages,
            page_size,
            MAX_LENGTH,
            256,
            AGREEMENT,
            self._compute,
            tokens=TOKENS,
            grammars=False,
            own_draft_id="guesses" if guesses else "",
        )
        self.steps = 0
        self.step_seconds = step_seconds
        self.unlucky = unlucky
        self.trouble = self._unlucky_rows
        self.description = replace(
            self.description,
            model_id=model_id,
            tokenizer_digest=bytes.fromhex(tokenizer_digest),
            vocabulary_size=vocabulary_size,
            quantization="int8",
            fingerprint={"weights": model_id, "exact": "on" if exact else "off", "processor": processor},
            device="cpu",
            threads=threads,
        )
        self.kv_store.layout = replace(self.kv_store.layout, model_id=model_id)

    def step(
        self, rows: Sequence[Any], computing: Computing = no_callback, interrupted: Interrupted | None = None
    ) -> StepOutcome:
        started = time.perf_counter()
        outcome = super().step(rows, computing, interrupted)
        for row, result in zip(rows, outcome.rows, strict=True):
            known = [*row.history, *result.tokens][: row.table.length]
            assert result.error or not known or self.kv_at(row.table, len(known) - 1) == Whole((None,), known).last
        fed = sum(len(row.tokens) for row in rows)
        return StepOutcome(outcome.rows, EngineTimings(forward=time.perf_counter() - started, batched_tokens=fed))

    def _compute(self, rows: Sequence[AnyRow]) -> None:
        self.steps += 1
        time.sleep(self.step_seconds)
        if self.unlucky and any(STEP_FAILS in row.tokens for row in rows):
            raise RuntimeError("the step\nexploded")
        if any(DEVICE_FAILS in row.tokens for row in rows):
            self.device_lost = True
            raise RuntimeError("CUDA error: device-side assert triggered")

    def _unlucky_rows(self, rows: Sequence[AnyRow]) -> dict[int, RowOutcome]:
        unlucky = [place for place, row in enumerate(rows) if self.unlucky and ROW_FAILS in row.tokens]
        return {place: RowOutcome([], error="unlucky token") for place in unlucky}


class Guesses(LocalProposer):
    """What the draft model proposes, inside the target: always in time."""

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        for row, outcome, digest in zip(rows, outcomes, digests, strict=True):
            known = [*row.history, *outcome.tokens[-1:]]
            length = len(known)
            for _ in range(row.draft_length if outcome.tokens else 0):
                known.append(guess(known))
            row.drafting.keep(digest, known[length:])


def target_executor(engine: Any, remote: RemoteProposer | None = None) -> StepExecutor:
    """Of a target with this engine, which asks the draft workers that it is granted, or nobody."""
    store = getattr(engine, "kv_store", None)
    draft = Guesses() if engine.description.own_draft_id else remote
    return StepExecutor(engine, kv_store=store, proposer=Proposers(draft=draft), remote=remote)


def load(arguments: WorkerArguments, progress: Progress) -> Serve:
    settings = dict(arguments.settings)
    progress("thinking", None)
    if "fail" in settings:
        raise RuntimeError(settings["fail"])
    if settings.get("die") == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if "die" in settings:
        sys.exit(settings["die"])
    if "hang" in settings:
        time.sleep(settings["hang"])
    progress("thinking", 1.0)
    print("what libraries print does not disturb the launcher")
    engine = StandInEngine(**settings)
    if arguments.role is Role.TARGET:
        return serving(target_executor(engine, RemoteProposer(VOCABULARY, arguments.security)))
    return lambda given, thread: DraftServer(
        engine, host=given.host, port=given.port, thread=thread, security=given.security
    )


if __name__ == "__main__":
    sys.exit(run_worker(parse_arguments(), load))
