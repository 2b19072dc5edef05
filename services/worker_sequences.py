"""A worker's book of sequences: which tokens each has valid KV for, on which pages. Knows no torch.

Between steps a sequence's token list and its page table have the same length: the list names the tokens whose KV is
valid. `prepare` applies the protocol's row rules and leaves the row's own tokens appended to the list, so that the list
is the row's history while the engine runs; `settle` or `revert` ends that state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.pages import PagePool, PageTable
from engine.prompt_lookup import TokenPlaces
from protos import worker_pb2
from scheduler.digests import EMPTY_DIGEST, DigestedTokens
from scheduler.messages import Role, RowStatus
from scheduler.sampling import SamplingParameters
from services.wire import sampling_from_wire


@dataclass(slots=True)
class WorkerSequence:
    """One sequence as its worker knows it."""

    sequence_id: int
    prompt_length: int
    sampling: SamplingParameters
    logits_digests: bool
    top_logprobs: int | None
    tokens: DigestedTokens = field(default_factory=DigestedTokens)
    table: PageTable = field(default_factory=PageTable)
    places: TokenPlaces = field(default_factory=TokenPlaces)

    @property
    def history(self) -> Sequence[int]:
        return self.tokens.tokens

    @property
    def digest(self) -> int:
        return self.tokens.digest(self.table.length)

    def truncate_tokens(self, length: int) -> None:
        self.tokens.truncate(length)
        self.places.truncate(length)


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

    `vocabulary_size` 0 accepts every token id.
    """

    def __init__(self, pool: PagePool, role: Role, vocabulary_size: int, max_sequence_length: int) -> None:
        self._pool = pool
        self._role = role
        self._vocabulary_size = vocabulary_size
        self._max_sequence_length = max_sequence_length
        self._sequences: dict[int, WorkerSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def prepare(self, row: worker_pb2.Row) -> WorkerSequence:
        """Checks a row, truncates its sequence to the row's `kv_len` and appends the row's tokens to its list.

        Raises RowRejectedError, with the KV state unchanged.
        """
        held = self._sequences.get(row.sequence_id)
        try:
            self._check_shape(row)
            opened = self._open(row) if row.HasField("parameters") else None
        except ValueError as error:
            raise RowRejectedError(RowStatus.INVALID, str(error), held) from error
        if held is None:
            if opened is None:
                raise RowRejectedError(RowStatus.UNKNOWN_SEQUENCE, "no parameters came for a sequence not known here")
            self._sequences[row.sequence_id] = held = opened
        elif opened is not None:
            held.prompt_length, held.sampling = opened.prompt_length, opened.sampling
            held.logits_digests, held.top_logprobs = opened.logits_digests, opened.top_logprobs
        if row.kv_len > held.table.length:
            raise RowRejectedError(
                RowStatus.KV_MISMATCH, f"kv_len is {row.kv_len}, the worker has {held.table.length}", held
            )
        if row.prefix_digest != held.tokens.digest(row.kv_len):
            raise RowRejectedError(
                RowStatus.KV_MISMATCH, f"the worker has other tokens than expected in [0, {row.kv_len})", held
            )
        self._pool.truncate(held.table, row.kv_len)
        held.truncate_tokens(row.kv_len)
        held.tokens.extend(row.tokens)
        return held

    def settle(self, sequence: WorkerSequence, computed: Sequence[int]) -> None:
        """After the engine ran: `computed` are the tokens after the row's own that have valid KV now.

        Raises RuntimeError where the page table says otherwise; the sequence is forgotten then.
        """
        sequence.tokens.extend(computed)
        if len(sequence.tokens) != sequence.table.length:
            length = sequence.table.length
            self.drop(sequence.sequence_id)
            raise RuntimeError(f"the engine left KV for {length} positions, must be {len(sequence.tokens)}")

    def revert(self, sequence: WorkerSequence, kv_len: int) -> None:
        """After the engine refused the row and changed nothing: takes the row's tokens off the list again.

        Raises RuntimeError where the page table did change; the sequence is forgotten then.
        """
        length = sequence.table.length
        if length != kv_len:
            self.drop(sequence.sequence_id)
            raise RuntimeError(f"the engine refused a row but moved its KV from {kv_len} to {length}")
        sequence.truncate_tokens(kv_len)

    def drop(self, sequence_id: int) -> None:
        """Forgets a sequence and frees its pages; an unknown one is no error."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._pool.free(sequence.table)

    def release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self.drop(sequence_id)

    def drop_all(self) -> None:
        self.release(list(self._sequences))

    def check_integrity(self) -> None:
        """To be called between steps. Raises RuntimeError where tokens, tables and pages do not agree."""
        for sequence in self._sequences.values():
            if len(sequence.tokens) != sequence.table.length:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} has {len(sequence.tokens)} tokens "
                    f"and KV for {sequence.table.length}"
                )
        self._pool.check_conservation([sequence.table for sequence in self._sequences.values()])

    def _open(self, row: worker_pb2.Row) -> WorkerSequence:
        parameters = row.parameters
        if parameters.prompt_length < 1:
            raise ValueError(f"prompt_length is {parameters.prompt_length}, must be at least 1")
        return WorkerSequence(
            row.sequence_id,
            parameters.prompt_length,
            sampling_from_wire(parameters.sampling) if parameters.HasField("sampling") else SamplingParameters(),
            parameters.logits_digests,
            parameters.top_logprobs if parameters.HasField("top_logprobs") else None,
        )

    def _check_shape(self, row: worker_pb2.Row) -> None:
        """What can be said of a row without its sequence. Raises ValueError."""
        if not row.tokens:
            raise ValueError("tokens is empty, must hold at least one token to feed")
        if self._role is Role.DRAFT:
            if row.draft_tokens or row.choose:
                raise ValueError("draft_tokens and choose are for target workers, this is a draft worker")
            behind = max(row.draft_length - 1, 0)
        else:
            if row.draft_length:
                raise ValueError(f"draft_length is {row.draft_length}, must be 0 on a target worker")
            if row.draft_tokens and not row.choose:
                raise ValueError("draft_tokens came without choose, nothing would verify them")
            behind = len(row.draft_tokens)
        length = row.kv_len + len(row.tokens) + behind
        if length > self._max_sequence_length:
            raise ValueError(f"the row would reach {length} tokens, must be at most {self._max_sequence_length}")
        if self._vocabulary_size:
            for name, tokens in (("tokens", row.tokens), ("draft_tokens", row.draft_tokens)):
                largest = max(tokens, default=0)
                if largest >= self._vocabulary_size:
                    raise ValueError(f"{name} holds {largest}, must be below vocabulary_size {self._vocabulary_size}")
