"""What messages tell of tokens: the KV that a worker has of them, and which are committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from protos import worker_pb2

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


def rows_of(request: worker_pb2.StepRequest) -> list[worker_pb2.Row]:
    """All of them: those that follow feed no tokens of their own."""
    following = request.following
    lengths = following.draft_lengths or [0] * len(following.sequence_ids)
    columns = zip(following.sequence_ids, following.kv_lens, following.prefix_digests, lengths, strict=True)
    return [
        *request.rows,
        *(
            worker_pb2.Row(sequence_id=one, kv_len=kv, prefix_digest=digest, sample=True, draft_length=length)
            for one, kv, digest, length in columns
        ),
    ]


def follows(row: worker_pb2.Row) -> bool:
    return not row.tokens and not row.known_tokens


def answers_of(request: worker_pb2.StepRequest, reply: worker_pb2.StepReply) -> list[worker_pb2.RowReply]:
    """To all rows. A digest of 0 was not told."""
    answers, others = list(reply.rows[: len(request.rows)]), list(reply.rows[len(request.rows) :])
    columns = reply.followed
    tokens, kv_lens, proposals = list(columns.tokens), list(columns.kv_lens), list(columns.proposed_tokens)
    proposed = list(columns.proposed) or [0] * len(kv_lens)
    for row, count in zip(rows_of(request)[len(request.rows) :], columns.counts, strict=False):
        if count:
            answer = worker_pb2.RowReply(sequence_id=row.sequence_id, status=worker_pb2.ROW_STATUS_OK)
            answer.kv_len, answer.accepted, length = kv_lens.pop(0), count - 1, proposed.pop(0)
            answer.tokens.extend(tokens[:count])
            if length:
                answer.outcomes.accepted.append(count - 1)
                answer.outcomes.tokens.append(tokens[count - 1])
                answer.outcomes.lengths.append(length)
                answer.outcomes.draft_tokens.extend(proposals[:length])
            answers.append(answer)
            del tokens[:count], proposals[:length]
        elif others:
            answers.append(others.pop(0))
    return answers + others


class _Held:
    """The digest of each prefix of the tokens that the worker has KV of, and what was committed when it came."""

    __slots__ = ("committed", "digests", "proposed", "sampled")

    def __init__(self) -> None:
        self.digests = [EMPTY_DIGEST]
        self.sampled: list[int] = []
        """The token that the last row has sampled, for a row that follows."""
        self.proposed: list[int] = []
        """What was proposed after it."""
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

    def settle(self, request: worker_pb2.StepRequest, reply: worker_pb2.StepReply) -> str | None:
        """Applies an answer that is OK as a whole. Returns what is wrong with it."""
        for sequence_id in request.released_sequence_ids:
            self._held.pop(sequence_id, None)
        rows, answers = rows_of(request), answers_of(request, reply)
        if len(rows) != len(answers):
            return f"answers {len(answers)} of {len(rows)} rows"
        for row, answer in zip(rows, answers, strict=True):
            if row.sequence_id != answer.sequence_id:
                return f"answers sequence {answer.sequence_id} in the place of {row.sequence_id}"
            problem = self._settle(row, answer)
            if problem is not None:
                return f"sequence {row.sequence_id}: {problem}"
        return None

    def _settle(self, row: worker_pb2.Row, answer: worker_pb2.RowReply) -> str | None:
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
            row.draft_tokens.extend(held.proposed)
        if answer.status == worker_pb2.ROW_STATUS_OK:
            held.sampled = list(answer.tokens[-1:]) if row.sample else []
            held.proposed = (
                [token for _, _, proposal in outcomes_of(answer) for token in proposal] if row.sample else []
            )
            return _computed(held, row, list(row.tokens) or followed, answer)
        return _refused(held, row, answer)


def _computed(held: _Held, row: worker_pb2.Row, own: list[int], answer: worker_pb2.RowReply) -> str | None:
    """`own` are the row's tokens, or the one that it follows."""
    digests, kv_len, opens = held.digests, row.kv_len, row.HasField("parameters")
    if kv_len >= len(digests) or digests[kv_len] != row.prefix_digest:
        return f"was computed on {kv_len} positions of KV, the worker has {len(digests) - 1}, or other ones"
    tokens, drafted = list(answer.tokens), list(row.draft_tokens)
    problem = _wrong_tokens(row, tokens, drafted, answer.accepted) or _wrong_outcomes(row, answer)
    if problem is not None:
        return problem
    behind = digests[kv_len + len(own) :]
    del digests[kv_len + 1 :]
    fed = [*own, *(tokens[:-1] if proposes(row) else tokens[: answer.accepted])]
    digests += digests_after(digests[-1], fed)
    if row.outcomes:
        digests += digests_after(digests[-1], drafted)
    # A row that only computes KV which the worker had may leave what lies behind it.
    computes = row.sample or row.draft_length
    if not (opens or computes) and behind[:1] == digests[-1:] and answer.kv_len >= len(digests):
        digests += behind[1:]
    # What the row only computes, the worker may have from other sequences, and then that of more committed tokens.
    if answer.kv_len >= len(digests) and answer.reused and not computes:
        digests += digests_after(digests[-1], held.committed[len(digests) - 1 : answer.kv_len])
    if answer.kv_len != len(digests) - 1:
        return f"kv_len is {answer.kv_len} after {len(digests) - 1} tokens"
    told = answer.prefix_digest or not follows(row)
    if told and answer.prefix_digest != digests[-1]:
        return f"prefix_digest is not that of the {answer.kv_len} tokens that were fed and accepted"
    return None


def proposes(row: worker_pb2.Row) -> bool:
    """Whether the row asks a draft for tokens, and not a target for those of its head."""
    return row.draft_length > 0 and not row.sample


def outcomes_of(answer: worker_pb2.RowReply) -> Iterator[tuple[int, int, list[int]]]:
    """Of each: how many tokens are accepted, which one is chosen then, and what is proposed after it."""
    prepared, begin = answer.outcomes, 0
    for accepted, token, length in zip(prepared.accepted, prepared.tokens, prepared.lengths, strict=True):
        yield accepted, token, list(prepared.draft_tokens[begin : begin + length])
        begin += length


def _wrong_outcomes(row: worker_pb2.Row, answer: worker_pb2.RowReply) -> str | None:
    drafted, prepared = list(row.draft_tokens), answer.outcomes
    if len({len(prepared.accepted), len(prepared.tokens), len(prepared.lengths)}) > 1:
        return "prepares for outcomes of which something is missing"
    if sum(prepared.lengths) != len(prepared.draft_tokens):
        return f"{len(prepared.draft_tokens)} tokens come for outcomes, with lengths {list(prepared.lengths)}"
    outcomes = list(outcomes_of(answer))
    results = [(accepted, token) for accepted, token, _ in outcomes]
    if row.sample:
        # Of a target with a head: for what it has just sampled.
        if results and (not row.draft_length or results != [(answer.accepted, answer.tokens[-1])]):
            return f"proposes after {results}, it has accepted {answer.accepted} and sampled {list(answer.tokens)}"
    elif len(results) > row.outcomes:
        return f"prepares for {len(results)} outcomes, asked for were {row.outcomes}"
    if len(set(results)) < len(results):
        return f"prepares for an outcome twice, among {results}"
    for accepted, token, proposal in outcomes:
        what = f"prepares for token {token} after {accepted} of {drafted}"
        if accepted > len(drafted) or drafted[accepted : accepted + 1] == [token]:
            return f"{what}, which cannot be"
        if not 0 < len(proposal) <= row.draft_length:
            return f"{what} with {len(proposal)} tokens, draft_length is {row.draft_length}"
    return None


def _wrong_tokens(row: worker_pb2.Row, tokens: list[int], drafted: list[int], accepted: int) -> str | None:
    if row.outcomes and tokens:
        return f"tokens {tokens} come with outcomes"
    if proposes(row):
        if len(tokens) > row.draft_length:
            return f"{len(tokens)} tokens are proposed, draft_length is {row.draft_length}"
        return None
    if not row.sample:
        return f"tokens {tokens} come unasked" if tokens or accepted else None
    if accepted > len(drafted) or tokens[:accepted] != drafted[:accepted]:
        return f"accepts {accepted} tokens with {tokens}, {drafted} were drafted"
    if len(tokens) != accepted + 1:
        return f"{len(tokens)} tokens come with {accepted} accepted"
    if accepted < len(drafted) and tokens[accepted] == drafted[accepted]:
        return f"token {tokens[accepted]} is not accepted, although the target chose it"
    return None


def _refused(held: _Held, row: worker_pb2.Row, answer: worker_pb2.RowReply) -> str | None:
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

    __slots__ = ("digests", "prepared_for", "prompt_length", "proposals", "verified", "verified_until")

    def __init__(self) -> None:
        self.digests: dict[int, int] = {}
        self.prompt_length = 0
        self.proposals: dict[int, list[list[int]]] = {}
        """What drafts proposed, by the digest of the tokens before."""
        self.verified: tuple[int, list[int]] | None = None
        """The digest of the tokens before those that a target was last told to verify, and these."""
        self.verified_until: float | None = None
        """When the answer came."""
        self.prepared_for: set[int] = set()
        """The digests before verifications for which drafts were told to prepare."""

    def say(self, position: int, digests: Iterable[int]) -> int | None:
        """Committed prefixes of `position`, position + 1 ... tokens. Returns the first that says something else."""
        known = self.digests
        for place, digest in enumerate(digests, position):
            if known.setdefault(place, digest) != digest:
                return place
        return None
