"""A model whose KV is numbers on real pages, and what it must say, computed without any pages.

The KV of a position is a digest of the tokens up to it, taken on from the KV before; the next token depends on the KV
of every position. Layers with windows have pages of their own, of which only the last positions count. So a page that
is overwritten or freed too early, a rejected token left in place or a token fed twice changes all that follows, as it
does in a transformer. A sequence with a grammar gets the next token from those that the grammar allows, on targets and
on drafts, and drafts propose what it forces without a look at the KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from spool.engine.description import EngineDescription
from spool.engine.kv.groups import lanes_of, page_groups
from spool.engine.kv.kv_store import PageLayout
from spool.engine.kv.pages import OutOfPagesError, PagePool, PageTable
from spool.engine.sampling.grammars import GrammarError
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
from spool.scheduler.messages import TokenLogprobs
from spool.scheduler.sampling import Grammar
from tests.sim.cell.toy_grammar import AutomatonMatcher, allowed

VOCABULARY = 64

_MODULUS = (1 << 61) - 1
_STEP = 0x2545F4914F6CDD1D % _MODULUS
_CHOICE = 0x9E3779B97F4A7C15
_ALL = range(VOCABULARY)

AnyRow = VerifyRow | ProposeRow
Windows = tuple[int | None, ...]
"""Of the model's layers; None for those that see everything."""
Trouble = Callable[[Sequence[AnyRow]], dict[int, RowOutcome]]
"""Given the rows of a step, the outcomes of those that go wrong, by place; may raise."""


def _kv(before: int, token: int) -> int:
    return (before * _STEP + token + 7) % _MODULUS


def _choice(total: int) -> int:
    """Sixty-odd bits that look random, of the sum of all KV."""
    value = (total ^ (total >> 31)) * _CHOICE & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 29)


def _target_token(total: int, choices: Sequence[int] = _ALL) -> int:
    return choices[_choice(total) % len(choices)]


def _draft_tokens(total: int, acceptance: float, choices: Sequence[int] = _ALL) -> tuple[int, int]:
    """What the draft chooses, and in its place: one of both is the target's."""
    choice = _choice(total)
    right = (choice >> 32) % 1000 < acceptance * 1000
    own, other = (choices[(choice + step) % len(choices)] for step in (0, 1))
    return (own, other) if right else (other, own)


class _Whole:
    """The KV of a sequence, without any pages."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._kv: list[int] = []

    def feed(self, token: int) -> None:
        self._kv.append(_kv(self._kv[-1] if self._kv else 0, token))

    @property
    def total(self) -> int:
        return sum(sum(self._kv[-window:] if window else self._kv) for window in self._windows)


def true_output(
    prompt: Sequence[int],
    most: int,
    stop_token_ids: frozenset[int],
    grammar: Grammar | None = None,
    windows: Windows = (None,),
) -> list[int]:
    """The oracle: plain decoding, one token at a time."""
    kv = _Whole(windows)
    for token in prompt:
        kv.feed(token)
    output: list[int] = []
    while len(output) < most:
        choices = _ALL if grammar is None else allowed(grammar.definition, grammar.end_token_ids, output)
        token = _target_token(kv.total, choices)
        output.append(token)
        if token in stop_token_ids:
            break
        kv.feed(token)
    return output


def _matcher(row: AnyRow, proposed: Sequence[int] = ()) -> AutomatonMatcher | None:
    """After the row's output and what was proposed. Raises GrammarError where that does not follow the grammar."""
    grammar = row.sampling.grammar
    if grammar is None:
        return None
    fresh: Any = AutomatonMatcher
    matcher: Any = row.grammar_state.follow(grammar.definition, [*row.history[row.prompt_length :], *proposed], fresh)
    return matcher  # type: ignore[no-any-return]


def _choices(row: AnyRow, matcher: AutomatonMatcher | None) -> Sequence[int]:
    if matcher is None or row.sampling.grammar is None:
        return _ALL
    return matcher.choices(row.sampling.grammar.end_token_ids)


def _forced(row: ProposeRow) -> list[int]:
    """The tokens that must come next, as many as are wanted."""
    forced: list[int] = []
    if row.sampling.grammar is None:
        return forced
    while len(forced) < row.draft_length and not _ended(row, forced):
        choices = _choices(row, _matcher(row, forced))
        if len(choices) > 1:
            break
        forced += choices
    return forced


def _ended(row: ProposeRow, proposal: Sequence[int]) -> bool:
    grammar = row.sampling.grammar
    return grammar is not None and bool(proposal) and proposal[-1] in grammar.end_token_ids


def true_scores(prompt: Sequence[int], windows: Windows = (None,)) -> list[TokenLogprobs]:
    """What must be said of a prompt: of each token but the first, by the KV before it."""
    kv = _Whole(windows)
    scores = []
    for place, token in enumerate(prompt):
        if place:
            scores.append(_score(token, kv.total))
        kv.feed(token)
    return scores


def _score(token: int, total: int) -> TokenLogprobs:
    """A number that survives the wire's 32 bits."""
    return TokenLogprobs(token, -(_choice(total) % 4096) / 64)


class NumbersStore:
    """Pages of numbers as bytes (engine/kv/kv_store.py)."""

    def __init__(self, memory: list[int], lanes: int, page_size: int, moving: Callable[[], None]) -> None:
        """`moving` takes the time of each call."""
        self.layout = PageLayout("paged", "int64", (lanes, 1, 1, page_size, 1), 8)
        self._memory = memory
        self._moving = moving
        self._size = lanes * page_size

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        self._moving()
        return [array("q", self._memory[page * self._size : (page + 1) * self._size]).tobytes() for page in pages]

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        self._moving()
        for page, data in zip(pages, contents, strict=True):
            self._memory[page * self._size : (page + 1) * self._size] = array("q", data)


class PagedModel:
    """Engine of a target or of a draft, whose tokens are right as often as `acceptance` says. `computes` is told of the
    rows of a step, and takes its time; `moving` takes that of reading or writing pages for other workers."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        max_sequence_length: int,
        max_num_batched_tokens: int,
        acceptance: float,
        computes: Callable[[Sequence[AnyRow]], None],
        windows: Windows = (None,),
        own_draft_id: str = "",
        moving: Callable[[], None] = no_callback,
    ) -> None:
        self._groups, lanes = page_groups(windows), lanes_of(page_groups(windows), len(windows))
        self._spans = [group.slices * page_size for group in self._groups]
        self.pool = PagePool(pages, page_size, self._groups)
        self.trouble: Trouble | None = None
        self.device_lost = False
        self.description = EngineDescription(
            model_id="paged",
            tokenizer_digest=b"paged",
            vocabulary_size=VOCABULARY,
            dtype="none",
            device="none",
            page_size=page_size,
            total_pages=pages,
            max_sequence_length=max_sequence_length,
            max_num_batched_tokens=max_num_batched_tokens,
            own_draft_id=own_draft_id,
            page_spans=tuple(self._spans),
            page_windows=tuple(group.window or 0 for group in self._groups),
        )
        self._size = lanes * page_size
        self._memory = [0] * (pages * self._size)
        self.acceptance = acceptance
        self._computes = computes
        self.kv_store = NumbersStore(self._memory, lanes, page_size, moving)

    def step(
        self, rows: Sequence[AnyRow], computing: Computing = no_callback, interrupted: Interrupted | None = None
    ) -> StepOutcome:
        """A step that is `interrupted` is so after its first pass."""
        computing()
        self._computes(rows)
        if interrupted is not None and interrupted():
            for row in rows:
                if isinstance(row, ProposeRow):
                    row.draft_length = min(row.draft_length, 1)
        wrong = self.trouble(rows) if self.trouble is not None else {}
        outcomes = []
        for place, row in enumerate(rows):
            outcomes.append(wrong[place] if place in wrong else self._run(row))
        return StepOutcome(outcomes, EngineTimings())

    def _run(self, row: AnyRow) -> RowOutcome:
        table, start = row.table, row.table.length
        try:
            if isinstance(row, ProposeRow):
                return self._propose(row)
            return self._verify(row)
        except OutOfPagesError as error:
            self.pool.truncate(table, start)
            return RowOutcome([], error=str(error), out_of_pages=True)
        except GrammarError as error:
            self.pool.truncate(table, start)
            return RowOutcome([], error=f"the grammar failed: {error}")

    def _verify(self, row: VerifyRow) -> RowOutcome:
        table = row.table
        scores = []
        if row.scoring is None:
            self._feed(table, row.tokens)
        else:
            scored = dict(enumerate(row.scoring.tokens, row.scoring.first))
            for token in row.tokens:
                self._feed(table, [token])
                if table.length in scored:
                    scores.append(_score(scored[table.length], self._attend(table)))
        if not row.sample:
            return RowOutcome([], prompt_logprobs=scores)
        matcher = _matcher(row)
        base = table.length
        tokens = [_target_token(self._attend(table), _choices(row, matcher))]
        if row.draft_tokens:
            # What is drafted is no part of the sequence's state.
            matcher = matcher and matcher.copy()
            self._feed(table, row.draft_tokens)
            for length, token in enumerate(row.draft_tokens, base + 1):
                if token != tokens[-1]:
                    break
                if matcher is not None:
                    matcher.try_consume_tokens((token,))
                tokens.append(_target_token(self._attend(table, length), _choices(row, matcher)))
            self.pool.truncate(table, base + len(tokens) - 1)
        return RowOutcome(tokens, len(tokens) - 1, prompt_logprobs=scores)

    def _propose(self, row: ProposeRow) -> RowOutcome:
        table = row.table
        proposal = _forced(row)
        others = [-1] * len(proposal)
        self._feed(table, [*row.tokens, *proposal[:-1]])
        if not row.draft_length:
            return RowOutcome([])
        total = self._attend(table)
        while len(proposal) < row.draft_length and not _ended(row, proposal):
            if proposal:
                self._feed(table, proposal[-1:])
                total = self._attend(table)
            choices = _choices(row, _matcher(row, proposal))
            own, other = _draft_tokens(total, self.acceptance, choices)
            proposal.append(own)
            others.append(other if other != own else -1)
        return RowOutcome(proposal, alternatives=others)

    def _feed(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Writes the KV of the tokens to the pages."""
        first, memory = table.length, self._memory
        self.pool.append(table, len(tokens))
        written = [self._places(table, 0, first - 1, first)[0]] if first else [0]
        for token in tokens:
            written.append(_kv(written[-1], token))
        del written[0]
        for span, run in zip(self._spans, table.runs, strict=True):
            for place, kv in enumerate(written, first):
                memory[run.pages[place // span - run.freed] * self._size + place % span] = kv

    def _attend(self, table: PageTable, length: int | None = None) -> int:
        """The sum of the KV that layers see at that length: for each layer, as some have the same windows."""
        length, total = table.length if length is None else length, 0
        for place, group in enumerate(self._groups):
            first = 0 if group.window is None else max(0, length - group.window)
            total += max(1, len(group.layers)) * sum(self._places(table, place, first, length))
        return total

    def _places(self, table: PageTable, group: int, first: int, end: int) -> list[int]:
        """The KV of the positions [first, end) in a group's layers."""
        span, run, found = self._spans[group], table.runs[group], list[int]()
        while first < end:
            start = run.pages[first // span - run.freed] * self._size + first % span
            count = min(end - first, span - first % span)
            found += self._memory[start : start + count]
            first += count
        return found
