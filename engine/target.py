"""The target engine: feeds committed tokens, verifies draft tokens, samples the target's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from engine.cpu.logits_scan import LogitsScan
from engine.description import EngineDescription
from engine.kv.kv_store import KvStore
from engine.kv.pages import PagePool
from engine.passes.admission import make_room, rolled_back_on_error, split_by_rows
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner, PassResult
from engine.sampling.sampler import SamplingContext, sample_tokens
from engine.steps import Computing, EngineTimings, RowOutcome, StepOutcome, VerifyRow, no_callback
from scheduler.messages import TokenLogprobs

_NOT_A_NUMBER = "the target's logits are not finite"


class TargetEngine:
    """Verifies rows batch by batch; see `VerifyRow` and `RowOutcome` for what goes in and comes out."""

    def __init__(
        self,
        description: EngineDescription,
        runner: ModelRunner,
        pool: PagePool,
        kv_store: KvStore,
        scan: LogitsScan,
    ) -> None:
        self.description = description
        self.pool = pool
        self.kv_store = kv_store
        self._runner = runner
        self._scan = scan

    def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
        """One step, in as many passes as `max_num_batched_tokens` asks for; `computing` is called for each.

        A row without pages or with logits that are not finite fails alone and leaves its table as it was. Whatever the
        model raises comes through, with every table as it was.
        """
        outcomes = [RowOutcome([]) for _ in rows]
        timings = EngineTimings()
        with rolled_back_on_error(self.pool, [row.table for row in rows]) as starts:
            admitted = make_room(
                self.pool, [(row.table, len(row.tokens) + len(row.draft_tokens)) for row in rows], outcomes
            )
            sizes = [len(rows[index].tokens) + len(rows[index].draft_tokens) for index in admitted]
            for batch in split_by_rows(admitted, sizes, self.description.max_num_batched_tokens):
                result = self._runner.run([_batched(rows[index]) for index in batch], computing)
                timings.add(result.timings)
                for index, outcome in zip(batch, self._sample([rows[i] for i in batch], result), strict=True):
                    self._settle(rows[index], outcome, starts[index])
                    outcomes[index] = outcome
                timings.add_pass(*result.clock.seconds())
        return StepOutcome(outcomes, timings)

    def _sample(self, rows: Sequence[VerifyRow], result: PassResult) -> Iterator[RowOutcome]:
        logits = result.logits[:, : self.description.vocabulary_size]
        contexts = [context for row in rows if row.sample for context in _contexts(row)]
        sampled = sample_tokens(logits, contexts, scan=self._scan) if contexts else []
        first = 0
        for row in rows:
            if not row.sample:
                yield RowOutcome([])
                continue
            own_tokens = sampled[first : first + len(row.draft_tokens) + 1]
            outcome = _accept(row.draft_tokens, own_tokens)
            if row.logits_digests and outcome.error is None:
                outcome.logits_digests = [_digest(line) for line in logits[first : first + len(outcome.tokens)]]
            if row.top_logprobs is not None and outcome.error is None:
                outcome.logprobs = [
                    _logprobs(line, token, row.top_logprobs)
                    for line, token in zip(logits[first:], outcome.tokens, strict=False)
                ]
            yield outcome
            first += len(own_tokens)

    def _settle(self, row: VerifyRow, outcome: RowOutcome, start: int) -> None:
        if outcome.error is not None:
            self._runner.discard(self.pool, row.table, start)
        else:
            self.pool.truncate(row.table, start + len(row.tokens) + outcome.accepted)


def _batched(row: VerifyRow) -> BatchedSequence:
    return BatchedSequence(row.table, [*row.tokens, *row.draft_tokens], len(row.draft_tokens) + 1 if row.sample else 0)


def _contexts(row: VerifyRow) -> Iterator[SamplingContext]:
    for drafted in range(len(row.draft_tokens) + 1):
        history = [*row.history, *row.draft_tokens[:drafted]] if row.sampling.uses_history else row.history
        yield SamplingContext(row.sampling, len(row.history) + drafted, history, row.prompt_length)


def _accept(draft_tokens: Sequence[int], own_tokens: Sequence[int | None]) -> RowOutcome:
    """The longest prefix of the draft that the target would have sampled, and the target's own token after it."""
    tokens: list[int] = []
    for position, own_token in enumerate(own_tokens):
        if own_token is None:
            return RowOutcome([], error=_NOT_A_NUMBER)
        tokens.append(own_token)
        if position == len(draft_tokens) or own_token != draft_tokens[position]:
            break
    return RowOutcome(tokens, accepted=len(tokens) - 1)


def _logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of one row of logits `[vocabulary]`; computed row by row, so that it does not depend on the batch either."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, ids = torch.topk(logprobs, min(count, logprobs.numel()))
    return TokenLogprobs(token, logprobs[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _digest(logits: torch.Tensor) -> int:
    """64 bits of BLAKE2b over the raw bits of one row of logits."""
    raw = logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")
