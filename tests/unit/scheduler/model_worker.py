"""Workers in plain Python, for schedulers in virtual time, and the tokens that they choose.

Nothing here shares code with the services or the engine. tests/sim judges whether scheduler and workers keep to the
protocol; the worker below only follows it.
"""

from __future__ import annotations

from scheduler.messages import FinishReason, Outcome, Role, Row, RowResult, RowStatus, SequenceRequest, WorkerSpec
from scheduler.state.digests import DigestedTokens

VOCABULARY = 50
_MIX = 0x9E3779B97F4A7C15


def _mixed(digest: int, salt: int) -> int:
    value = ((digest ^ salt) * _MIX) % (1 << 64)
    return ((value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 % (1 << 64)) >> 20


def target_token(digest: int) -> int:
    """What the target says after a prefix."""
    return _mixed(digest, 1) % VOCABULARY


def draft_token(digest: int, acceptance: float) -> int:
    """The draft's guess at the same: right with the chance given."""
    right = _mixed(digest, 2) % 1000 < acceptance * 1000
    return target_token(digest) if right else (target_token(digest) + 1) % VOCABULARY


def plain_decoding(request: SequenceRequest) -> tuple[list[int], FinishReason]:
    """The whole output that a request must get."""
    tokens = DigestedTokens(request.prompt)
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(target_token(tokens.digest(len(tokens))))
        tokens.extend(output[-1:])
        if output[-1] in request.stop_token_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


class ModelWorker:
    """Answers rows. `held` are the tokens of each sequence whose KV it has, `guess` is the acceptance of a draft, or of
    a target's head."""

    def __init__(self, spec: WorkerSpec, guess: float = 1.0) -> None:
        self.spec = spec
        self.guess = guess
        self.held: dict[int, DigestedTokens] = {}
        self.next: dict[int, tuple[int, ...]] = {}
        """What each sequence's last row has sampled, and the head proposed then: for the row that follows it."""

    def forget(self, sequence_id: int) -> None:
        self.held.pop(sequence_id, None)

    def run_row(self, row: Row) -> RowResult:
        if row.opening is not None:
            assert row.committed[row.kv_len : row.kv_len + len(row.tokens)] == row.tokens, "feeds what is not committed"
            self.held.setdefault(row.sequence_id, DigestedTokens())
        held = self.held.get(row.sequence_id)
        if held is None:
            return RowResult(row.sequence_id, RowStatus.UNKNOWN_SEQUENCE, 0, 0)
        status, tokens, accepted, outcomes = RowStatus.OK, list[int](), 0, list[Outcome]()
        if row.kv_len > len(held) or held.digest(row.kv_len) != row.prefix_digest:
            status = RowStatus.KV_MISMATCH
        else:
            own, drafted = row.tokens, row.draft_tokens
            if row.follows:
                own, drafted = self.next[row.sequence_id][:1], self.next[row.sequence_id][1:]
            else:
                held.truncate(row.kv_len)
            held.extend(own)
            if row.outcomes:
                held.extend(drafted)
            elif self.spec.role is Role.DRAFT:
                for _ in range(row.draft_length):
                    held.extend(tokens[-1:])
                    tokens.append(draft_token(held.digest(len(held)), self.guess))
            elif row.sample:
                while drafted[accepted : accepted + 1] == (target_token(held.digest(len(held))),):
                    held.extend(drafted[accepted : accepted + 1])
                    accepted += 1
                tokens = [*drafted[:accepted], target_token(held.digest(len(held)))]
                self.next[row.sequence_id] = (tokens[-1],)
                if row.draft_length:
                    assert self.spec.own_draft_id, "asks a target without a head for a proposal"
                    known = DigestedTokens([*held.tokens, tokens[-1]])
                    for _ in range(row.draft_length):
                        known.extend((draft_token(known.digest(len(known)), self.guess),))
                    proposal = tuple(known.tokens[len(held) + 1 :])
                    outcomes = [Outcome(accepted, tokens[-1], proposal)]
                    self.next[row.sequence_id] += proposal
        digests = tuple(token * 7 for token in tokens) if self.spec.role is Role.TARGET else ()
        result = RowResult(row.sequence_id, status, len(held), held.digest(len(held)), tuple(tokens), accepted)
        result.logits_digests, result.outcomes = digests, tuple(outcomes)
        return result
