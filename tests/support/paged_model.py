"""A model whose KV is numbers on real pages, and what it must say, computed without any pages.

The KV of a position is a digest of the tokens up to it, taken on from the KV before; the next token depends on the KV
of every position. Layers with windows have pages of their own, of which only the last positions count. So a page that
is overwritten or freed too early, a rejected token left in place or a token fed twice changes all that follows, as it
does in a transformer. A sequence with a grammar gets the next token from those that the grammar allows, on targets and
on drafts, and drafts propose what it forces without a look at the KV.

The simulation runs it in virtual time, stand_in_worker.py in threads and processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from tests.support.toy_grammar import AutomatonMatcher, allowed

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


def _target_token(total: int, choices: Sequence[int]) -> int:
    return choices[_choice(total) % len(choices)]


def _draft_tokens(total: int, acceptance: float, choices: Sequence[int]) -> tuple[int, int]:
    """What the draft chooses, and in its place: one of both is the target's."""
    choice = _choice(total)
    right = (choice >> 32) % 1000 < acceptance * 1000
    own, other = (choices[(choice + step) % len(choices)] for step in (0, 1))
    return (own, other) if right else (other, own)


class Whole:
    """The KV of a sequence, without any pages."""

    def __init__(self, windows: Windows, tokens: Sequence[int] = ()) -> None:
        self._windows = windows
        self._kv: list[int] = []
        for token in tokens:
            self.feed(token)

    def feed(self, token: int) -> None:
        self._kv.append(_kv(self.last, token))

    @property
    def last(self) -> int:
        return self._kv[-1] if self._kv else 0

    @property
    def total(self) -> int:
        return sum(sum(self._kv[-window:] if window else self._kv) for window in self._windows)


def true_output(
    prompt: Sequence[int],
    most: int,
    stop_token_ids: frozenset[int],
    grammar: Grammar | None = None,
    windows: Windows = (None,),
    tokens: Sequence[int] = _ALL,
) -> list[int]:
    """The oracle: plain decoding, one token at a time. `tokens` are those that the model chooses among."""
    kv = Whole(windows, prompt)
    output: list[int] = []
    while len(output) < most:
        choices = tokens if grammar is None else allowed(grammar.definition, grammar.end_token_ids, output)
        token = _target_token(kv.total, choices)
        output.append(token)
        if token in stop_token_ids:
            break
        kv.feed(token)
    return output


def true_guess(known: Sequence[int], acceptance: float, tokens: Sequence[int] = _ALL) -> int:
    """What a draft proposes next."""
    return _draft_tokens(Whole((None,), known).total, acceptance, tokens)[0]


def true_scores(prompt: Sequence[int], windows: Windows = (None,)) -> list[TokenLogprobs]:
    """What must be said of a prompt: of each token but the first, by the KV before it."""
    kv = Whole(windows)
    scores = []
    for place, token in enumerate(prompt):
        if place:
            scores.append(_score(token, kv.total))
        kv.feed(token)
    return scores


def _score(token: int, total: int) -> TokenLogprobs:
    """A number that survives the wire's 32 bits."""
    return TokenLogprobs(token, -(_choice(total) % 4096) / 64)


def with_top(scored: TokenLogprobs, count: int) -> TokenLogprobs:
    """The token is always the likeliest, and the ones after it follow."""
    top = tuple(((scored.token_id + place) % 1000, -0.25 - place) for place in range(count))
    return replace(scored, top=top)


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
        self.layout.check(contents)
        self._moving()
        for page, data in zip(pages, contents, strict=True):
            self._memory[page * self._size : (page + 1) * self._size] = array("q", data)


class PagedModel:
    """Engine of a target or of a draft, whose tokens are right as often as `acceptance` says. `computes` is told of the
    rows of a step, and takes its time; `moving` takes that of reading or writing pages for other workers. `tokens` are
    those that it chooses among; with `grammars`, those that a sequence's grammar allows."""

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
        tokens: Sequence[int] = _ALL,
        grammars: bool = True,
    ) -> None:
        self._tokens, self._grammars = tokens, grammars
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
                    score = _score(scored[table.length], self._attend(table))
                    scores.append(with_top(score, row.scoring.top))
            assert len(scores) == len(scored), "scores what is not fed"
        if not row.sample:
            return RowOutcome([], prompt_logprobs=scores)
        matcher = self._matcher(row)
        base = table.length
        tokens = [_target_token(self._attend(table), self._choices(row, matcher))]
        if row.draft_tokens:
            # What is drafted is no part of the sequence's state.
            matcher = matcher and matcher.copy()
            self._feed(table, row.draft_tokens)
            for length, token in enumerate(row.draft_tokens, base + 1):
                if token != tokens[-1]:
                    break
                if matcher is not None:
                    matcher.try_consume_tokens((token,))
                tokens.append(_target_token(self._attend(table, length), self._choices(row, matcher)))
            self.pool.truncate(table, base + len(tokens) - 1)
        digests = [token + 5 for token in tokens] if row.logits_digests else []
        top = row.top_logprobs
        chosen = [] if top is None else [with_top(TokenLogprobs(token, -0.25), top) for token in tokens]
        return RowOutcome(tokens, len(tokens) - 1, digests, chosen, scores)

    def _propose(self, row: ProposeRow) -> RowOutcome:
        table = row.table
        proposal = self._forced(row)
        others = [-1] * len(proposal)
        self._feed(table, [*row.tokens, *proposal[:-1]])
        if not row.draft_length:
            return RowOutcome([])
        total = self._attend(table)
        while len(proposal) < row.draft_length and not self._ended(row, proposal):
            if proposal:
                self._feed(table, proposal[-1:])
                total = self._attend(table)
            choices = self._choices(row, self._matcher(row, proposal))
            own, other = _draft_tokens(total, self.acceptance, choices)
            proposal.append(own)
            others.append(other if other != own else -1)
        return RowOutcome(proposal, alternatives=others)

    def _grammar(self, row: AnyRow) -> Grammar | None:
        return row.sampling.grammar if self._grammars else None

    def _matcher(self, row: AnyRow, proposed: Sequence[int] = ()) -> AutomatonMatcher | None:
        """After the row's output and what was proposed. Raises GrammarError where that does not follow the grammar."""
        grammar = self._grammar(row)
        if grammar is None:
            return None
        fresh: Any = AutomatonMatcher
        output = [*row.history[row.prompt_length :], *proposed]
        matcher: Any = row.grammar_state.follow(grammar.definition, output, fresh)
        return matcher  # type: ignore[no-any-return]

    def _choices(self, row: AnyRow, matcher: AutomatonMatcher | None) -> Sequence[int]:
        grammar = self._grammar(row)
        return self._tokens if matcher is None or grammar is None else matcher.choices(grammar.end_token_ids)

    def _forced(self, row: ProposeRow) -> list[int]:
        """The tokens that must come next, as many as are wanted."""
        forced: list[int] = []
        if self._grammar(row) is None:
            return forced
        while len(forced) < row.draft_length and not self._ended(row, forced):
            choices = self._choices(row, self._matcher(row, forced))
            if len(choices) > 1:
                break
            forced += choices
        return forced

    def _ended(self, row: ProposeRow, proposal: Sequence[int]) -> bool:
        grammar = self._grammar(row)
        return grammar is not None and bool(proposal) and proposal[-1] in grammar.end_token_ids

    def _feed(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Writes the KV of the tokens to the pages."""
        first, memory = table.length, self._memory
        self.pool.append(table, len(tokens))
        written = [self.kv_at(table, first - 1)] if first else [0]
        for token in tokens:
            written.append(_kv(written[-1], token))
        del written[0]
        for span, run in zip(self._spans, table.runs, strict=True):
            for place, kv in enumerate(written, first):
                memory[run.pages[place // span - run.freed] * self._size + place % span] = kv

    def kv_at(self, table: PageTable, place: int) -> int:
        """The KV of a position, to which all tokens up to it have contributed."""
        return self._places(table, 0, place, place + 1)[0]

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
