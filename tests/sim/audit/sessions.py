"""Both ends of the sessions between gateways and a scheduler: leases, and each token of a sequence once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from spool.protos import scheduler_pb2
from tests.sim.audit.books import CommittedTokens, digest_of, digests_after

_SLACK = 1e-3

_UNREFUSABLE = (scheduler_pb2.REFUSAL_CAUSE_QUEUE_FULL, scheduler_pb2.REFUSAL_CAUSE_KEY_LIMIT)


class _Sequence:
    """One submission, as its scheduler knows it."""

    def __init__(self, submission: scheduler_pb2.SequenceSubmission, now: float) -> None:
        self.submission = submission
        self.prompt = digest_of(submission.prompt)
        self.digest = digest_of([*submission.prompt, *submission.committed_output])
        self.length = len(submission.committed_output)
        self.last: int | None = submission.committed_output[-1] if submission.committed_output else None
        self.arrived = now
        self.admitted = False
        self.delivered = False
        self.cancelled = False
        self.ended = False
        self.wanted = True


class _Session:
    def __init__(self, now: float) -> None:
        self.sequences: dict[int, _Sequence] = {}
        self.version: int | None = None
        self.lease: float | None = None
        self.heard = self.spoke = now


class SchedulerSessions:
    """The scheduler's ends of its sessions. `reached` holds the digests of all lists of committed tokens that targets
    have made."""

    def __init__(self, name: str, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self.reached: set[int] = set()
        self.fenced_at: float | None = None
        self._name = name
        self._clock = clock
        self._tell = problem
        self._sessions: dict[Any, _Session] = {}
        # By the digests of prompts.
        self._wanted: Counter[int] = Counter()
        self._unwanted_since: dict[int, float] = {}
        self._expected: dict[int, set[tuple[int, ...]]] = {}

    def _problem(self, text: str) -> None:
        self._tell(f"{self._name}: {text}")

    def wants(self, sequence: CommittedTokens) -> bool:
        """Whether some session has a sequence with this prompt, as far as the prompt is known."""
        prompt = sequence.digests.get(sequence.prompt_length)
        if prompt is None or self._wanted[prompt]:
            return True
        return self._unwanted_since.get(prompt, 0.0) >= self._clock() - _SLACK

    def read(self, call: Any, request: scheduler_pb2.SessionRequest) -> None:
        now = self._clock()
        session = self._sessions.get(call)
        if session is None:
            session = self._sessions[call] = _Session(now)
            session.version = request.opening.protocol_version
        session.heard = now
        for request_id in request.cancelled_request_ids:
            sequence = session.sequences.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
                self._release(sequence)
        for submission in request.submissions:
            sequence = session.sequences[submission.request_id] = _Sequence(submission, now)
            self._wanted[sequence.prompt] += 1
            self._expected.setdefault(sequence.prompt, set()).add(tuple(submission.expected_output))

    def expects(self, sequence: CommittedTokens, output: tuple[int, ...]) -> bool:
        """Whether some session has submitted a sequence with this prompt and expected this output, or none."""
        return output in self._expected.get(sequence.digests.get(sequence.prompt_length, 0), set())

    def wrote(self, call: Any, reply: scheduler_pb2.SessionReply) -> None:
        session, now = self._sessions.get(call), self._clock()
        if session is None:
            self._problem("speaks first in a session")
            return
        if (session.lease is None) != reply.HasField("opened"):
            self._problem("says not once, with its first message, that a session is open")
        if reply.HasField("opened"):
            session.lease = reply.opened.lease_seconds
            if reply.opened.protocol_version != session.version:
                self._problem(f"opens a session with a gateway that speaks version {session.version}")
        elif session.lease is not None:
            if now > session.heard + session.lease + _SLACK:
                self._problem(f"speaks in a session {now - session.heard:.3f} s after the gateway was last heard")
            if now > session.spoke + session.lease / 3 + _SLACK:
                self._problem(f"was silent in a session for {now - session.spoke:.3f} s")
        session.spoke = now
        if reply.events and self.fenced_at is not None and now > self.fenced_at + _SLACK:
            self._problem("has news for a gateway, although it has been fenced off")
        told = set()
        for event in reply.events:
            if event.request_id in told:
                self._problem(f"a message has two events of request {event.request_id}")
            told.add(event.request_id)
            self._check(session.sequences.get(event.request_id), event, now)

    def _check(self, sequence: _Sequence | None, event: scheduler_pb2.SequenceEvent, now: float) -> None:
        name = f"request {event.request_id}"
        if sequence is None or sequence.ended:
            self._problem(f"{name} gets an event {'after its end' if sequence is not None else 'unasked'}")
            return
        submission = sequence.submission
        sequence.admitted |= event.admitted
        if event.tokens:
            self._check_tokens(name, sequence, event, now)
        end = event.WhichOneof("end")
        if end is None:
            return
        sequence.ended = True
        self._release(sequence)
        if end == "refused":
            unrefusable = submission.admitted_before and event.refused.cause in _UNREFUSABLE
            if sequence.admitted or event.tokens or unrefusable:
                self._problem(f"{name} is refused, although it was admitted before")
        elif end == "finished":
            self._check_finish(name, sequence, event.finished)
        elif event.failed.cause == scheduler_pb2.FAILURE_CAUSE_DEADLINE_EXCEEDED:
            left = sequence.arrived + submission.timeout_seconds - now
            if not submission.HasField("timeout_seconds") or left > _SLACK:
                self._problem(f"{name} fails for its deadline {left:.3f} s before it")

    def _check_tokens(self, name: str, sequence: _Sequence, event: scheduler_pb2.SequenceEvent, now: float) -> None:
        submission, tokens = sequence.submission, list(event.tokens)
        if not sequence.admitted:
            self._problem(f"{name} gets tokens, and was not admitted")
        if sequence.last in submission.stop_token_ids or set(tokens[:-1]) & set(submission.stop_token_ids):
            self._problem(f"{name} goes on after a stop token")
        sequence.length += len(tokens)
        sequence.last = tokens[-1]
        if sequence.length > submission.max_tokens:
            self._problem(f"{name} has {sequence.length} tokens, asked for were {submission.max_tokens}")
        if not event.accepted <= min(event.drafted, len(tokens)):
            self._problem(f"{name}: of {event.drafted} drafted tokens {event.accepted} became {len(tokens)}")
        if event.logprobs and len(event.logprobs) != len(tokens):
            self._problem(f"{name}: {len(event.logprobs)} log probabilities come with {len(tokens)} tokens")
        scores = len(submission.prompt) - 1 if submission.HasField("prompt_logprobs") else 0
        expected = 0 if sequence.delivered or submission.committed_output else scores
        if len(event.prompt_logprobs) != expected:
            self._problem(f"{name}: {len(event.prompt_logprobs)} log probabilities of the prompt, must be {expected}")
        sequence.delivered = True
        if submission.HasField("timeout_seconds") and now > sequence.arrived + submission.timeout_seconds + _SLACK:
            self._problem(f"{name} gets tokens after its deadline")
        sequence.digest = digests_after(sequence.digest, tokens)[-1]
        if sequence.digest not in self.reached:
            before = sequence.length - len(tokens)
            self._problem(f"{name} gets {tokens} after {before} others, which no target has made")

    def _check_finish(self, name: str, sequence: _Sequence, end: int) -> None:
        submission = sequence.submission
        match end:
            case scheduler_pb2.SEQUENCE_END_STOP:
                right = sequence.last in submission.stop_token_ids
            case scheduler_pb2.SEQUENCE_END_LENGTH:
                right = sequence.length == submission.max_tokens
            case scheduler_pb2.SEQUENCE_END_CANCELLED:
                right = sequence.cancelled
            case _:
                right = False
        if not right:
            self._problem(f"{name} ends after {sequence.length} tokens with reason {end}")

    def ended(self, call: Any) -> None:
        """However that came: nobody waits for its sequences any more."""
        session = self._sessions.pop(call, None)
        for sequence in session.sequences.values() if session is not None else ():
            self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        if sequence.wanted:
            sequence.wanted = False
            self._wanted[sequence.prompt] -= 1
            self._unwanted_since[sequence.prompt] = self._clock()


class _Stream:
    """One sequence, as its gateway knows it, over all sessions."""

    def __init__(self, submission: scheduler_pb2.SequenceSubmission, now: float) -> None:
        self.submission = submission
        self.output: list[int] = []
        self.admitted = False
        self.ended = False
        self.session: Any = None
        self.submitted = now


class GatewayAudit:
    """One gateway's ends of its sessions, one after the other."""

    def __init__(self, name: str, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self._name = name
        self._clock = clock
        self._tell = problem
        self._streams: dict[int, _Stream] = {}
        self._opened: dict[Any, float | None] = {}
        """The lease of each session, once that is known."""
        self._spoke: dict[Any, float] = {}

    def _problem(self, text: str) -> None:
        self._tell(f"{self._name}: {text}")

    def wrote(self, call: Any, request: scheduler_pb2.SessionRequest) -> None:
        now = self._clock()
        first = call not in self._spoke
        if request.HasField("opening") != first:
            self._problem("opens a session not once, with its first message")
        lease = self._opened.setdefault(call, None)
        if lease is not None and now > self._spoke[call] + lease / 3 + _SLACK:
            self._problem(f"was silent in a session for {now - self._spoke[call]:.3f} s")
        self._spoke[call] = now
        for request_id in request.cancelled_request_ids:
            if request_id in self._streams:
                self._streams[request_id].ended = True
        for submission in request.submissions:
            self._submits(call, submission, now)

    def _submits(self, call: Any, submission: scheduler_pb2.SequenceSubmission, now: float) -> None:
        name = f"request {submission.request_id}"
        stream = self._streams.get(submission.request_id)
        if stream is None:
            stream = self._streams[submission.request_id] = _Stream(submission, now)
            if submission.committed_output or submission.admitted_before:
                self._problem(f"{name} is said to have been submitted before")
        else:
            self._check_again(name, call, stream, submission, now)
        stream.session = call

    def _check_again(
        self, name: str, call: Any, stream: _Stream, again: scheduler_pb2.SequenceSubmission, now: float
    ) -> None:
        if stream.session is call or stream.ended:
            self._problem(f"{name} is submitted again {'after its end' if stream.ended else 'in its session'}")
        if list(again.committed_output) != stream.output:
            self._problem(f"{name} is submitted with {list(again.committed_output)}, received was {stream.output}")
        if again.admitted_before != stream.admitted:
            self._problem(f"{name} is submitted with admitted_before {again.admitted_before}")
        first = stream.submission
        if first.HasField("timeout_seconds"):
            left = max(first.timeout_seconds - (now - stream.submitted), 0.0)
            if abs(again.timeout_seconds - left) > 2 * _SLACK:
                self._problem(f"{name} is submitted with {again.timeout_seconds:.3f} s left, must be {left:.3f}")
        if _lasting(first) != _lasting(again):
            self._problem(f"{name} asks for other things than it did before")

    def read(self, call: Any, reply: scheduler_pb2.SessionReply) -> None:
        if reply.HasField("opened"):
            self._opened[call] = reply.opened.lease_seconds
            self._spoke[call] = self._clock()  # it has not known before how long it may be silent
        for event in reply.events:
            stream = self._streams.get(event.request_id)
            if stream is None or stream.ended or stream.session is not call:
                continue
            stream.admitted |= event.admitted
            stream.output.extend(event.tokens)
            stream.ended = event.WhichOneof("end") is not None


def _lasting(submission: scheduler_pb2.SequenceSubmission) -> scheduler_pb2.SequenceSubmission:
    """What is the same in every session."""
    lasting = scheduler_pb2.SequenceSubmission()
    lasting.CopyFrom(submission)
    for name in ("committed_output", "admitted_before", "timeout_seconds", "suspicion", "fingerprint"):
        lasting.ClearField(name)
    return lasting
