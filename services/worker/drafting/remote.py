"""The proposer of a target that a draft worker serves."""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafting.proposer import Asked
from engine.drafting.sequence import SequenceDrafting
from engine.steps import RowOutcome, VerifyRow
from protos import draft_pb2, worker_pb2
from scheduler.messages import DraftingReport
from services.rpc.channel_security import ChannelSecurity
from services.worker.drafting.limits import MAX_DRAFT_LENGTH, MAX_OPENED_TOKENS, MAX_SEQUENCES
from services.worker.drafting.mailbox import Mailbox, RemoteSequence
from services.worker.drafting.messages import Opened, Verdict, VerdictsOfStep, answers_from_wire, verdicts_to_wire
from services.worker.drafting.stream import DraftStream, StreamOptions


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
        self._round = 0
        self._closed_ids: list[int] = []

    def set_grant(self, grant: worker_pb2.DraftGrant | None) -> None:
        """From whom proposals come, from now on."""
        if grant == self._grant:
            return
        old, self._grant = self._stream, None
        with self._mailbox.lock:
            self._stream = None
            self._mailbox.close(died=False)
        if old is not None:
            old.close()
        self._closed_ids = []
        if grant is not None:
            self._grant = worker_pb2.DraftGrant()
            self._grant.CopyFrom(grant)
            self._stream = DraftStream(self._grant, self._security, self, self._options)
            self._stream.start()

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
        return self._mailbox.take(asked, wait_seconds)

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        stream = self._stream
        with self._mailbox.lock:
            if stream is None or not self._mailbox.connected:
                return
            self._round += 1
            step = VerdictsOfStep(self._round, self._closed_ids)
            opened_tokens = 0
            for row, outcome, digest in zip(rows, outcomes, digests, strict=True):
                verdict = self._verdict(row, outcome.tokens[-1:], digest, MAX_OPENED_TOKENS - opened_tokens)
                if verdict is not None:
                    step.verdicts.append(verdict)
                    opened_tokens += verdict.length if verdict.opened is not None else 0
        if step.verdicts or step.closed_ids:
            self._closed_ids = []
            stream.send(verdicts_to_wire(step))

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

    # Called by the stream, on its thread.

    def stream_opened(self, stream: DraftStream) -> None:
        with self._mailbox.lock:
            if stream is self._stream:
                self._mailbox.open()

    def stream_lost(self, stream: DraftStream) -> None:
        with self._mailbox.lock:
            if stream is self._stream:
                self._mailbox.close(died=True)

    def proposals_came(self, stream: DraftStream, proposals: draft_pb2.Proposals) -> None:
        """Raises BadMessageError."""
        answers = answers_from_wire(proposals, self._vocabulary_size)
        with self._mailbox.lock:
            if stream is self._stream:
                self._mailbox.deliver(answers, proposals.unknown_ids, proposals.refused_ids)

    def _verdict(self, row: VerifyRow, sampled: Sequence[int], digest: int, room: int) -> Verdict | None:
        """What the draft is to hear of a row; None: nothing. At most `room` tokens are opened, but for a first one."""
        sequence_id = row.drafting.sequence_id
        known = self._mailbox.sequences.get(sequence_id)
        if not row.draft_length or (known is None and len(self._mailbox.sequences) >= MAX_SEQUENCES):
            return None
        one = known or RemoteSequence()
        length = len(row.history) + len(sampled)
        if one.refused or (not one.sent and room < min(length, MAX_OPENED_TOKENS)):
            return None
        self._mailbox.sequences[sequence_id] = one
        wanted = min(row.draft_length, MAX_DRAFT_LENGTH) if sampled else 0
        verdict = Verdict(sequence_id, length, digest, (), wanted)
        if one.sent:
            verdict.tokens = [*row.history[min(one.sent, length - 1) :], *sampled]
        else:
            tokens = [*row.history, *sampled]
            verdict.opened = Opened(row.prompt_length, row.sampling, row.drafting.cache_scope, tokens)
        one.sent = length
        one.ask(digest, wanted)
        return verdict
