"""A worker's part in moving KV: reads pages of its sequences for other workers, and takes in sequences with pages.

Everything here runs on the thread that computes, between steps, some pages at a time. Pages that arrive are written to
pages set aside for them; the sequence becomes the worker's only when all of them are there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from spool.engine.kv.kv_store import KvStore, PageLayout
from spool.protos import worker_pb2
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import RowStatus
from spool.services.worker.sequences import RowRejectedError, WorkerSequence, WorkerSequences, open_sequence

# At most so much KV is read or written between two steps; the next step waits meanwhile.
_BYTES_AT_ONCE = 32 << 20

_CODES = {
    RowStatus.UNKNOWN_SEQUENCE: "NOT_FOUND",
    RowStatus.KV_MISMATCH: "FAILED_PRECONDITION",
    RowStatus.OUT_OF_PAGES: "RESOURCE_EXHAUSTED",
    RowStatus.INVALID: "INVALID_ARGUMENT",
}


class KvTransferError(SpoolError):
    """KV cannot be given or taken; the message says why, `code` names a status of gRPC."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WrongEpochError(SpoolError):
    """The request is for another start of the worker, or comes from a scheduler that does not have the worker now."""


class KvTransfer:
    """Reads and writes the KV of one worker's sequences; without a `store` every request is refused.

    `check_epochs` raises WrongEpochError for a worker epoch and a scheduler epoch that are not the present ones.
    """

    def __init__(
        self, sequences: WorkerSequences, store: KvStore | None, check_epochs: Callable[[int, int], None]
    ) -> None:
        self._sequences = sequences
        self._store = store
        self._check_epochs = check_epochs

    @property
    def layout(self) -> PageLayout:
        return self._pages().layout

    @property
    def pages_at_once(self) -> int:
        return max(1, _BYTES_AT_ONCE // self.layout.page_bytes)

    # Giving.

    def header(self, request: worker_pb2.ExportKvRequest) -> worker_pb2.KvHeader:
        """Raises KvTransferError."""
        layout = self.layout
        return worker_pb2.KvHeader(
            model_id=layout.model_id,
            dtype=layout.dtype,
            page_shape=layout.shape,
            pages=len(self._given(request).table.pages),
            compute_digest=layout.compute_digest,
            tensor_parallel_size=layout.ranks,
        )

    def read(self, request: worker_pb2.ExportKvRequest, first: int) -> list[worker_pb2.KvPage]:
        """The pages from `first` on, at most `pages_at_once`; empty past the last page. Raises KvTransferError."""
        pages = self._given(request).table.pages[first : first + self.pages_at_once]
        contents = self._pages().read_pages(pages) if pages else []
        return [
            worker_pb2.KvPage(index=first + place, data=data, checksum=zlib.crc32(data))
            for place, data in enumerate(contents)
        ]

    def _given(self, request: worker_pb2.ExportKvRequest) -> WorkerSequence:
        try:
            self._check_epochs(request.worker_epoch, request.scheduler_epoch)
            return self._sequences.held(request.sequence_id, request.kv_len, request.prefix_digest)
        except (WrongEpochError, RowRejectedError) as error:
            raise _refusal(error) from error

    # Taking.

    def expect(self, request: worker_pb2.ImportKvRequest) -> WorkerSequence:
        """Sets pages aside for a sequence; `adopt` or `give_up` must follow. Raises KvTransferError."""
        self._pages()
        try:
            self._check_epochs(request.worker_epoch, request.scheduler_epoch)
            sequence = open_sequence(request.sequence_id, request.parameters)
            sequence.known.extend(request.tokens)
            self._sequences.expect(sequence)
        except (WrongEpochError, RowRejectedError, ValueError) as error:
            raise _refusal(error) from error
        return sequence

    def check_header(self, sequence: WorkerSequence, header: worker_pb2.KvHeader) -> None:
        """Raises KvTransferError where the pages to come do not fit this worker's."""
        layout = self.layout
        for name, theirs, ours in (
            ("model_id", header.model_id, layout.model_id),
            ("dtype", header.dtype, layout.dtype),
            ("tensor_parallel_size", header.tensor_parallel_size or 1, layout.ranks),
            ("page_shape", tuple(header.page_shape), layout.shape),
            ("compute_digest", header.compute_digest.hex(), layout.compute_digest.hex()),
            ("pages", header.pages, len(sequence.table.pages)),
        ):
            if theirs != ours:
                raise KvTransferError("FAILED_PRECONDITION", f"{name} of the KV to come is {theirs}, must be {ours}")

    def write(self, sequence: WorkerSequence, parts: list[worker_pb2.KvPage]) -> None:
        """Raises KvTransferError where the sequence is not expected any more, or a page is damaged."""
        if not self._sequences.expects(sequence):
            raise KvTransferError("ABORTED", f"sequence {sequence.sequence_id} is not expected any more")
        for part in parts:
            if zlib.crc32(part.data) != part.checksum:
                raise KvTransferError("DATA_LOSS", f"page {part.index}: its checksum is not that sent")
        pages = [sequence.table.pages[part.index] for part in parts]
        try:
            self._pages().write_pages(pages, [part.data for part in parts])
        except ValueError as error:
            raise KvTransferError("DATA_LOSS", f"from page {parts[0].index} on: {error}") from error

    def adopt(self, request: worker_pb2.ImportKvRequest, sequence: WorkerSequence) -> None:
        """Makes the sequence the worker's own; all its pages have been written. Raises KvTransferError."""
        try:
            self._check_epochs(request.worker_epoch, request.scheduler_epoch)
            self._sequences.adopt(sequence)
        except (WrongEpochError, RowRejectedError) as error:
            raise _refusal(error) from error

    def give_up(self, sequence: WorkerSequence) -> None:
        """Frees the pages that were set aside. No effect on a sequence for which a row has come since."""
        self._sequences.give_up(sequence)

    def _pages(self) -> KvStore:
        if self._store is None:
            raise KvTransferError("UNIMPLEMENTED", "this worker keeps no KV that could be moved")
        return self._store


def _refusal(error: Exception) -> KvTransferError:
    if isinstance(error, WrongEpochError):
        code = "FAILED_PRECONDITION"
    elif isinstance(error, RowRejectedError):
        code = _CODES[error.status]
    else:
        code = "INVALID_ARGUMENT"
    return KvTransferError(code, str(error))
