"""What a target and a draft worker owe each other: judged by their messages, and by what passes were seen to verify."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from spool.protos import draft_pb2, worker_pb2
from tests.sim.audit.books import digest_of

_SLACK = 1e-3
MOST_PROPOSED = 64
"""Tokens of one proposal."""

Columns = list[tuple[int, int, list[int]]]
"""Of proposals: sequence, digest of the prefix, tokens."""


def columns_of(proposals: draft_pb2.Proposals) -> Columns | None:
    """None where columns do not fit each other."""
    ids, digests, counts, tokens = proposals.sequence_ids, proposals.digests, proposals.counts, proposals.tokens
    if not len(ids) == len(digests) == len(counts) or sum(counts) != len(tokens):
        return None
    ends = list(accumulate(counts))
    return [
        (one, digest, list(tokens[end - count : end]))
        for one, digest, count, end in zip(ids, digests, counts, ends, strict=True)
    ]


class ProposalAudit:
    """One start of a target: where that which it verifies has come from, and what it asks a draft worker.

    `description` is what the target says of itself.
    """

    def __init__(self, problem: Callable[[str], None]) -> None:
        self.description: worker_pb2.WorkerDescription | None = None
        self._problem = problem
        self._parameters: dict[int, worker_pb2.SequenceParameters] = {}
        self._told: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
        """Proposals that have come, by sequence and digest of the prefix."""
        self._verified: dict[tuple[int, int], list[int]] = {}
        self._grants: list[worker_pb2.DraftGrant] = []
        self._streams: dict[Any, _Asking] = {}

    def asked(self, request: worker_pb2.StepRequest) -> None:
        """A step has come."""
        if request.HasField("grant"):
            if self.description is not None and self.description.own_draft_id:
                self._problem(f"step {request.step_id} grants a draft worker to a target that proposes itself")
            if request.grant not in self._grants:
                self._grants.append(request.grant)
        for row in request.rows:
            if row.HasField("parameters"):
                self.opened(row.sequence_id, row.parameters)

    def opened(self, sequence_id: int, parameters: worker_pb2.SequenceParameters) -> None:
        self._parameters[sequence_id] = parameters

    def computes(self, sequence_id: int, history: Sequence[int], drafted: Sequence[int]) -> None:
        """A pass verifies these tokens behind the history."""
        digest = digest_of(history)
        self._verified[sequence_id, digest] = list(drafted)
        if not drafted:
            return
        what = f"verifies {list(drafted)} of sequence {sequence_id} behind {len(history)} tokens"
        description, parameters = self.description, self._parameters.get(sequence_id)
        if description is not None and max(drafted) >= description.vocabulary_size:
            self._problem(f"{what}, of {description.vocabulary_size} that there are")
        if parameters is not None:
            place = len(history) - parameters.prompt_length
            if list(parameters.expected_output[place : place + len(drafted)]) == list(drafted):
                return
        if description is not None and description.own_draft_id:
            return
        proposals = self._told[sequence_id, digest]
        if not any(one[: len(drafted)] == tuple(drafted) for one in proposals):
            self._problem(f"{what}; proposed were {sorted(proposals)}")

    def verified(self, sequence_id: int, digest: int) -> Sequence[int]:
        return self._verified.get((sequence_id, digest), ())

    def hears(self, proposals: draft_pb2.Proposals | None) -> None:
        """Of a draft worker."""
        for sequence_id, digest, tokens in columns_of(proposals) or [] if proposals is not None else []:
            self._told[sequence_id, digest].add(tuple(tokens))

    def asks(self, call: Any, request: draft_pb2.DraftRequest) -> None:
        """A draft worker."""
        asking = self._streams.get(call)
        if asking is None:
            asking = self._streams[call] = _Asking()
            if request.opening.grant not in self._grants:
                self._problem(f"asks {call.address} with grant {request.opening.grant}, which it was not given")
            elif call.address != request.opening.grant.address:
                self._problem(f"asks {call.address} with a grant for {request.opening.grant.address}")
        elif request.HasField("opening"):
            self._problem(f"opens its stream to {call.address} twice")
        problem = asking.take(request)
        if problem is not None:
            self._problem(f"a request to {call.address}: {problem}")


class _Asking:
    """One stream of requests, and the tokens of its sequences as they tell of them."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def take(self, request: draft_pb2.DraftRequest) -> str | None:
        """Returns what is wrong with it."""
        for one in request.closed_ids:
            self._tokens.pop(one, None)
        for opening in request.sequences:
            self._tokens[opening.sequence_id] = list(opening.parameters.committed_tokens)
        ids, counts, wanted = request.sequence_ids, request.counts, request.draft_lengths
        if not len(ids) == len(request.lengths) == len(request.digests) == len(counts) == len(wanted):
            return "has columns that do not fit each other"
        if sum(counts) != len(request.tokens) or len(set(ids)) < len(ids):
            return f"has {len(request.tokens)} tokens for counts {list(counts)}, of sequences {list(ids)}"
        if missing := {one.sequence_id for one in request.sequences} - set(ids):
            return f"opens {sorted(missing)}, and asks nothing of them"
        first = 0
        for one, length, digest, count, most in zip(ids, request.lengths, request.digests, counts, wanted, strict=True):
            tokens = self._tokens.get(one)
            if tokens is None:
                return f"names sequence {one}, which was never opened"
            if not 0 <= length - count <= len(tokens):
                return f"goes on at {length - count} of sequence {one}, of which {len(tokens)} tokens were told"
            tokens[length - count :] = request.tokens[first : first + count]
            first += count
            if digest_of(tokens) != digest:
                return f"has digest {digest} for sequence {one}, it has other tokens"
            if most > MOST_PROPOSED:
                return f"asks for {most} tokens of sequence {one}"
        return None


class DraftAudit:
    """One start of a draft worker."""

    def __init__(self, name: str, clock: Callable[[], float], problem: Callable[[str], None]) -> None:
        self._clock = clock
        self._problem = lambda text: problem(f"{name}: {text}")
        self._epoch: int | None = None
        self._streams: dict[Any, tuple[worker_pb2.DraftGrant, dict[tuple[int, int], int]]] = {}
        """The grant of each, and how many tokens were to be proposed, by sequence and digest."""
        self._highest: dict[str, tuple[tuple[int, int], float]] = {}
        """The highest grant of each target, and when it came."""

    def described(self, description: worker_pb2.WorkerDescription) -> None:
        self._epoch = description.worker_epoch

    def reads(self, call: Any, request: draft_pb2.DraftRequest) -> None:
        stream = self._streams.get(call)
        if stream is None:
            grant = request.opening.grant
            stream = self._streams[call] = (grant, {})
            number, highest = _number(grant), self._highest.get(grant.target_id, ((0, 0), 0.0))[0]
            if grant.draft_epoch == self._epoch and number > highest:
                self._highest[grant.target_id] = (number, self._clock())
        # What is wrong with it is told where it was written. Others may have overtaken it, or got lost.
        for one in zip(request.sequence_ids, request.digests, request.draft_lengths, strict=True):
            stream[1][one[:2]] = max(one[2], stream[1].get(one[:2], 0))

    def admits(self, call: Any) -> None:
        """A target, which may ask for proposals from then on."""
        stream = self._streams.get(call)
        if stream is None:
            self._problem("lets in a target that has not said who it is")
        else:
            self._check_grant(f"lets {stream[0].target_id} in", stream[0])

    def _check_grant(self, what: str, grant: worker_pb2.DraftGrant) -> None:
        if self._epoch is not None and grant.draft_epoch != self._epoch:
            self._problem(f"{what}, whose grant is for epoch {grant.draft_epoch}")
        highest, since = self._highest.get(grant.target_id, ((0, 0), 0.0))
        if _number(grant) < highest and self._clock() > since + _SLACK:
            self._problem(f"{what} with grant {_number(grant)}, although {highest} has come")

    def answers(self, call: Any, proposals: draft_pb2.Proposals) -> None:
        if call not in self._streams:
            self._problem("proposes before it was asked")
            return
        grant, asked = self._streams[call]
        self._check_grant(f"proposes for {grant.target_id}", grant)
        columns = columns_of(proposals)
        if columns is None:
            self._problem("answers in columns that do not fit each other")
            return
        for sequence_id, digest, tokens in columns:
            most = asked.get((sequence_id, digest))
            if proposals.ahead:
                if len(tokens) > max((most for (one, _), most in asked.items() if one == sequence_id), default=0):
                    self._problem(f"proposes {tokens} ahead for sequence {sequence_id}, of which nobody asked as much")
            elif most is None:
                if tokens:
                    self._problem(f"proposes {tokens} for sequence {sequence_id} behind tokens that it was never told")
            elif len(tokens) > most:
                self._problem(f"proposes {tokens} for sequence {sequence_id}, {most} were asked for")


def _number(grant: worker_pb2.DraftGrant) -> tuple[int, int]:
    return grant.scheduler_epoch, grant.number
