"""The target engine: feeds committed tokens, verifies draft tokens, chooses the target's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from engine.description import EngineDescription
from engine.kv_store import KvStore
from engine.logits_scan import LogitsScan
from engine.packed_pass import PackedSequence
from engine.packing import make_room, rolled_back_on_error, split_by_rows
from engine.pages import PagePool
from engine.runner import ModelRunner, PassResult
from engine.sampling import ChoiceContext, choose_tokens
from engine.steps import Computing, EngineTimings, RowOutcome, StepOutcome, VerifyRow, nothing
from scheduler.messages import TokenLogprobs

_NOT_A_NUMBER = "the target's logits are not finite"


class TargetEngine:
    """Verifies rows in packed passes; see `VerifyRow` and `RowOutcome` for what goes in and comes out."""

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

    def step(self, rows: Sequence[VerifyRow], computing: Computing = nothing) -> StepOutcome:
        """One step, in as many passes as `max_packed_rows` asks for; `computing` is called for each.

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
            for batch in split_by_rows(admitted, sizes, self.description.max_packed_rows):
                result = self._runner.run([_packed(rows[index]) for index in batch], computing)
                timings.add(result.timings)
                for index, outcome in zip(batch, self._choose([rows[i] for i in batch], result), strict=True):
                    self._settle(rows[index], outcome, starts[index])
                    outcomes[index] = outcome
                timings.add_pass(*result.clock.seconds())
        return StepOutcome(outcomes, timings)

    def _choose(self, rows: Sequence[VerifyRow], result: PassResult) -> Iterator[RowOutcome]:
        logits = result.logits[:, : self.description.vocabulary_size]
        contexts = [context for row in rows if row.choose for context in _contexts(row)]
        chosen = choose_tokens(logits, contexts, scan=self._scan) if contexts else []
        first = 0
        for row in rows:
            if not row.choose:
                yield RowOutcome([])
                continue
            choices = chosen[first : first + len(row.draft_tokens) + 1]
            outcome = _accept(row.draft_tokens, choices)
            if row.logits_digests and outcome.error is None:
                outcome.logits_digests = [_digest(line) for line in logits[first : first + len(outcome.tokens)]]
            if row.top_logprobs is not None and outcome.error is None:
                outcome.logprobs = [
                    _logprobs(line, token, row.top_logprobs)
                    for line, token in zip(logits[first:], outcome.tokens, strict=False)
                ]
            yield outcome
            first += len(choices)

    def _settle(self, row: VerifyRow, outcome: RowOutcome, start: int) -> None:
        if outcome.error is not None:
            self._runner.discard(self.pool, row.table, start)
        else:
            self.pool.truncate(row.table, start + len(row.tokens) + outcome.accepted)


def _packed(row: VerifyRow) -> PackedSequence:
    return PackedSequence(row.table, [*row.tokens, *row.draft_tokens], len(row.draft_tokens) + 1 if row.choose else 0)


def _contexts(row: VerifyRow) -> Iterator[ChoiceContext]:
    for drafted in range(len(row.draft_tokens) + 1):
        history = [*row.history, *row.draft_tokens[:drafted]] if row.sampling.uses_history else row.history
        yield ChoiceContext(row.sampling, len(row.history) + drafted, history, row.prompt_length)


def _accept(draft_tokens: Sequence[int], choices: Sequence[int | None]) -> RowOutcome:
    """The longest prefix of the draft that the target would have chosen, and the target's own token after it."""
    tokens: list[int] = []
    for position, choice in enumerate(choices):
        if choice is None:
            return RowOutcome([], error=_NOT_A_NUMBER)
        tokens.append(choice)
        if position == len(draft_tokens) or choice != draft_tokens[position]:
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
