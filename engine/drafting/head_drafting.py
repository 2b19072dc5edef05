"""Proposals of a drafting head beside a target: what follows the token that the target has just sampled.

After each pass of the target the head computes KV for what was accepted, whether or not a proposal is asked for: a part
of a layer's work. A proposal takes a pass of the head for each token, or one for all of them, and is made once the
step's reply has left; its tokens stay on the device until all of them are chosen.
Rejected tokens leave the head's KV as they leave the target's, since both are on the same pages
(engine/drafting/context.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, takewhile

import torch
from torch import Tensor

from spool.engine.attention.backends import Span
from spool.engine.drafting.context import HeadContext
from spool.engine.drafting.head import DraftingHead
from spool.engine.drafting.head_passes import HeadPasses
from spool.engine.drafting.proposer import LocalProposer
from spool.engine.drafting.speculators.blocks import Block, PlacedBlock, batch_of_blocks, features_of_blocks
from spool.engine.kv.pages import PagePool
from spool.engine.passes.device import current, on_device
from spool.engine.passes.features import Features
from spool.engine.passes.layout import TokenBatch
from spool.engine.sampling.context import SamplingContext
from spool.engine.sampling.logits_scan import LogitsScan
from spool.engine.sampling.sampler import choose_tokens
from spool.engine.steps import RowOutcome, VerifyRow


@dataclass(slots=True)
class _Asking:
    """A row that is to get a proposal, of which `chosen` tokens are on their way. The head's first pair is of
    `position`, the last one of the row's history, and of the token `sampled` after it; `context` is that of the first
    proposed token."""

    row: VerifyRow
    digest: int
    sampled: int
    position: int
    first_page: int
    context: SamplingContext
    chosen: int = 0
    proposal: list[int] = field(default_factory=list)
    """Once it is read from the device; negative where there is no token."""


class HeadDrafting(LocalProposer):
    """One head over the pages of one pool. A row with a grammar gets no proposal."""

    def __init__(
        self, head: DraftingHead, passes: HeadPasses, pool: PagePool, kept: Features, scan: LogitsScan
    ) -> None:
        """`kept`: the features of the target's latest pass. `scan`: of the head's logits."""
        self._head = head
        self._pool = pool
        self._kept = kept
        self._scan = scan
        self._device = kept.rows.device
        self._passes = passes
        self._context = HeadContext(pool.total_pages, pool.page_size)
        self._last = torch.zeros(pool.total_pages, head.hidden_size, dtype=kept.rows.dtype, device=self._device)
        """Features `[pages, hidden]` that a page keeps of its last position."""

    @torch.inference_mode()
    def after_pass(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome]) -> None:
        """After a pass of the target over `rows`, whose tables hold what was accepted."""
        with current(self._device):
            self._feed(rows, outcomes)

    @torch.inference_mode()
    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        asking: list[_Asking] = []
        for row, outcome, digest in zip(rows, outcomes, digests, strict=True):
            last, pages = row.table.length - 1, row.table.pages
            wants = row.draft_length and row.sampling.grammar is None and outcome.tokens
            if wants and self._context.is_next(pages, last):
                first_page = self._context.first_page(pages, last)
                context = SamplingContext.after(row, outcome.tokens[-1:])
                asking.append(_Asking(row, digest, outcome.tokens[-1], last, first_page, context))
        if not asking:
            return
        with current(self._device):
            proposed = self._propose_at_once(asking) if self._head.at_once else self._propose(asking)
        for one in proposed:
            length = one.row.table.length
            self._context.fill(one.row.table.pages, length - 1, length)
            one.row.drafting.keep(one.digest, [*takewhile(lambda token: token >= 0, one.proposal)])

    def _feed(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome]) -> None:
        """Computes KV of all pairs that are known, but the last ones: a proposal begins with them."""
        size, context = self._pool.page_size, self._context
        # Rows of the pass; of each pair, where its features are, its token, slot and position; and what pages keep.
        accepted, features, tokens, slots, positions = (list[int]() for _ in range(5))
        before, keeping, kept_on = (list[int]() for _ in range(3))
        spans: list[Span] = []
        sizes = [len(row.tokens) + len(row.draft_tokens) for row in rows]
        firsts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        fed = [each for each in zip(rows, outcomes, firsts, strict=True) if each[1].error is None]
        count = sum(len(row.tokens) + outcome.accepted for row, outcome, _ in fed)
        for row, outcome, first in fed:
            known, pages, end = [*row.tokens, *outcome.tokens], row.table.pages, row.table.length
            start = end - len(row.tokens) - outcome.accepted
            # Of position t, the features are at t + base.
            base = len(accepted) - start
            accepted.extend(range(first, first + end - start))
            begin = context.feed(pages, start, end)
            if begin < end - 1:
                skipped = context.first_page(pages, begin)
                owner, position = id(row.table), begin - skipped * size
                spans.append(Span(len(tokens), end - 1 - begin, position, pages[skipped:], owner=owner))
            for t in range(begin, end - 1):
                if t < start:
                    before.append(pages[t // size])
                features.append(base + t if t >= start else count + len(before) - 1)
                tokens.append(known[t + 1 - start])
                slots.append(pages[t // size] * size + t % size)
                positions.append(t)
            if begin < end:
                context.fill(pages, begin, end - 1)
            for last in {*range(start - start % size + size - 1, end, size), end - 1}:
                keeping.append(base + last)
                kept_on.append(context.keep(pages, last))
        if not accepted:
            return
        numbers = [accepted, before, tokens, features, slots, positions, keeping, kept_on]
        parts = on_device([*chain(*numbers)], self._device).split([len(part) for part in numbers])
        found = self._head.features(self._kept.rows[parts[0]])
        if tokens:
            of_pairs = torch.cat((found, self._last[parts[1]]))[parts[3]]
            plan = self._passes.backend.plan(spans, len(tokens)) if self._head.attends_to_write else None
            self._head.write(parts[2], of_pairs, parts[5], self._passes.kv, parts[4], plan)
        self._last[parts[7]] = found[parts[6]]

    def _features_of(self, asking: Sequence[_Asking]) -> Tensor:
        """Of the last positions."""
        pages = [one.row.table.pages[one.position // self._pool.page_size] for one in asking]
        return self._last[on_device(pages, self._device)]

    def _propose_at_once(self, asking: Sequence[_Asking]) -> list[_Asking]:
        """All tokens in one pass. Gives the rows that pages had room for."""
        lengths = [one.row.table.length for one in asking]
        try:
            blocks = [(one, block) for one in asking if (block := self._block(one)) is not None]
            if not blocks:
                return []
            proposed = [one for one, _ in blocks]
            features = torch.cat((self._features_of(proposed), self._head.mask_features.unsqueeze(0)))
            self._passes.begin(features[on_device(features_of_blocks([block for _, block in blocks]), self._device)])
            placed = [
                PlacedBlock(block, one.row.table.pages, one.position, one.first_page, id(one.row.table))
                for one, block in blocks
            ]
            logits = self._passes.run(batch_of_blocks(placed, self._passes.kv, self._passes.padded))
            contexts = [
                replace(one.context, position=one.context.position + number)
                for one, block in blocks
                for number in range(len(block.proposing))
            ]
            every = choose_tokens(logits, contexts, self._head.token_ids, self._scan).tolist()
        finally:
            for one, length in zip(asking, lengths, strict=True):
                self._pool.truncate(one.row.table, length)
        for one, block in blocks:
            one.proposal, every = every[: len(block.proposing)], every[len(block.proposing) :]
        return proposed

    def _block(self, one: _Asking) -> Block | None:
        """The largest one that there is room for, which is made."""
        for length in range(one.row.draft_length, 0, -1):
            block = self._head.block(one.sampled, length)
            if self._pool.can_append(one.row.table, len(block.tokens) - 1):
                self._pool.append(one.row.table, len(block.tokens) - 1)
                return block
        return None

    def _propose(self, asking: Sequence[_Asking]) -> Sequence[_Asking]:
        """Token by token, as long as rows want one and there are pages. A proposal ends before a token whose logits are
        not finite; penalties count no token of it. Gives all rows."""
        self._passes.begin(self._features_of(asking))
        lengths = [one.row.table.length for one in asking]
        growing, found, fed = list(asking), list[tuple[list[_Asking], Tensor]](), None
        try:
            while growing:
                logits = self._passes.run(self._batch(growing, fed))
                contexts = [replace(one.context, position=one.context.position + one.chosen) for one in growing]
                tokens = choose_tokens(logits, contexts, self._head.token_ids, self._scan)
                found.append((growing, tokens))
                going = [place for place, one in enumerate(growing) if self._grows(one)]
                fed = tokens.clamp(min=0)
                if len(going) < len(growing):
                    growing, fed = [growing[place] for place in going], fed[on_device(going, self._device)]
                    self._passes.go_on(going)
        finally:
            for one, length in zip(asking, lengths, strict=True):
                self._pool.truncate(one.row.table, length)
        # The host waits once.
        every = torch.cat([tokens for _, tokens in found]).tolist()
        for one, token in zip(chain(*(rows for rows, _ in found)), every, strict=True):
            one.proposal.append(token)
        return asking

    def _batch(self, growing: Sequence[_Asking], fed: Tensor | None) -> TokenBatch:
        """The next pair of each row. `fed`: the tokens of those behind the first, on the device."""
        size, spans, slots, positions = self._pool.page_size, list[Span](), list[int](), list[int]()
        for place, one in enumerate(growing):
            pages, position = one.row.table.pages, one.position + one.chosen
            skipped = one.first_page
            spans.append(Span(place, 1, position - skipped * size, pages[skipped:], owner=id(one.row.table)))
            slots.append(pages[position // size] * size + position % size)
            positions.append(position)
        rows = len(growing)
        padding = [0] * (self._passes.padded(rows) - rows)
        tokens = [*(one.sampled for one in growing), *padding]
        slots += [self._passes.kv.padding_slot] * len(padding)
        return TokenBatch(tokens, positions + padding, [slots], list(range(rows)), [spans], rows, fed)

    def _grows(self, one: _Asking) -> bool:
        """Makes room for the next pair, if the row wants another token."""
        one.chosen += 1
        if one.chosen >= one.row.draft_length or not self._pool.can_append(one.row.table, 1):
            return False
        self._pool.append(one.row.table, 1)
        return True

    def forget_page(self, page: int) -> None:
        """The target's KV on the page comes from elsewhere."""
        self._context.reset(page)
