"""The sequences of a worker: for which tokens each has valid KV, and on which pages. Free of torch.

Between steps a sequence's token list and its page table have the same length: the list names the tokens whose KV is
valid. `prepare` applies the protocol's row rules and leaves the row's own tokens appended to the list, so that the list
is the row's history while the engine runs; `settle` or `revert` ends that state.

With a prefix cache, `prepare` also takes over pages that already hold the KV of the sequence's next committed tokens,
and `settle` offers the pages that the sequence has filled with committed tokens to other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spool.engine.description import EngineDescription
from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.kv.pages import OutOfPagesError, PageKey, PagePool, PageTable
from spool.engine.kv.prefix_cache import PrefixCache
from spool.engine.steps import VerifyRow
from spool.protos import worker_pb2
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import MAX_SCORED_TOKENS, PromptScoring, RowStatus
from spool.scheduler.sampling import SamplingParameters
from spool.scheduler.state.digests import EMPTY_DIGEST, DigestedTokens
from spool.services.rpc.conversion import from_wire


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerSequence(VerifyRow):
    """One sequence as its worker knows it, and its row of the present step, as the engine gets it.

    `history` is the list of the tokens that are `known`: those with valid KV and, while the engine runs, the row's own.
    `committed` holds the tokens that were committed when the sequence was opened. Until rows have fed all of them, or
    other ones, it is `ahead`; the first `agreed` of them have been compared with those that rows fed.
    `page_keys` are its cache scope and the keys of its first pages (engine/kv/prefix_cache.py); None once its KV must
    not be shared.

    The row feeds its `tokens` from position `start` on, and verifies at most `verify` proposed ones after them. The
    `reused` positions before `start` were taken over from other sequences. Without tokens there is nothing to compute.
    """

    sequence_id: int
    known: DigestedTokens
    committed: Sequence[int] = ()
    ahead: bool = True
    agreed: int = 0
    page_keys: list[PageKey] | None = None
    sampled: int | None = None
    """What the last row has sampled, behind all of `history`; None where it has sampled nothing."""
    fed: int = 0
    """Where the last row's own tokens ended, which it has sampled after."""
    untouched: bool = False
    """Whether the sequence was adopted from another worker and no row has come for it yet."""
    start: int = 0
    reused: int = 0
    verify: int = 0

    @property
    def digest(self) -> int:
        return self.known.digest(self.table.length)

    def begin(self, start: int, tokens: Sequence[int], verify: int, draft_length: int, lookup_length: int) -> None:
        """A row that samples and reuses nothing; its tokens are known."""
        self.start, self.tokens, self.verify = start, tokens, verify
        self.draft_length, self.lookup_length = draft_length, lookup_length
        self.draft_tokens, self.sample, self.scoring, self.reused = (), True, None, 0

    def truncate_tokens(self, length: int) -> None:
        self.known.truncate(length)
        self.drafting.truncate(length)
        self.agreed = min(self.agreed, length)

    def feeds_committed(self, end: int) -> bool:
        """Whether the first `end` tokens are committed ones. Each token is compared once; where one differs, there are
        no committed tokens to follow any more."""
        if list(self.committed[self.agreed : end]) != self.history[self.agreed : end]:
            self.ahead = False
            return False
        self.agreed = max(self.agreed, end)
        return True


class RowRejectedError(SpoolError):
    """A row cannot run; `kv_len` and `digest` say what the worker holds of its sequence."""

    def __init__(self, status: RowStatus, error: str, held: WorkerSequence | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.kv_len = held.table.length if held else 0
        self.digest = held.digest if held else EMPTY_DIGEST


class WorkerSequences:
    """All sequences of one target. With a `vocabulary_size` of 0 in the engine's description, it takes every token id.
    `forget` is called once a sequence is no longer here."""

    def __init__(
        self,
        pool: PagePool,
        engine: EngineDescription,
        prefix_cache: bool,
        forget: Callable[[SequenceDrafting], None],
    ) -> None:
        self._pool, self._page_size = pool, pool.page_size
        self._engine = engine
        self._forget = forget
        self._prefixes = PrefixCache(pool) if prefix_cache else None
        self._sequences: dict[int, WorkerSequence] = {}
        self._expected: dict[int, WorkerSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def prepare(self, row: worker_pb2.Row) -> WorkerSequence:
        """Checks a row, truncates its sequence to what the row leaves of it, takes over pages known by the tokens that
        follow, and appends the row's tokens to the sequence's list.

        Raises RowRejectedError, which says what the worker then holds of the sequence.
        """
        held = self._find(row)
        kv_len, row_tokens = row.kv_len, list(row.tokens)
        if kv_len > held.table.length:
            raise RowRejectedError(
                RowStatus.KV_MISMATCH, f"kv_len is {kv_len}, the worker has {held.table.length}", held
            )
        if row.prefix_digest != held.known.digest(kv_len):
            error = f"the worker has other tokens than expected in [0, {kv_len})"
            raise RowRejectedError(RowStatus.KV_MISMATCH, error, held)
        end = kv_len + len(row_tokens)
        kept = self._kept(held, row, row_tokens)
        # A shared page is never written to: the tokens that the row needs of it are computed again, on a new page. So
        # is everything where pages that a window would see are freed.
        start = self._pool.truncate(held.table, kept)
        held.sampled = None
        fed = [*held.history[start:kv_len], *row_tokens[max(0, start - kv_len) :]]
        if start < len(held.known):
            held.truncate_tokens(start)
            if held.page_keys is not None:
                del held.page_keys[start // self._page_size + 1 :]
        held.known.extend(fed)
        scoring = from_wire(PromptScoring, row.scoring) if row.HasField("scoring") else None
        self._take_over(held, end, row.sample, None if scoring is None else scoring.first)
        start, most = held.table.length, self._engine.max_num_batched_tokens
        tokens = held.history[start:end]
        if len(tokens) > most:
            held.truncate_tokens(start)
            raise RowRejectedError(RowStatus.KV_MISMATCH, f"{len(tokens)} tokens must be fed, at most {most} can", held)
        lookup_length = row.lookup_length if row.HasField("lookup_length") else row.draft_length
        held.begin(start, tokens, min(row.verify, most - len(tokens)), row.draft_length, lookup_length)
        held.sample, held.scoring, held.reused = row.sample, scoring, max(0, start - kept)
        return held

    def follow(
        self, sequence_id: int, kv_len: int, prefix_digest: int, draft_length: int, verify: int, lookup_length: int
    ) -> WorkerSequence:
        """As `prepare`, for a row that feeds the token which the sequence's last row has sampled. `kv_len` is where the
        own tokens of that row must have ended.

        Raises RowRejectedError where that row is not here, or has sampled none or one that ends the sequence's grammar.
        """
        held = self._sequences.get(sequence_id)
        token = None if held is None else held.sampled
        if held is None or token is None or held.fed != kv_len or held.known.digests[kv_len] != prefix_digest:
            error = "the row that it follows is not here, or has sampled nothing"
            raise RowRejectedError(RowStatus.VOID, error, held)
        grammar = held.sampling.grammar
        if grammar is not None and token in grammar.end_token_ids:
            raise RowRejectedError(RowStatus.VOID, "the row that it follows has ended the sequence's grammar", held)
        start = held.table.length
        if (length := start + 1) > self._engine.max_sequence_length:
            error = f"the row would reach {length} tokens, must be at most {self._engine.max_sequence_length}"
            raise RowRejectedError(RowStatus.INVALID, error, held)
        held.sampled = None
        fed = (token,)
        held.known.extend(fed)
        # Where the row begins depends on how many proposed tokens the row before has accepted.
        if verify:
            verify = min(verify, self._engine.max_sequence_length - length, self._engine.max_num_batched_tokens - 1)
        held.begin(start, fed, verify, draft_length, lookup_length)
        return held

    def settle(self, sequence: WorkerSequence, accepted: Sequence[int], sampled: int | None) -> None:
        """After the engine ran: the `accepted` tokens after the row's own have valid KV now, and the one behind them is
        `sampled`.

        Raises RuntimeError where the page table says otherwise; the sequence is forgotten then.
        """
        sequence.sampled, sequence.fed = sampled, len(sequence.history)
        if accepted:
            sequence.known.extend(accepted)
        known, length = len(sequence.history), sequence.table.length
        if known != length:
            self.stop_sharing(sequence)
            self.drop(sequence.sequence_id)
            raise RuntimeError(f"the engine left KV for {length} positions, must be {known}")
        self._register(sequence)
        self._pool.trim(sequence.table, known)

    def revert(self, sequence: WorkerSequence) -> None:
        """After the engine refused the row and changed nothing: takes the row's tokens off the list again.

        Raises RuntimeError where the page table did change; the sequence is forgotten then.
        """
        start, length = sequence.start, sequence.table.length
        if length != start:
            self.stop_sharing(sequence)
            self.drop(sequence.sequence_id)
            raise RuntimeError(f"the engine refused a row but moved its KV from {start} to {length}")
        sequence.truncate_tokens(start)

    def stop_sharing(self, sequence: WorkerSequence) -> None:
        """Lets no other sequence take over this one's KV from now on, because the KV may be wrong."""
        if self._prefixes is not None:
            self._prefixes.forget(sequence.table)
        sequence.page_keys = None

    def drop(self, sequence_id: int) -> None:
        """Forgets a sequence and frees its pages; an unknown one is no error."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._pool.free(sequence.table)
            self._forget(sequence.drafting)

    def held(self, sequence_id: int, kv_len: int, prefix_digest: int) -> WorkerSequence:
        """The sequence, which must hold exactly `kv_len` positions with this digest. Raises RowRejectedError."""
        held = self._sequences.get(sequence_id)
        if held is None:
            raise RowRejectedError(RowStatus.UNKNOWN_SEQUENCE, f"sequence {sequence_id} is not known here")
        if held.table.length != kv_len or held.digest != prefix_digest:
            error = f"kv_len is {kv_len}, the worker has {held.table.length} or other tokens"
            raise RowRejectedError(RowStatus.KV_MISMATCH, error, held)
        return held

    def expect(self, sequence: WorkerSequence) -> None:
        """Sets pages aside for all tokens of a sequence whose KV comes from another worker.

        Raises RowRejectedError where the sequence is here or expected already, is too long, or finds no pages.
        """
        sequence_id, length = sequence.sequence_id, len(sequence.known)
        if sequence_id in self._sequences or sequence_id in self._expected:
            raise RowRejectedError(RowStatus.INVALID, f"sequence {sequence_id} is here or on its way already")
        if not 0 < length <= self._engine.max_sequence_length:
            error = f"tokens holds {length}, must hold 1 to {self._engine.max_sequence_length}"
            raise RowRejectedError(RowStatus.INVALID, error)
        largest = max(sequence.history)
        if self._engine.vocabulary_size and largest >= self._engine.vocabulary_size:
            error = f"tokens holds {largest}, must be below vocabulary_size {self._engine.vocabulary_size}"
            raise RowRejectedError(RowStatus.INVALID, error)
        try:
            self._pool.take(sequence.table, length)
        except OutOfPagesError as error:
            raise RowRejectedError(RowStatus.OUT_OF_PAGES, str(error)) from error
        self._expected[sequence_id] = sequence

    def expects(self, sequence: WorkerSequence) -> bool:
        """Whether the sequence is still expected, so that its pages may be written."""
        return self._expected.get(sequence.sequence_id) is sequence

    def adopt(self, sequence: WorkerSequence) -> None:
        """Takes in an expected sequence, whose KV is complete.

        Raises RowRejectedError where the sequence is not expected any more, or a row has opened it meanwhile.
        """
        if not self.expects(sequence) or sequence.sequence_id in self._sequences:
            raise RowRejectedError(RowStatus.INVALID, f"sequence {sequence.sequence_id} is not expected any more")
        self._sequences[sequence.sequence_id] = self._expected.pop(sequence.sequence_id)
        sequence.untouched = True
        self._register(sequence)

    def give_up(self, sequence: WorkerSequence) -> None:
        """Frees the pages of an expected sequence, or of an adopted one for which no row has come yet."""
        if self.expects(sequence):
            self._pool.free(self._expected.pop(sequence.sequence_id).table)
        elif sequence.untouched and self._sequences.get(sequence.sequence_id) is sequence:
            self.drop(sequence.sequence_id)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self.drop(sequence_id)

    def drop_all(self) -> None:
        self.release(list(self._sequences))
        for sequence in list(self._expected.values()):
            self.give_up(sequence)

    def check_integrity(self) -> None:
        """To be called between steps. Raises RuntimeError where tokens, tables and pages do not agree."""
        for sequence in self._sequences.values():
            if len(sequence.known) != sequence.table.length:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} has {len(sequence.known)} tokens "
                    f"and KV for {sequence.table.length}"
                )
        sequences = [*self._sequences.values(), *self._expected.values()]
        self._pool.check_conservation([sequence.table for sequence in sequences])

    def _find(self, row: worker_pb2.Row) -> WorkerSequence:
        """The sequence of a row; a row with parameters opens it. Raises RowRejectedError."""
        held = self._sequences.get(row.sequence_id)
        try:
            opened = open_sequence(row.sequence_id, row.parameters) if row.HasField("parameters") else None
            _fill_in(row, opened or held)
            _check_row(row, self._engine)
        except ValueError as error:
            raise RowRejectedError(RowStatus.INVALID, str(error), held) from error
        if held is None:
            if opened is None:
                raise RowRejectedError(RowStatus.UNKNOWN_SEQUENCE, "no parameters came for a sequence not known here")
            self._sequences[row.sequence_id] = held = opened
        elif opened is not None:
            held.prompt_length, held.sampling = opened.prompt_length, opened.sampling
            held.logits_digests, held.top_logprobs = opened.logits_digests, opened.top_logprobs
            held.committed, held.ahead, held.agreed = opened.committed, True, 0
            held.drafting.expected = opened.drafting.expected
        held.untouched = False
        return held

    def _kept(self, held: WorkerSequence, row: worker_pb2.Row, tokens: Sequence[int]) -> int:
        """How many positions the row leaves of its sequence: `kv_len`, and those of the row's own tokens that have KV.

        A token whose logits are wanted is fed in any case. Where all the row's tokens have KV, what lies behind them is
        kept as well. A row that opens its sequence wants all of it computed.
        """
        if held.table.length == row.kv_len or row.HasField("parameters"):
            return row.kv_len
        end = row.kv_len + len(tokens)
        most = min(end - row.sample, held.table.length)
        if row.HasField("scoring"):
            most = min(most, row.scoring.first - 1)
        kept = row.kv_len
        while kept < most and held.history[kept] == tokens[kept - row.kv_len]:
            kept += 1
        return held.table.length if kept == end else kept

    def _take_over(self, sequence: WorkerSequence, end: int, computes: bool, scored: int | None) -> None:
        """Takes over known pages of the tokens up to `end`, or of all committed tokens where the row only computes KV.

        The last token is always left to feed, because its logits may be wanted next, and so is the one before `scored`,
        the first token whose log probability is wanted.
        """
        known = sequence.history
        if len(sequence.committed) <= end:
            sequence.ahead = False
        elif sequence.ahead and not computes and sequence.feeds_committed(end):
            known = sequence.committed
        if self._prefixes is not None and sequence.page_keys is not None:
            limit = len(known) - 1 if scored is None else scored - 1
            self._prefixes.share(sequence.table, sequence.page_keys, known, limit)
            sequence.known.extend(known[len(sequence.known) : sequence.table.length])

    def _register(self, sequence: WorkerSequence) -> None:
        """Offers the pages that the sequence has filled to other sequences."""
        keys, history = sequence.page_keys, sequence.history
        if keys is not None and len(keys) * self._page_size <= len(history) and self._prefixes is not None:
            self._prefixes.register(sequence.table, keys, history, len(history))


def open_sequence(sequence_id: int, parameters: worker_pb2.SequenceParameters) -> WorkerSequence:
    """A sequence of which nothing is held yet. Raises ValueError naming the field that is out of range."""
    if parameters.prompt_length < 1:
        raise ValueError(f"prompt_length is {parameters.prompt_length}, must be at least 1")
    scope, known = parameters.cache_scope, DigestedTokens()
    return WorkerSequence(
        sequence_id=sequence_id,
        table=PageTable(),
        known=known,
        history=known.tokens,
        tokens=(),
        draft_tokens=(),
        sample=False,
        prompt_length=parameters.prompt_length,
        sampling=from_wire(SamplingParameters, parameters.sampling)
        if parameters.HasField("sampling")
        else SamplingParameters(),
        logits_digests=parameters.logits_digests,
        top_logprobs=parameters.top_logprobs if parameters.HasField("top_logprobs") else None,
        committed=tuple(parameters.committed_tokens),
        page_keys=[scope],
        drafting=SequenceDrafting(sequence_id, scope, tuple(parameters.expected_output), DraftKv([scope])),
    )


def _fill_in(row: worker_pb2.Row, sequence: WorkerSequence | None) -> None:
    """Puts the tokens into the row that came with its sequence's parameters. Raises ValueError if they did not."""
    if row.known_tokens and sequence is not None:
        tokens = sequence.committed[row.kv_len : row.kv_len + row.known_tokens]
        if row.tokens or len(tokens) < row.known_tokens:
            limit = f"at most {len(tokens)}, without tokens in the row"
            raise ValueError(f"known_tokens is {row.known_tokens}, must be {limit}")
        row.tokens.extend(tokens)
        row.known_tokens = 0


def _check_row(row: worker_pb2.Row, engine: EngineDescription) -> None:
    """Checks what can be said of a row without its sequence. Raises ValueError naming field, value and limit."""
    tokens, verify = row.tokens, row.verify
    fed = len(tokens) + row.known_tokens
    if not fed:
        raise ValueError("tokens is empty, must hold at least one token to feed")
    if verify and not row.sample:
        raise ValueError(f"verify is {verify}, must be 0 without sample")
    if row.HasField("scoring"):
        _check_scoring(row, engine)
    most = engine.max_sequence_length
    length = row.kv_len + fed + verify
    if length > most:
        raise ValueError(f"the row would reach {length} tokens, must be at most {most}")
    if tokens:
        _check_tokens("tokens", tokens, engine)
    if row.HasField("parameters") and (committed := row.parameters.committed_tokens):
        if len(committed) > most:
            raise ValueError(f"committed_tokens holds {len(committed)} tokens, must hold at most {most}")
        _check_tokens("committed_tokens", committed, engine)


def _check_scoring(row: worker_pb2.Row, engine: EngineDescription) -> None:
    """The scored tokens must follow fed ones; what follows the last fed one of a row that samples is sampled."""
    first, count = row.scoring.first, len(row.scoring.tokens)
    last = row.kv_len + len(row.tokens) + row.known_tokens - row.sample
    if not row.kv_len < first or (count and first + count - 1 > last):
        raise ValueError(
            f"scoring names {count} tokens from position {first} on, all must be between {row.kv_len + 1} and {last}"
        )
    if count > MAX_SCORED_TOKENS:
        raise ValueError(f"scoring names {count} tokens, must name at most {MAX_SCORED_TOKENS}")
    if count:
        _check_tokens("scoring.tokens", row.scoring.tokens, engine)


def _check_tokens(name: str, tokens: Iterable[int], engine: EngineDescription) -> None:
    if engine.vocabulary_size and (largest := max(tokens)) >= engine.vocabulary_size:
        raise ValueError(f"{name} holds {largest}, must be below vocabulary_size {engine.vocabulary_size}")
