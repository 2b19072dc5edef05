"""The target engine: feeds committed tokens, verifies draft tokens, samples the target's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate, islice
from math import isnan

import torch

from spool.engine.description import EngineDescription
from spool.engine.drafting.head_drafting import HeadDrafting
from spool.engine.kv.kv_store import KvStore
from spool.engine.kv.pages import PagePool
from spool.engine.passes.admission import make_room, rolled_back_on_error, split_by_rows
from spool.engine.passes.device import on_device
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.grammars import GrammarRow, Grammars, TokenMasks
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.logprobs import read_logprobs, token_logprobs
from spool.engine.sampling.sampler import choose_tokens, known
from spool.engine.steps import Computing, EngineTimings, RowOutcome, StepOutcome, VerifyRow, no_callback
from spool.scheduler.messages import TokenLogprobs

_NO_TOKENIZER = "the target's folder holds no tokenizer.json, which grammars need"
_NOT_A_NUMBER = "the target's logits are not finite"
_NO_TOKEN = "the grammar allows only stop tokens, which min_tokens forbids here, or the target's logits are not finite"


class TargetEngine:
    """Verifies rows batch by batch; see `VerifyRow` and `RowOutcome` for what goes in and comes out."""

    def __init__(
        self,
        description: EngineDescription,
        runner: ModelRunner,
        pool: PagePool,
        kv_store: KvStore,
        scan: LogitsScan,
        grammars: Grammars | None = None,
        head: HeadDrafting | None = None,
    ) -> None:
        """`grammars`: None where the model has no tokenizer; rows with a grammar fail then. `head`: proposes from what
        the passes compute."""
        self.description = description
        self.pool = pool
        self.kv_store = kv_store
        self._runner = runner
        self._scan = scan
        self._grammars = grammars
        self.head = head

    @property
    def device_lost(self) -> bool:
        return self._runner.device_lost

    def drafted_by(self, draft_id: str) -> None:
        """The target's worker proposes by itself from now on."""
        self.description = replace(self.description, own_draft_id=draft_id)

    def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
        """One step, in as many passes as its tokens and logits ask for; `computing` is called for each.

        A row without pages or with logits that are not finite fails alone and leaves its table as it was. Whatever the
        model raises comes through, with every table as it was.
        """
        if not self.pool.rewinds:
            # A draft that is rejected would have the pages' states computed again.
            rows = [replace(row, draft_tokens=()) if row.draft_tokens else row for row in rows]
        outcomes = [RowOutcome([]) for _ in rows]
        timings = EngineTimings()
        with rolled_back_on_error(self.pool, [row.table for row in rows]) as starts:
            needs = [(row.table, len(row.tokens) + len(row.draft_tokens)) for row in rows]
            admitted = make_room(self.pool, needs, outcomes)
            sequences = {index: _batched(rows[index]) for index in admitted}
            sizes = [len(one.tokens) for one in sequences.values()]
            wanted = [one.logits + len(one.scored) for one in sequences.values()]
            limits = self.description.max_num_batched_tokens, self._runner.max_logits
            for batch in split_by_rows(admitted, sizes, wanted, *limits):
                masking = self._begin_masks([rows[index] for index in batch])
                result = self._runner.run([sequences[index] for index in batch], computing)
                timings.add(result.timings)
                logits = result.logits[:, : self.description.vocabulary_size]
                sampled = self._sample([rows[index] for index in batch], logits, masking)
                for index, outcome in zip(batch, sampled, strict=True):
                    self._settle(rows[index], outcome, starts[index])
                    outcomes[index] = outcome
                timings.add_pass(*result.clock.seconds())
                if self.head is not None:
                    self.head.after_pass([rows[index] for index in batch], [outcomes[index] for index in batch])
        return StepOutcome(outcomes, timings)

    def _begin_masks(self, rows: Sequence[VerifyRow]) -> Future[TokenMasks] | None:
        """For the rows that sample and have a grammar, in their order; None without any."""
        asked = [
            GrammarRow(row.grammar_state, row.sampling.grammar, row.history[row.prompt_length :], row.draft_tokens)
            for row in rows
            if row.sample and row.sampling.grammar is not None
        ]
        return self._grammars.masks(asked) if asked and self._grammars is not None else None

    def _sample(
        self, rows: Sequence[VerifyRow], logits: torch.Tensor, masking: Future[TokenMasks] | None
    ) -> list[RowOutcome]:
        """`logits`: of what is sampled, and then of the prompts' tokens that are scored."""
        contexts = [
            SamplingContext.after(row, row.draft_tokens[:drafted])
            for row in rows
            if row.sample
            for drafted in range(len(row.draft_tokens) + 1)
        ]
        spans = _spans(rows)
        failed = self._constrain(rows, spans, logits, contexts, masking)
        asked = [place for row, span in zip(rows, spans, strict=True) if row.logits_digests for place in span]
        chosen = choose_tokens(logits[: len(contexts)], contexts, scan=self._scan)
        parts, places = [chosen], list[int]()
        # Of drafts that are not accepted, too: a GPU's host waits once for all.
        if asked:
            parts.append(self._scan.digests(logits, asked))
        if self._scan.beside_host:
            places = [
                place for row, span in zip(rows, spans, strict=True) if row.top_logprobs is not None for place in span
            ]
        scored = [token for row in rows if row.scoring is not None for token in row.scoring.tokens]
        if places or scored:
            own = chosen[on_device(places, logits.device)].clamp(min=0)
            tokens = torch.cat([own, on_device(scored, logits.device)])
            most = max(max(row.top_logprobs or 0, row.scoring.top if row.scoring is not None else 0) for row in rows)
            every = [*places, *range(len(contexts), len(logits))]
            parts.append(self._scan.logprobs(logits, every, tokens, most).flatten())
        numbers = (torch.cat(parts) if len(parts) > 1 else chosen).tolist()
        sampled, digests = known(numbers[: len(contexts)]), iter(numbers[len(contexts) :])
        lines = list(_lines(numbers[len(contexts) + len(asked) :], len(places) + len(scored)))
        logprobs, of_prompts = iter(lines[: len(places)]), iter(lines[len(places) :])
        outcomes = list[RowOutcome]()
        for index, (row, span) in enumerate(zip(rows, spans, strict=True)):
            if index in failed:
                outcome = RowOutcome([], error=failed[index])
            else:
                outcome = _accept(row, sampled[span.start : span.stop])
            tokens = outcome.tokens
            if row.logits_digests:
                own_digests = [digest % 2**64 or 1 for digest in islice(digests, len(span))]
                outcome.logits_digests = own_digests[: len(tokens)]
            if row.top_logprobs is not None and places:
                of_span = list(islice(logprobs, len(span)))
                outcome.logprobs = read_logprobs(tokens, of_span[: len(tokens)], row.top_logprobs)
            elif row.top_logprobs is not None:
                own_logits = logits[span.start : span.start + len(tokens)]
                outcome.logprobs = token_logprobs(own_logits, tokens, row.top_logprobs, self._scan)
            if row.scoring is not None:
                of_prompt = islice(of_prompts, len(row.scoring.tokens))
                _score(outcome, read_logprobs(row.scoring.tokens, of_prompt, row.scoring.top))
            outcomes.append(outcome)
        return outcomes

    def _constrain(
        self,
        rows: Sequence[VerifyRow],
        spans: Sequence[range],
        logits: torch.Tensor,
        contexts: Sequence[SamplingContext],
        masking: Future[TokenMasks] | None,
    ) -> dict[int, str]:
        """Leaves the rows that have a grammar the logits of the tokens that it allows. What went wrong, by row."""
        places = {
            index: span
            for index, (row, span) in enumerate(zip(rows, spans, strict=True))
            if row.sampling.grammar is not None and span
        }
        if masking is None:
            return dict.fromkeys(places, _NO_TOKENIZER)
        masks = masking.result()
        failed = {index: error for index, error in zip(places, masks.errors, strict=True) if error is not None}
        if len(failed) < len(places):
            constrained = [place for span in places.values() for place in span]
            self._scan.forbid(logits, constrained, masks.allowed)
            for place in masks.complete:
                contexts[constrained[place]].must_end = True
        return {index: f"the grammar failed: {error}" for index, error in failed.items()}

    def _settle(self, row: VerifyRow, outcome: RowOutcome, start: int) -> None:
        if outcome.error is not None:
            self._runner.discard(self.pool, row.table, start)
        else:
            self.pool.truncate(row.table, start + len(row.tokens) + outcome.accepted)


def _batched(row: VerifyRow) -> BatchedSequence:
    tokens = [*row.tokens, *row.draft_tokens]
    batched = BatchedSequence(row.table, tokens, _logits(row))
    if row.scoring is not None:
        first = row.scoring.first - 1 - (row.table.length - len(tokens))
        batched.scored = range(first, first + len(row.scoring.tokens))
    return batched


def _lines(numbers: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """So many lines of equal length."""
    return (numbers[line * len(numbers) // count : (line + 1) * len(numbers) // count] for line in range(count))


def _score(outcome: RowOutcome, found: list[TokenLogprobs]) -> None:
    """Adds the prompt's log probabilities to the row's outcome."""
    if outcome.error is None and any(isnan(entry.logprob) for entry in found):
        outcome.tokens, outcome.accepted, outcome.error = [], 0, _NOT_A_NUMBER
    if outcome.error is None:
        outcome.prompt_logprobs = found


def _spans(rows: Sequence[VerifyRow]) -> list[range]:
    """Where each row's logits are among those of all."""
    ends = list(accumulate(map(_logits, rows), initial=0))
    return list(map(range, ends, ends[1:]))


def _logits(row: VerifyRow) -> int:
    return len(row.draft_tokens) + 1 if row.sample else 0


def _accept(row: VerifyRow, own_tokens: Sequence[int | None]) -> RowOutcome:
    """The longest prefix of the draft that the target would have sampled, and the target's own token after it. Nothing
    for a row that does not sample."""
    draft_tokens, tokens = row.draft_tokens, list[int]()
    for position, own_token in enumerate(own_tokens):
        if own_token is None:
            return RowOutcome([], error=_NOT_A_NUMBER if row.sampling.grammar is None else _NO_TOKEN)
        tokens.append(own_token)
        if position == len(draft_tokens) or own_token != draft_tokens[position]:
            break
    return RowOutcome(tokens, accepted=max(0, len(tokens) - 1))
