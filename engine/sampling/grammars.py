"""Grammars that outputs must follow: which tokens may come next. Knows no torch; needs llguidance for a grammar only.

The state of a grammar is a function of its definition and of the output up to now, and of nothing else: what is kept
of it from step to step is a cache, which is compared with the output at each use and replaced where it does not fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spool.scheduler.errors import SpoolError
from spool.scheduler.sampling import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_P = ParamSpec("_P")
_T = TypeVar("_T")

# In the library's masks it stands for "the output may end here". No model knows it, and no mask of ours has it.
_END = "<|end of structured output|>"
_TRIED = 40
"""Tokens for which a grammar is followed before it is let in."""
_NO_TEXT = "no text fits"
# What the library puts in the place of details.
_NOT_VERBOSE = "<non-verbose/>"
_COMPILED = 32
"""Grammars whose compiled form is kept, in addition to those in use."""


class GrammarError(SpoolError):
    """A grammar cannot be compiled or followed; the message is the reason."""


class GrammarTokens:
    """The tokens of a model as grammars see them. Raises GrammarError where the library cannot read the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        copy = Tokenizer.from_str(tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.add_special_tokens([_END])
        self.end: int = copy.get_vocab()[_END]
        try:
            self._tokens = LLTokenizer(copy.to_str(), eos_token=[self.end])
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer does not fit grammars: {_reason(str(error))}") from error
        self.size: int = self._tokens.vocab_size

    def matcher(self, definition: str) -> LLMatcher:
        """At the beginning of an output. Raises GrammarError; without the GIL for as long as compiling takes."""
        from llguidance import LLMatcher, LLParserLimits

        return _sound(LLMatcher(self._tokens, definition, log_level=0, limits=LLParserLimits(verbose_errors=False)))


def check_grammar(tokens: GrammarTokens, definition: str) -> None:
    """Compiles a grammar and follows it for some tokens, since what grows with every token should not be a worker's to
    find out. Raises GrammarError."""
    matcher = tokens.matcher(definition)
    for place in range(_TRIED):
        bits = np.frombuffer(_sound(matcher).compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not len(allowed) and not place:
            raise GrammarError(_NO_TEXT)
        going_on = allowed[allowed != tokens.end]
        if not len(going_on):
            break
        # Not the lowest: in most vocabularies quotation marks come before letters, and texts would end at once.
        matcher.try_consume_tokens([int(going_on[-1])])
    _sound(matcher)


class GrammarState:
    """How far the output of one sequence has come in its grammar."""

    __slots__ = ("_definition", "_matcher", "_tokens")

    def __init__(self) -> None:
        self._definition = ""
        self._matcher: LLMatcher | None = None
        self._tokens: list[int] = []

    def follow(self, definition: str, output: Sequence[int], fresh: Callable[[str], LLMatcher]) -> LLMatcher:
        """The matcher after `output`; `fresh` gives one of a grammar's beginning. Raises GrammarError."""
        matcher, known = self._matcher, self._tokens
        if matcher is not None and self._definition == definition:
            same = _common_length(known, output)
            if same == len(known) or matcher.rollback(len(known) - same):
                del known[same:]
            else:
                matcher = None
        else:
            matcher = None
        if matcher is None:
            matcher, known = fresh(definition), []
        new = list(output[len(known) :])
        self._matcher = None
        if matcher.try_consume_tokens(new) < len(new):
            _sound(matcher)
            raise GrammarError("the output does not follow its grammar")
        known += new
        self._matcher, self._tokens, self._definition = matcher, known, definition
        return matcher

    def go_on(self, matcher: LLMatcher, token: int) -> bool:
        """Whether the `token` may come next; the matcher that was given is the one after it then."""
        if not matcher.try_consume_tokens([token]):
            return False
        self._tokens.append(token)
        return True

    def forget(self) -> None:
        self._matcher = None


@dataclass(slots=True)
class GrammarRow:
    """The token after `output` is wanted, and the one after each of the `draft_tokens`."""

    state: GrammarState
    grammar: Grammar
    output: Sequence[int]
    draft_tokens: Sequence[int] = ()

    @property
    def positions(self) -> int:
        return len(self.draft_tokens) + 1


@dataclass(slots=True)
class TokenMasks:
    """`allowed` [positions, bytes]: one bit for each token, the lowest bit first, for the positions of one row after
    those of another. `complete`: the positions where nothing may come but the end. `errors`, by row: why its positions,
    which then allow everything, mean nothing.

    Positions after a draft token that the grammar forbids mean nothing either: that token is not accepted.
    """

    allowed: NDArray[np.uint8]
    complete: list[int]
    errors: list[str | None] = field(default_factory=list)


class _CallersThread(Executor):
    """Does what is submitted at once."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)
        return future


class Grammars:
    """The grammars of one worker, whose engine uses them from one thread."""

    def __init__(self, tokenizer: Tokenizer, *, beside_model: bool) -> None:
        """`beside_model`: grammars are compiled and followed on threads of their own while the model computes. Where
        the model has all cores for itself, that would take from it more time than the masks themselves do."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        # Takes up to a second: done while the model loads.
        self._tokens = thread.submit(GrammarTokens, tokenizer)
        self._executor: Executor = thread if beside_model else _CallersThread()
        self._beside_model = beside_model
        self._fillers: LLExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def masks(self, rows: Sequence[GrammarRow]) -> Future[TokenMasks]:
        """Begins to compute what may come next in each row; no other use of the rows' states until that is known."""
        return self._executor.submit(self._masks, rows)

    def forced(self, row: GrammarRow) -> list[int]:
        """The tokens that must come next; often none. Waits for the grammar to be compiled."""
        return self._asked(row, lambda matcher: matcher.compute_ff_tokens())

    def allowed_prefix(self, row: GrammarRow, tokens: list[int]) -> list[int]:
        """The first of the `tokens`, as far as they may come next. Waits for the grammar to be compiled."""
        return self._asked(row, lambda matcher: tokens[: matcher.validate_tokens(tokens)])

    def _asked(self, row: GrammarRow, question: Callable[[LLMatcher], Iterable[int]]) -> list[int]:
        def ask() -> list[int]:
            try:
                return list(question(row.state.follow(row.grammar.definition, row.output, self._fresh)))
            except GrammarError:
                return []

        return self._executor.submit(ask).result()

    def _masks(self, rows: Sequence[GrammarRow]) -> TokenMasks:
        errors: list[str | None] = [None] * len(rows)
        matchers: list[LLMatcher | None] = [None] * len(rows)
        for index, row in enumerate(rows):
            try:
                matchers[index] = row.state.follow(row.grammar.definition, row.output, self._fresh)
            except GrammarError as error:
                errors[index] = str(error)
        spans = _spans(rows)
        followed = [(index, matcher) for index, matcher in enumerate(matchers) if matcher is not None]
        if not followed:
            count = spans[-1].stop if spans else 0
            return TokenMasks(np.zeros((count, 0), np.uint8), [], errors)
        import llguidance.numpy as masks
        from llguidance import LLExecutor

        tokens = self._tokens.result()
        # Whatever is not filled allows everything.
        words = masks.allocate_token_bitmask(spans[-1].stop, tokens.size)
        if self._beside_model:
            self._fillers = self._fillers or LLExecutor()
            asked = [(matcher, spans[index].start, list(rows[index].draft_tokens)) for index, matcher in followed]
            # The library wants draft tokens, or a call of its own for rows without.
            if drafted := [row for row in asked if row[2]]:
                masks.fill_next_token_bitmask_par_with_draft_tokens(self._fillers, drafted, words)
            if single := [(matcher, first) for matcher, first, drafts in asked if not drafts]:
                masks.fill_next_token_bitmask_par(self._fillers, single, words)
        else:
            for index, matcher in followed:
                row, first = rows[index], spans[index].start
                masks.fill_next_token_bitmask(matcher, words, first)
                for place, token in enumerate(row.draft_tokens, first + 1):
                    if not row.state.go_on(matcher, token):
                        break
                    masks.fill_next_token_bitmask(matcher, words, place)
        for index, matcher in followed:
            if matcher.is_error():
                errors[index] = _reason(matcher.get_error())
                rows[index].state.forget()
                words[spans[index]] = -1
        allowed = words.view(np.uint8)
        end_byte, end_bit = tokens.end >> 3, 1 << (tokens.end & 7)
        may_end = {place for place, byte in enumerate(allowed[:, end_byte].tolist()) if byte & end_bit}
        complete = []
        for row, span in zip(rows, spans, strict=True):
            for place in may_end.intersection(range(span.start, span.stop)):
                allowed[place, end_byte] ^= end_bit
                if not allowed[place].any():
                    complete.append(place)
                for token in row.grammar.end_token_ids:
                    if token < tokens.size:
                        allowed[place, token >> 3] |= 1 << (token & 7)
        return TokenMasks(allowed, complete, errors)

    def _fresh(self, definition: str) -> LLMatcher:
        compiled = self._compiled.pop(definition, None)
        if compiled is None:
            compiled = self._tokens.result().matcher(definition)
        self._compiled[definition] = compiled
        if len(self._compiled) > _COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()


def _spans(rows: Sequence[GrammarRow]) -> list[slice]:
    """Which positions are each row's."""
    spans, first = [], 0
    for row in rows:
        spans.append(slice(first, first + row.positions))
        first += row.positions
    return spans


def _common_length(known: Sequence[int], output: Sequence[int]) -> int:
    if list(output[: len(known)]) == known:
        return len(known)
    return next(
        (place for place, (one, other) in enumerate(zip(known, output, strict=False)) if one != other),
        min(len(known), len(output)),
    )


def _sound(matcher: LLMatcher) -> LLMatcher:
    """Raises GrammarError for a matcher in an error state, which it never leaves."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return matcher


def _reason(text: str) -> str:
    """One line of the library's message, and not all of a long one: it quotes the grammar."""
    line = " ".join(text.replace(_NOT_VERBOSE, "").split())
    if line.startswith("NoExtension"):  # the library's name for it
        return _NO_TEXT
    return line if len(line) <= 300 else f"{line[:300]} ..."
