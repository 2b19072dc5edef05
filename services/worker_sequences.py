"""A worker's book of sequences: which tokens each has valid KV for, on which pages. Knows no torch.

Between steps a sequence's token list and its page table have the same length: the list names the tokens whose KV is
valid. `prepare` applies the protocol's row rules and leaves the row's own tokens appended to the list, so that the list
is the row's history while the engine runs; `settle` or `revert` ends that state.

With a prefix cache, `prepare` also takes over pages that hold the KV of the sequence's next committed tokens already,
and `settle` lets others find the pages that the sequence has filled with committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.description import EngineDescription
from engine.pages import OutOfPagesError, PageKey, PagePool, PageTable
from engine.prefix_cache import PrefixCache
from engine.prompt_lookup import TokenPlaces
from protos import worker_pb2
from scheduler.digests import EMPTY_DIGEST, DigestedTokens
from scheduler.messages import Role, RowStatus
from scheduler.sampling import SamplingParameters
from services.row_checks import check_row
from services.wire import sampling_from_wire


@dataclass(slots=True)
class WorkerSequence:
    """One sequence as its worker knows it.

    `committed` are the tokens committed when it was opened, while rows have not fed all of them. `page_keys` are those
    of its first pages (engine/prefix_cache.py), None once its KV is not to be shared.
    """

    sequence_id: int
    prompt_length: int
    sampling: SamplingParameters
    logits_digests: bool
    top_logprobs: int | None
    tokens: DigestedTokens = field(default_factory=DigestedTokens)
    table: PageTable = field(default_factory=PageTable)
    places: TokenPlaces = field(default_factory=TokenPlaces)
    committed: Sequence[int] = ()
    page_keys: list[PageKey] | None = field(default_factory=list)
    untouched: bool = False
    """Whether it was adopted from another worker and no row has come for it yet."""

    @property
    def history(self) -> Sequence[int]:
        return self.tokens.tokens

    @property
    def digest(self) -> int:
        return self.tokens.digest(self.table.length)

    def truncate_tokens(self, length: int) -> None:
        self.tokens.truncate(length)
        self.places.truncate(length)


@dataclass(slots=True)
class PreparedRow:
    """A row that can run: `tokens` are to be fed from position `start` on, `reused` is how many positions from the
    row's `kv_len` on were taken over from other sequences. Without tokens there is nothing to compute."""

    sequence: WorkerSequence
    start: int
    tokens: Sequence[int]
    reused: int = 0


class RowRejectedError(Exception):
    """A row that cannot run; says what the worker has of its sequence."""

    def __init__(self, status: RowStatus, error: str, held: WorkerSequence | None = None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.kv_len = held.table.length if held else 0
        self.digest = held.digest if held else EMPTY_DIGEST


class WorkerSequences:
    """The book of one worker of the given role.

    A `vocabulary_size` of 0 in the engine's description accepts every token id.
    """

    def __init__(self, pool: PagePool, role: Role, engine: EngineDescription, prefix_cache: bool) -> None:
        self._pool = pool
        self._role = role
        self._engine = engine
        self._prefixes = PrefixCache(pool) if prefix_cache else None
        self._sequences: dict[int, WorkerSequence] = {}
        self._expected: dict[int, WorkerSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def prepare(self, row: worker_pb2.Row) -> PreparedRow:
        """Checks a row, truncates its sequence to the row's `kv_len`, takes over pages known by the tokens that follow,
        and appends the row's tokens to the sequence's list.

        Raises RowRejectedError; what the worker has of the sequence is then as the error says.
        """
        held = self._find(row)
        if row.kv_len > held.table.length:
            raise RowRejectedError(
                RowStatus.KV_MISMATCH, f"kv_len is {row.kv_len}, the worker has {held.table.length}", held
            )
        if row.prefix_digest != held.tokens.digest(row.kv_len):
            raise RowRejectedError(
                RowStatus.KV_MISMATCH, f"the worker has other tokens than expected in [0, {row.kv_len})", held
            )
        # A page that others share is not written to: what the row needs of it is computed again, on a page of its own.
        start = self._pool.writable_length(held.table, row.kv_len)
        fed = [*held.history[start : row.kv_len], *row.tokens]
        self._truncate(held, start)
        end = start + len(fed)
        held.tokens.extend(fed)
        self._take_over(held, end, row.choose or row.draft_length > 0)
        start = held.table.length
        tokens = held.history[start:end]
        if len(tokens) + len(row.draft_tokens) > self._engine.max_packed_rows:
            held.truncate_tokens(start)
            most = self._engine.max_packed_rows
            raise RowRejectedError(RowStatus.KV_MISMATCH, f"{len(tokens)} tokens must be fed, at most {most} can", held)
        return PreparedRow(held, start, tokens, max(0, start - row.kv_len))

    def settle(self, sequence: WorkerSequence, computed: Sequence[int]) -> None:
        """After the engine ran: `computed` are the tokens after the row's own that have valid KV now.

        Raises RuntimeError where the page table says otherwise; the sequence is forgotten then.
        """
        # What a draft computes beyond its row is a proposal.
        committed = len(sequence.tokens) + (len(computed) if self._role is Role.TARGET else 0)
        sequence.tokens.extend(computed)
        if len(sequence.tokens) != sequence.table.length:
            length = sequence.table.length
            self.distrust(sequence)
            self.drop(sequence.sequence_id)
            raise RuntimeError(f"the engine left KV for {length} positions, must be {len(sequence.tokens)}")
        self._register(sequence, committed)

    def revert(self, sequence: WorkerSequence, start: int) -> None:
        """After the engine refused the row and changed nothing: takes the row's tokens off the list again.

        Raises RuntimeError where the page table did change; the sequence is forgotten then.
        """
        length = sequence.table.length
        if length != start:
            self.distrust(sequence)
            self.drop(sequence.sequence_id)
            raise RuntimeError(f"the engine refused a row but moved its KV from {start} to {length}")
        sequence.truncate_tokens(start)

    def distrust(self, sequence: WorkerSequence) -> None:
        """Something went wrong with the sequence's KV: no other one is to take it over from now on."""
        if self._prefixes is not None:
            self._prefixes.forget(sequence.table)
        sequence.page_keys = None

    def drop(self, sequence_id: int) -> None:
        """Forgets a sequence and frees its pages; an unknown one is no error."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._pool.free(sequence.table)

    def held(self, sequence_id: int, kv_len: int, prefix_digest: int) -> WorkerSequence:
        """A sequence of which exactly so many positions are held. Raises RowRejectedError."""
        held = self._sequences.get(sequence_id)
        if held is None:
            raise RowRejectedError(RowStatus.UNKNOWN_SEQUENCE, f"sequence {sequence_id} is not known here")
        if held.table.length != kv_len or held.digest != prefix_digest:
            error = f"kv_len is {kv_len}, the worker has {held.table.length} or other tokens"
            raise RowRejectedError(RowStatus.KV_MISMATCH, error, held)
        return held

    def expect(self, sequence: WorkerSequence) -> None:
        """Sets pages aside for all tokens of a sequence whose KV is to come from elsewhere.

        Raises RowRejectedError: such a sequence is here or expected already, is too long, or finds no pages.
        """
        sequence_id, length = sequence.sequence_id, len(sequence.tokens)
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
            self._pool.append(sequence.table, length)
        except OutOfPagesError as error:
            raise RowRejectedError(RowStatus.OUT_OF_PAGES, str(error)) from error
        self._expected[sequence_id] = sequence

    def expects(self, sequence: WorkerSequence) -> bool:
        """Whether its pages may still be written."""
        return self._expected.get(sequence.sequence_id) is sequence

    def adopt(self, sequence: WorkerSequence) -> None:
        """The KV of an expected sequence has come. Raises RowRejectedError where it is not expected any more, or was
        opened by a row meanwhile."""
        if not self.expects(sequence) or sequence.sequence_id in self._sequences:
            raise RowRejectedError(RowStatus.INVALID, f"sequence {sequence.sequence_id} is not expected any more")
        self._sequences[sequence.sequence_id] = self._expected.pop(sequence.sequence_id)
        sequence.untouched = True
        self._register(sequence, len(sequence.tokens))

    def give_up(self, sequence: WorkerSequence) -> None:
        """Frees the pages of an expected sequence, or of an adopted one that nobody has asked for yet."""
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
            if len(sequence.tokens) != sequence.table.length:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} has {len(sequence.tokens)} tokens "
                    f"and KV for {sequence.table.length}"
                )
        sequences = [*self._sequences.values(), *self._expected.values()]
        self._pool.check_conservation([sequence.table for sequence in sequences])

    def _find(self, row: worker_pb2.Row) -> WorkerSequence:
        """The sequence of a row, which may open it. Raises RowRejectedError."""
        held = self._sequences.get(row.sequence_id)
        try:
            check_row(row, self._role, self._engine)
            opened = open_sequence(row.sequence_id, row.parameters) if row.HasField("parameters") else None
        except ValueError as error:
            raise RowRejectedError(RowStatus.INVALID, str(error), held) from error
        if held is None:
            if opened is None:
                raise RowRejectedError(RowStatus.UNKNOWN_SEQUENCE, "no parameters came for a sequence not known here")
            self._sequences[row.sequence_id] = held = opened
        elif opened is not None:
            held.prompt_length, held.sampling = opened.prompt_length, opened.sampling
            held.logits_digests, held.top_logprobs = opened.logits_digests, opened.top_logprobs
            held.committed = opened.committed
        held.untouched = False
        return held

    def _truncate(self, sequence: WorkerSequence, length: int) -> None:
        self._pool.truncate(sequence.table, length)
        sequence.truncate_tokens(length)
        if sequence.page_keys:
            del sequence.page_keys[length // self._pool.page_size :]

    def _take_over(self, sequence: WorkerSequence, end: int, computes: bool) -> None:
        """Shares known pages of the tokens up to `end` or, for a row that computes nothing but KV, of all committed
        ones. The last token is always left to feed: its logits may be wanted next."""
        known = sequence.history
        if len(sequence.committed) <= end:
            sequence.committed = ()
        elif not computes and list(sequence.committed[:end]) == known:
            known = sequence.committed
        if self._prefixes is not None and sequence.page_keys is not None:
            self._prefixes.share(sequence.table, sequence.page_keys, known, len(known) - 1)
            sequence.tokens.extend(known[end : sequence.table.length])

    def _register(self, sequence: WorkerSequence, committed: int) -> None:
        """Lets others find the pages that the sequence has filled with its first `committed` tokens."""
        if self._prefixes is not None and sequence.page_keys is not None:
            self._prefixes.register(sequence.table, sequence.page_keys, sequence.history, committed)


def open_sequence(sequence_id: int, parameters: worker_pb2.SequenceParameters) -> WorkerSequence:
    """A sequence of which nothing is held yet. Raises ValueError naming the field that is out of range."""
    if parameters.prompt_length < 1:
        raise ValueError(f"prompt_length is {parameters.prompt_length}, must be at least 1")
    return WorkerSequence(
        sequence_id,
        parameters.prompt_length,
        sampling_from_wire(parameters.sampling) if parameters.HasField("sampling") else SamplingParameters(),
        parameters.logits_digests,
        parameters.top_logprobs if parameters.HasField("top_logprobs") else None,
        committed=tuple(parameters.committed_tokens),
    )
