"""Targets of a draft worker that send whatever a test makes up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from spool.protos import draft_pb2, worker_pb2
from spool.scheduler.state.digests import DigestedTokens
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.worker.drafting.frames import FRAMES_METADATA_KEY, WELCOME
from tests.support.waiting import LONG

Message = draft_pb2.DraftRequest | bytes


def opening(grant: worker_pb2.DraftGrant, protocol_version: int = SPOKEN.newest) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(opening=draft_pb2.DraftOpening(protocol_version=protocol_version, grant=grant))


def verdict(
    committed: Sequence[int], draft_length: int = 2, sequence_id: int = 1, **changes: Any
) -> draft_pb2.DraftRequest:
    """Opens a sequence with these tokens, of which the last was sampled."""
    digested = DigestedTokens(committed)
    parameters = worker_pb2.SequenceParameters(prompt_length=len(committed) - 1, committed_tokens=committed)
    columns = {
        "sequences": [draft_pb2.DraftSequence(sequence_id=sequence_id, parameters=parameters)],
        "sequence_ids": [sequence_id],
        "lengths": [len(committed)],
        "digests": [digested.digest(len(committed))],
        "counts": [0],
        "tokens": [],
        "draft_lengths": [draft_length],
    }
    return draft_pb2.DraftRequest(**(columns | changes))


class RawTarget:
    """A stream whose messages go through the call of gRPC, or as `frames` once the first has let it in."""

    def __init__(self, address: str, first: Message, frames: bool = False) -> None:
        self._outgoing: SimpleQueue[Message | None] = SimpleQueue()
        self._channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
        method = self._channel.stream_stream(
            "/spool.draft.v1.Drafter/Propose", _bytes_of, draft_pb2.Proposals.FromString
        )
        self.call = method(iter(self._outgoing.get, None))
        self.connection: socket.socket | None = None
        self.answers: Iterator[draft_pb2.Proposals] = self.call
        self.send(first)
        if frames:
            self.connection, secret = self.connect()
            self.connection.sendall(secret)
            assert self.connection.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME
            self.answers = self._answers_from(self.connection)

    def connect(self) -> tuple[socket.socket, bytes]:
        """A connection to where the draft worker wants frames, and the secret that it wants first."""
        port, secret = dict(self.call.initial_metadata())[FRAMES_METADATA_KEY].split()
        return socket.create_connection(("127.0.0.1", int(port)), LONG), bytes.fromhex(secret)

    def send(self, *messages: Message) -> None:
        for message in messages:
            if self.connection is None:
                self._outgoing.put(message)
            else:
                data = _bytes_of(message)
                with contextlib.suppress(ConnectionError):
                    self.connection.sendall(len(data).to_bytes(4, "big") + data)

    def end(self) -> tuple[grpc.StatusCode, str]:
        """How the draft worker ends the stream, after any answers."""
        with pytest.raises(grpc.RpcError):
            for _ in self.answers:
                pass
        return self.call.code(), self.call.details()

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()
        if self.connection is not None:
            self.connection.close()

    def _answers_from(self, connection: socket.socket) -> Iterator[draft_pb2.Proposals]:
        """Ends as the call does."""
        with contextlib.suppress(ConnectionError):
            while header := connection.recv(4, socket.MSG_WAITALL):
                size = int.from_bytes(header, "big")
                yield draft_pb2.Proposals.FromString(connection.recv(size, socket.MSG_WAITALL))
        yield from self.call


def _bytes_of(message: Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
