"""What messages tell of tokens: the KV that a worker has of them, and which are committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from spool.protos import worker_pb2

Verified = Callable[[int, int], Sequence[int]]
"""What a pass was seen to verify of a sequence, behind the tokens with a digest."""

EMPTY_DIGEST = 0xBF29CE484222325
_FACTOR = 0xBB873593CC9E2D5
_MASK = (1 << 60) - 1


def digests_after(digest: int, tokens: Iterable[int]) -> list[int]:
    """The digests of the list that has `digest` and grows by one token after the other (docs/protocol.md, Steps)."""
    digests = []
    for token in tokens:
        digest = (digest ^ token) * _FACTOR & _MASK
        digests.append(digest)
    return digests


def digest_of(tokens: Iterable[int]) -> int:
    digest = EMPTY_DIGEST
    for token in tokens:
        digest = (digest ^ token) * _FACTOR & _MASK
    return digest


class Answer(NamedTuple):
    """To one row; digest 0 was not told."""

    status: int
    tokens: list[int]
    kv_len: int
    prefix_digest: int
    verified: int
    reused: int

    @property
    def accepted(self) -> int:
        return max(0, len(self.tokens) - 1)


def rows_of(request: worker_pb2.StepRequest) -> list[worker_pb2.Row]:
    """All of them: those that follow feed no tokens of their own."""
    following = request.following
    nothing = [0] * len(following.sequence_ids)
    columns = zip(
        following.sequence_ids,
        following.kv_lens,
        following.prefix_digests,
        following.draft_lengths or nothing,
        following.verify or nothing,
        strict=True,
    )
    return [
        *request.rows,
        *(
            worker_pb2.Row(
                sequence_id=one, kv_len=kv, prefix_digest=digest, sample=True, draft_length=length, verify=verify
            )
            for one, kv, digest, length, verify in columns
        ),
    ]


def follows(row: worker_pb2.Row) -> bool:
    return not row.tokens and not row.known_tokens


def answers_of(reply: worker_pb2.StepReply) -> list[Answer] | None:
    """To all rows, in their order; None where columns do not fit each other."""
    rows = reply.rows
    counts, tokens = list(rows.counts), list(rows.tokens)
    nothing = [0] * len(counts)
    columns = (
        list(rows.statuses) or [worker_pb2.ROW_STATUS_OK] * len(counts),
        list(rows.kv_lens),
        list(rows.prefix_digests) or nothing,
        list(rows.verified) or nothing,
        list(rows.reused) or nothing,
    )
    if any(len(column) != len(counts) for column in columns) or sum(counts) != len(tokens):
        return None
    answers, first = [], 0
    for count, status, kv_len, digest, verified, reused in zip(counts, *columns, strict=True):
        answers.append(Answer(status, tokens[first : first + count], kv_len, digest, verified, reused))
        first += count
    return answers


class _Held:
    """The digest of each prefix of the tokens that the worker has KV of, and what was committed when it came."""

    __slots__ = ("committed", "digests", "sampled")

    def __init__(self) -> None:
        self.digests = [EMPTY_DIGEST]
        self.sampled: list[int] = []
        """The token that the last row has sampled, for a row that follows."""
        self.committed: list[int] = []


class KvBook:
    """The KV of one worker under one scheduler epoch, as requests and the replies to them tell of it."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def sequences(self) -> list[int]:
        """Those of which the worker has KV."""
        return [sequence_id for sequence_id, held in self._held.items() if len(held.digests) > 1]

    def digest(self, sequence_id: int, kv_len: int) -> int | None:
        """Of the first `kv_len` tokens; None where there are not so many."""
        held = self._held.get(sequence_id)
        digests = [EMPTY_DIGEST] if held is None else held.digests
        return digests[kv_len] if kv_len < len(digests) else None

    def kv_len(self, sequence_id: int) -> int:
        held = self._held.get(sequence_id)
        return 0 if held is None else len(held.digests) - 1

    def take_in(self, request: worker_pb2.ImportKvRequest) -> None:
        """A sequence that came with its KV."""
        self._held[request.sequence_id] = held = _Held()
        held.digests += digests_after(EMPTY_DIGEST, request.tokens)
        held.committed = list(request.parameters.committed_tokens)

    def settle(
        self, request: worker_pb2.StepRequest, reply: worker_pb2.StepReply, verified: Verified | None = None
    ) -> str | None:
        """Applies an answer that is OK as a whole. Returns what is wrong with it."""
        for sequence_id in request.released_sequence_ids:
            self._held.pop(sequence_id, None)
        rows, answers = rows_of(request), answers_of(reply)
        if answers is None:
            return "is answered in columns that do not fit each other"
        if len(rows) != len(answers):
            return f"answers {len(answers)} of {len(rows)} rows"
        for row, answer in zip(rows, answers, strict=True):
            problem = self._settle(row, answer, verified)
            if problem is not None:
                return f"sequence {row.sequence_id}: {problem}"
        return None

    def _settle(self, row: worker_pb2.Row, answer: Answer, verified: Verified | None) -> str | None:
        held = self._held.get(row.sequence_id)
        opens = row.HasField("parameters")
        if answer.status == worker_pb2.ROW_STATUS_UNKNOWN_SEQUENCE:
            self._held.pop(row.sequence_id, None)
            return "is not known, although parameters came with its row" if opens else None
        if opens:
            if held is None:
                held = self._held[row.sequence_id] = _Held()
            held.committed = list(row.parameters.committed_tokens)
        if held is None:
            if answer.status == worker_pb2.ROW_STATUS_OK:
                return "was computed, although it was never opened"
            return None
        followed = held.sampled
        if answer.status != worker_pb2.ROW_STATUS_VOID:
            held.sampled = []
        if follows(row) and answer.status == worker_pb2.ROW_STATUS_OK:
            kv_len = len(held.digests) - 1
            if row.kv_len > kv_len or held.digests[row.kv_len] != row.prefix_digest or not followed:
                return "was computed after a row that does not end there, or has sampled nothing"
            known, row = row, worker_pb2.Row()
            row.CopyFrom(known)
            row.kv_len, row.prefix_digest = kv_len, held.digests[-1]
        if answer.status == worker_pb2.ROW_STATUS_OK:
            held.sampled = list(answer.tokens[-1:]) if row.sample else []
            return _computed(held, row, list(row.tokens) or followed, answer, verified)
        return _refused(held, row, answer)


def _computed(
    held: _Held, row: worker_pb2.Row, own: list[int], answer: Answer, verified: Verified | None
) -> str | None:
    """`own` are the row's tokens, or the one that it follows."""
    digests, kv_len, opens = held.digests, row.kv_len, row.HasField("parameters")
    if kv_len >= len(digests) or digests[kv_len] != row.prefix_digest:
        return f"was computed on {kv_len} positions of KV, the worker has {len(digests) - 1}, or other ones"
    behind = digests[kv_len + len(own) :]
    del digests[kv_len + 1 :]
    digests += digests_after(digests[-1], own)
    problem = _wrong_tokens(row, answer, None if verified is None else verified(row.sequence_id, digests[-1]))
    if problem is not None:
        return problem
    digests += digests_after(digests[-1], answer.tokens[: answer.accepted])
    # A row that only computes KV which the worker had may leave what lies behind it.
    if not (opens or row.sample) and behind[:1] == digests[-1:] and answer.kv_len >= len(digests):
        digests += behind[1:]
    # What the row only computes, the worker may have from other sequences, and then that of more committed tokens.
    if answer.kv_len >= len(digests) and answer.reused and not row.sample:
        digests += digests_after(digests[-1], held.committed[len(digests) - 1 : answer.kv_len])
    if answer.kv_len != len(digests) - 1:
        return f"kv_len is {answer.kv_len} after {len(digests) - 1} tokens"
    if answer.prefix_digest not in (0, digests[-1]) or not (answer.prefix_digest or row.sample):
        return f"prefix_digest is not that of the {answer.kv_len} tokens that were fed and accepted"
    return None


def _wrong_tokens(row: worker_pb2.Row, answer: Answer, drafted: Sequence[int] | None) -> str | None:
    """`drafted`: what was seen to be verified, where somebody saw it."""
    tokens, accepted, verified = answer.tokens, answer.accepted, answer.verified
    if not row.sample:
        return f"tokens {tokens} come unasked" if tokens or verified else None
    if not tokens:
        return "has sampled no token"
    if not accepted <= verified <= row.verify:
        return f"accepts {accepted} tokens of {verified} that were verified, verify is {row.verify}"
    if drafted is None:
        return None
    if verified != len(drafted):
        return f"is said to have verified {verified} tokens, those were {list(drafted)}"
    if tokens[:accepted] != list(drafted[:accepted]):
        return f"accepts {accepted} tokens with {tokens}, {list(drafted)} were drafted"
    if accepted < len(drafted) and tokens[accepted] == drafted[accepted]:
        return f"token {tokens[accepted]} is not accepted, although the target chose it"
    return None


def _refused(held: _Held, row: worker_pb2.Row, answer: Answer) -> str | None:
    """The worker says what it has. It may have lost KV, and never has any that nobody fed."""
    digests, kv_len = held.digests, answer.kv_len
    if kv_len >= len(digests) or digests[kv_len] != answer.prefix_digest:
        del digests[row.kv_len + 1 :]
        digests += digests_after(digests[-1], row.tokens)
        digests += digests_after(digests[-1], held.committed[len(digests) - 1 :])
        if kv_len >= len(digests) or digests[kv_len] != answer.prefix_digest:
            return f"says that it has {kv_len} positions with a digest of tokens that nobody fed"
    del digests[kv_len + 1 :]
    return None


class CommittedTokens:
    """The committed tokens of one sequence of one scheduler, by their digests: each position has one token for ever."""

    __slots__ = ("digests", "prompt_length")

    def __init__(self) -> None:
        self.digests: dict[int, int] = {}
        self.prompt_length = 0

    def say(self, position: int, digests: Iterable[int]) -> int | None:
        """Committed prefixes of `position`, position + 1 ... tokens. Returns the first that says something else."""
        known = self.digests
        for place, digest in enumerate(digests, position):
            if known.setdefault(place, digest) != digest:
                return place
        return None
