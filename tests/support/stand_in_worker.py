"""A worker whose engine is arithmetic: `python -m tests.support.stand_in_worker --role target --settings '{...}'`.

The next token is a hash of all tokens before it, read back from where the engine wrote them, page by page: a wrong page
table, a missing truncation or a token fed at the wrong place changes everything after it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from spool.engine.description import EngineDescription
from spool.engine.drafting.proposer import LocalProposer, Proposers
from spool.engine.kv.kv_store import PageLayout
from spool.engine.kv.pages import OutOfPagesError, PagePool, PageTable
from spool.engine.steps import (
    Computing,
    EngineTimings,
    Interrupted,
    ProposeRow,
    RowOutcome,
    StepOutcome,
    VerifyRow,
    no_callback,
)
from spool.scheduler.messages import Role, TokenLogprobs
from spool.scheduler.state.digests import DigestedTokens
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.server import DraftServer
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import Progress, Serve, WorkerArguments, parse_arguments, run_worker, serving

MODEL = "stand-in"
VOCABULARY = 1000
MAX_LENGTH = 2000

# Tokens that make the engine misbehave when they are fed, unless told not to.
ROW_FAILS = 13
STEP_FAILS = 14
DEVICE_FAILS = 99  # in no ASCII text


def next_token(tokens: Sequence[int]) -> int:
    """The model: what follows these tokens."""
    return 100 + DigestedTokens(tokens).digest(len(tokens)) % (VOCABULARY - 100)


def guess(tokens: Sequence[int]) -> int:
    """The draft model: right in about seven of ten cases."""
    right = next_token(tokens)
    return right if right % 10 < 7 else (right + 1) % VOCABULARY


def logprobs(token: int, count: int) -> TokenLogprobs:
    """The chosen token is the likeliest, the ones after it follow."""
    top = tuple(((token + place) % VOCABULARY, -0.25 - place) for place in range(count))
    return TokenLogprobs(token, -0.25, top)


def prompt_logprobs(prompt: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of every token of a prompt but the first: it depends on all tokens before it."""
    tokens = DigestedTokens(prompt)
    return [
        TokenLogprobs(token, -(tokens.digest(place) % 64) / 8, logprobs(token, count).top)
        for place, token in enumerate(prompt)
        if place
    ]


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What must come out, one token at a time."""
    tokens = DigestedTokens(prompt)
    output = []
    for _ in range(count):
        output.append(100 + tokens.digest(len(tokens)) % (VOCABULARY - 100))
        tokens.extend(output[-1:])
    return output


class TokenStore:
    """Pages of tokens as bytes (engine/kv/kv_store.py)."""

    def __init__(self, pages: list[list[int]], page_size: int, model_id: str) -> None:
        self.layout = PageLayout(model_id, "int64", (1, 1, 1, page_size, 1), 8)
        self._stored = pages

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        return [array("q", self._stored[page]).tobytes() for page in pages]

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        self.layout.check(contents)
        for page, data in zip(pages, contents, strict=True):
            self._stored[page] = list(array("q", data))


class StandInEngine:
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
        """`guesses`: the target proposes itself."""
        self.pool = PagePool(pages, page_size)
        self.device_lost = False
        self.steps = 0
        self.step_seconds = step_seconds
        self.unlucky = unlucky
        self.description = EngineDescription(
            model_id=model_id,
            tokenizer_digest=bytes.fromhex(tokenizer_digest),
            vocabulary_size=vocabulary_size,
            dtype="none",
            quantization="int8",
            fingerprint={"weights": model_id, "exact": "on" if exact else "off", "processor": processor},
            device="cpu",
            page_size=page_size,
            total_pages=pages,
            max_sequence_length=MAX_LENGTH,
            max_num_batched_tokens=256,
            threads=threads,
            own_draft_id="guesses" if guesses else "",
        )
        self._stored = [[0] * page_size for _ in range(pages)]
        self.kv_store = TokenStore(self._stored, page_size, model_id)

    def step(
        self, rows: Sequence[Any], computing: Computing = no_callback, interrupted: Interrupted | None = None
    ) -> StepOutcome:
        computing()
        self.steps += 1
        started = time.perf_counter()
        time.sleep(self.step_seconds)
        if self.unlucky and any(STEP_FAILS in row.tokens for row in rows):
            raise RuntimeError("the step\nexploded")
        if any(DEVICE_FAILS in row.tokens for row in rows):
            self.device_lost = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        outcomes = [self._row(row) for row in rows]
        seconds = time.perf_counter() - started
        fed = sum(len(row.tokens) for row in rows)
        return StepOutcome(outcomes, EngineTimings(forward=seconds, batched_tokens=fed))

    def _row(self, row: Any) -> RowOutcome:
        if self.unlucky and ROW_FAILS in row.tokens:
            return RowOutcome([], error="unlucky token")
        start = row.table.length
        try:
            outcome = self._run(row)
        except OutOfPagesError as error:
            self.pool.truncate(row.table, start)
            return RowOutcome([], error=str(error), out_of_pages=True)
        assert self.read(row.table) == [*row.history, *outcome.tokens][: row.table.length]
        return outcome

    def _run(self, row: VerifyRow | ProposeRow) -> RowOutcome:
        self.feed(row.table, row.tokens)
        if isinstance(row, ProposeRow):
            proposal: list[int] = []
            for _ in range(row.draft_length):
                self.feed(row.table, proposal[-1:])
                proposal.append(guess(self.read(row.table)))
            return RowOutcome(proposal)
        scores: list[TokenLogprobs] = []
        if row.scoring is not None:
            last = row.scoring.first + len(row.scoring.tokens) - 1
            known = [*self.read(row.table)[: row.scoring.first], *row.scoring.tokens]
            assert row.table.length - len(row.tokens) < row.scoring.first <= last <= row.table.length
            scores = prompt_logprobs(known, row.scoring.top)[row.scoring.first - 1 :]
        if not row.sample:
            return RowOutcome([], prompt_logprobs=scores)
        base = row.table.length
        self.feed(row.table, row.draft_tokens)
        known = self.read(row.table)
        accepted = 0
        while accepted < len(row.draft_tokens) and row.draft_tokens[accepted] == next_token(known[: base + accepted]):
            accepted += 1
        self.pool.truncate(row.table, base + accepted)
        tokens = [*row.draft_tokens[:accepted], next_token(known[: base + accepted])]
        digests = [token + 5 for token in tokens] if row.logits_digests else []
        count = row.top_logprobs
        found = [] if count is None else [logprobs(token, count) for token in tokens]
        return RowOutcome(tokens, accepted, digests, found, scores)

    def feed(self, table: PageTable, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.pool.append(table, 1)
            page, place = divmod(table.length - 1, self.pool.page_size)
            self._stored[table.pages[page]][place] = token

    def read(self, table: PageTable) -> list[int]:
        return [token for page in table.pages for token in self._stored[page]][: table.length]


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
