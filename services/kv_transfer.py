"""A worker's part in moving KV: reads pages of its sequences for others, and takes in sequences with their pages.

Everything here runs on the thread that computes, between steps, some pages at a time. What arrives is written to pages
set aside for it, and counts only when all of it is there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from engine.kv_store import KvStore, PageLayout
from protos import worker_pb2
from scheduler.messages import RowStatus
from services.worker_sequences import RowRejectedError, WorkerSequence, WorkerSequences, open_sequence

# KV read or written between two steps at most; a step waits for that long.
_BYTES_AT_ONCE = 32 << 20

_CODES = {
    RowStatus.UNKNOWN_SEQUENCE: "NOT_FOUND",
    RowStatus.KV_MISMATCH: "FAILED_PRECONDITION",
    RowStatus.OUT_OF_PAGES: "RESOURCE_EXHAUSTED",
    RowStatus.INVALID: "INVALID_ARGUMENT",
}


class KvTransferError(Exception):
    """KV that cannot be given or taken, and why; `code` names a status of gRPC."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WrongEpochError(Exception):
    """Another start of the worker was meant, or another scheduler has it."""


class KvTransfer:
    """Of one worker. Without a `store` it refuses; `check_epochs` raises WrongEpochError for epochs that are over."""

    def __init__(self, book: WorkerSequences, store: KvStore | None, check_epochs: Callable[[int, int], None]) -> None:
        self._book = book
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
            numerics=layout.numerics,
        )

    def read(self, request: worker_pb2.ExportKvRequest, first: int) -> list[worker_pb2.KvPage]:
        """The pages from `first` on, as many as are read at once; none past the last. Raises KvTransferError."""
        pages = self._given(request).table.pages[first : first + self.pages_at_once]
        contents = [self._pages().read_page(page) for page in pages]
        return [
            worker_pb2.KvPage(index=first + place, data=data, checksum=zlib.crc32(data))
            for place, data in enumerate(contents)
        ]

    def _given(self, request: worker_pb2.ExportKvRequest) -> WorkerSequence:
        try:
            self._check_epochs(request.worker_epoch, request.scheduler_epoch)
            return self._book.held(request.sequence_id, request.kv_len, request.prefix_digest)
        except (WrongEpochError, RowRejectedError) as error:
            raise _refusal(error) from error

    # Taking.

    def expect(self, request: worker_pb2.ImportKvRequest) -> WorkerSequence:
        """Sets pages aside for what is to come; `adopt` or `give_up` must follow. Raises KvTransferError."""
        self._pages()
        try:
            self._check_epochs(request.worker_epoch, request.scheduler_epoch)
            sequence = open_sequence(request.sequence_id, request.parameters)
            sequence.tokens.extend(request.tokens)
            self._book.expect(sequence)
        except (WrongEpochError, RowRejectedError, ValueError) as error:
            raise _refusal(error) from error
        return sequence

    def check_header(self, sequence: WorkerSequence, header: worker_pb2.KvHeader) -> None:
        """Raises KvTransferError where pages that are to come do not fit this worker's."""
        layout = self.layout
        for name, theirs, ours in (
            ("model_id", header.model_id, layout.model_id),
            ("dtype", header.dtype, layout.dtype),
            ("page_shape", tuple(header.page_shape), layout.shape),
            ("numerics", header.numerics.hex(), layout.numerics.hex()),
            ("pages", header.pages, len(sequence.table.pages)),
        ):
            if theirs != ours:
                raise KvTransferError("FAILED_PRECONDITION", f"{name} of the KV to come is {theirs}, must be {ours}")

    def write(self, sequence: WorkerSequence, parts: list[worker_pb2.KvPage]) -> None:
        """Raises KvTransferError where the sequence is not expected any more, or a page is damaged."""
        if not self._book.expects(sequence):
            raise KvTransferError("ABORTED", f"sequence {sequence.sequence_id} is not expected any more")
        for part in parts:
            if zlib.crc32(part.data) != part.checksum:
                raise KvTransferError("DATA_LOSS", f"page {part.index}: its checksum is not that sent")
            try:
                self._pages().write_page(sequence.table.pages[part.index], part.data)
            except ValueError as error:
                raise KvTransferError("DATA_LOSS", f"page {part.index}: {error}") from error

    def adopt(self, request: worker_pb2.ImportKvRequest, sequence: WorkerSequence) -> None:
        """All pages are written: from here on the sequence is the worker's. Raises KvTransferError."""
        try:
            self._check_epochs(request.worker_epoch, request.scheduler_epoch)
            self._book.adopt(sequence)
        except (WrongEpochError, RowRejectedError) as error:
            raise _refusal(error) from error

    def give_up(self, sequence: WorkerSequence) -> None:
        """Frees what was set aside. No effect on a sequence that a step has asked for since."""
        self._book.give_up(sequence)

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
