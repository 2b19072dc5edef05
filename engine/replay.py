"""Samples outputs that are known again, in passes over many of their tokens: a verification whose draft is the output.

In exact mode every token is sampled from logits of the same bits as when it was decoded (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from spool.engine.kv.pages import PageKey, PageTable
from spool.engine.kv.prefix_cache import PrefixCache
from spool.engine.sampling.grammars import GrammarState
from spool.engine.steps import RowOutcome, VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.messages import TokenLogprobs
from spool.scheduler.sampling import SamplingParameters


@dataclass(frozen=True, slots=True)
class KnownOutput:
    """`to_the_end`: followed also beyond tokens that the target would not sample."""

    prompt: Sequence[int]
    output: Sequence[int]
    sampling: SamplingParameters
    to_the_end: bool = False


@dataclass(slots=True)
class Replayed:
    """Up to the first token that differs, or of the whole output: the tokens that the target samples after those that
    are known, the digest of the logits of each, and its log probabilities, where asked for. With an `error` nothing is
    known beyond them."""

    tokens: list[int] = field(default_factory=list)
    logits_digests: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class _Run:
    known: KnownOutput
    top_logprobs: int | None
    found: Replayed = field(default_factory=Replayed)
    table: PageTable = field(default_factory=PageTable)
    page_keys: list[PageKey] = field(default_factory=lambda: [b""])
    grammar_state: GrammarState = field(default_factory=GrammarState)

    @property
    def ended(self) -> bool:
        tokens, output = self.found.tokens, self.known.output
        differs = bool(tokens) and tokens[-1] != output[len(tokens) - 1]
        parted = differs and not self.known.to_the_end
        return parted or len(tokens) == len(output) or self.found.error is not None

    def row(self, room: int) -> VerifyRow:
        """The next one, of at most `room` tokens."""
        known, done = self.known, len(self.found.tokens)
        certain = [*known.prompt, *known.output[:done]]
        tokens = certain[self.table.length :][:room]
        sample = self.table.length + len(tokens) == len(certain)
        # The last token of the output follows what is fed.
        drafts = known.output[done:-1][: room - len(tokens)] if sample else []
        return VerifyRow(
            table=self.table,
            tokens=tokens,
            draft_tokens=drafts,
            sample=sample,
            history=certain[: self.table.length + len(tokens)],
            prompt_length=len(known.prompt),
            sampling=known.sampling,
            logits_digests=True,
            top_logprobs=self.top_logprobs,
            grammar_state=self.grammar_state,
        )

    def take(self, outcome: RowOutcome) -> None:
        self.found.tokens += outcome.tokens
        self.found.logits_digests += outcome.logits_digests
        self.found.logprobs += outcome.logprobs
        self.found.error = outcome.error


def replay(
    engine: TargetEngine, outputs: Iterable[KnownOutput], top_logprobs: int | None = None
) -> Iterator[tuple[KnownOutput, Replayed]]:
    """Each output with what became of it, in the order in which they end. One without room fails with an error.

    With `top_logprobs`, log probabilities of the tokens, and of so many of the likeliest ones at each place.
    """
    waiting, running, room = iter(outputs), list[_Run](), engine.description.max_num_batched_tokens
    # Of the prompts: what outputs have in common is sampled from for each of them.
    cache = PrefixCache(engine.pool)
    while True:
        rows: list[VerifyRow] = []
        filled = 0
        for place in range(room):
            if filled == room:
                break
            if place == len(running):
                known = next(waiting, None)
                if known is None:
                    break
                run = _Run(known, top_logprobs)
                cache.share(run.table, run.page_keys, known.prompt, len(known.prompt) - 1)
                running.append(run)
            rows.append(running[place].row(room - filled))
            filled += len(rows[-1].tokens) + len(rows[-1].draft_tokens)
        if not rows:
            return
        for run, outcome in zip(running, engine.step(rows).rows, strict=False):
            run.take(outcome)
            prompt = run.known.prompt
            cache.register(run.table, run.page_keys, prompt, min(run.table.length, len(prompt)))
            if run.ended:
                engine.pool.free(run.table)
                yield run.known, run.found
        running = [run for run in running if not run.ended]
