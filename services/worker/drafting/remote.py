"""The proposer of a target that a draft worker serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from spool.engine.drafting.proposer import Asked
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.steps import RowOutcome, VerifyRow
from spool.protos import draft_pb2, worker_pb2
from spool.scheduler.messages import DraftingReport
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.conversion import to_wire
from spool.services.worker.drafting.limits import MAX_DRAFT_LENGTH, MAX_OPENED_TOKENS, MAX_SEQUENCES
from spool.services.worker.drafting.mailbox import Mailbox, RemoteSequence
from spool.services.worker.drafting.stream import DraftStream, StreamOptions


@dataclass(slots=True)
class _Asked:
    """A place in the columns of a request; `tokens` and `opening` are what the draft has not heard yet."""

    sequence_id: int
    length: int
    digest: int
    tokens: Sequence[int]
    draft_length: int
    opening: draft_pb2.DraftSequence | None = None


class RemoteProposer:
    """A `Proposer` that sends verdicts to the draft worker of the latest grant, and finds its proposals in a mailbox.

    Without a grant, without a stream, and for sequences that the draft refuses, there are no proposals. Every token id
    of a proposal is below `vocabulary_size`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        security: ChannelSecurity | None = None,
        options: StreamOptions | None = None,
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._security = security or ChannelSecurity()
        self._options = options or StreamOptions()
        self._mailbox = Mailbox()
        self._grant: worker_pb2.DraftGrant | None = None
        self._stream: DraftStream | None = None
        self._closed_ids: list[int] = []
        self._took = 0.0
        """When the step had its proposals; 0: it asked for none."""

    def set_grant(self, grant: worker_pb2.DraftGrant | None) -> None:
        """From whom proposals come, from now on."""
        if grant == self._grant:
            return
        if self._stream is not None:
            self._stream.close()
        self._grant, self._stream, self._closed_ids = None, None, []
        if grant is not None:
            with self._mailbox.lock:
                self._mailbox.granted()
            self._grant = worker_pb2.DraftGrant()
            self._grant.CopyFrom(grant)
            self._stream = DraftStream(self._grant, self._vocabulary_size, self._security, self._mailbox, self._options)

    def close(self) -> None:
        """Ends the stream, and waits for its thread."""
        stream = self._stream
        self.set_grant(None)
        if stream is not None:
            stream.join()

    @property
    def connected(self) -> bool:
        """Whether the draft worker of the grant has let this target in."""
        return self._mailbox.connected

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        taken = self._mailbox.take(asked, wait_seconds)
        self._took = time.monotonic()
        return taken

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        stream, room = self._stream, MAX_OPENED_TOKENS
        took, self._took = self._took, 0.0
        asked: list[_Asked] = []
        with self._mailbox.lock:
            if stream is None or not self._mailbox.connected:
                return
            for row, outcome, digest in zip(rows, outcomes, digests, strict=True):
                one = self._ask(row, outcome.tokens[-1:], digest, room)
                if one is not None:
                    asked.append(one)
                    room -= one.length if one.opening is not None else 0
        if asked or self._closed_ids:
            self._mailbox.asked_at = time.monotonic()
            request = draft_pb2.DraftRequest(
                closed_ids=self._closed_ids,
                sequences=[one.opening for one in asked if one.opening is not None],
                sequence_ids=[one.sequence_id for one in asked],
                lengths=[one.length for one in asked],
                digests=[one.digest for one in asked],
                counts=[len(one.tokens) for one in asked],
                tokens=[token for one in asked for token in one.tokens],
                draft_lengths=[one.draft_length for one in asked],
                step_seconds=time.monotonic() - took if took else 0.0,
            )
            self._closed_ids = []
            stream.send(request)

    def forget(self, drafting: SequenceDrafting) -> None:
        with self._mailbox.lock:
            one = self._mailbox.sequences.pop(drafting.sequence_id, None)
        if one is not None and one.sent:
            self._closed_ids.append(drafting.sequence_id)

    def report(self) -> DraftingReport | None:
        stream = self._stream
        if stream is None:
            return None
        return self._mailbox.report(self._mailbox.connected or not stream.failed)

    def _ask(self, row: VerifyRow, sampled: Sequence[int], digest: int, room: int) -> _Asked | None:
        """What the draft is to hear of a row; None: nothing. At most `room` tokens are opened, but for a first one."""
        sequence_id = row.drafting.sequence_id
        known = self._mailbox.sequences.get(sequence_id)
        if not row.draft_length or (known is None and len(self._mailbox.sequences) >= MAX_SEQUENCES):
            return None
        one = known or RemoteSequence()
        length, sent = len(row.history) + len(sampled), one.sent
        if one.refused or (not sent and room < min(length, MAX_OPENED_TOKENS)):
            return None
        self._mailbox.sequences[sequence_id] = one
        wanted = min(row.draft_length, MAX_DRAFT_LENGTH) if sampled and self._mailbox.patience.left else 0
        asked = _Asked(sequence_id, length, digest, (), wanted)
        if not sent:
            parameters = to_wire(
                worker_pb2.SequenceParameters,
                prompt_length=row.prompt_length,
                sampling=row.sampling,
                cache_scope=row.drafting.cache_scope,
                committed_tokens=[*row.history, *sampled],
            )
            asked.opening = draft_pb2.DraftSequence(sequence_id=sequence_id, parameters=parameters)
        else:
            asked.tokens = [*row.history[min(sent, length - 1) :], *sampled]
            # With more to read than a round commits, the draft must catch up first.
            one.met = one.met and len(asked.tokens) <= MAX_DRAFT_LENGTH + 1
        one.sent = length
        one.ask(digest, wanted)
        return asked
