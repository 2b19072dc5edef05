"""Workers in plain Python, for schedulers in virtual time, and the tokens that they choose.

Nothing here shares code with the services or the engine but the page pool: the worker below is a second reading of
the protocol, which refuses what the protocol forbids.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.pages import PagePool, PageTable
from scheduler.messages import (
    FinishReason,
    Outcome,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    WorkerSpec,
)
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


@dataclass(eq=False)
class Held:
    """What a worker has of one sequence: the tokens whose KV it holds, and those it was told of at the opening."""

    tokens: DigestedTokens
    table: PageTable
    committed: tuple[int, ...] = ()


class ModelWorker:
    """Executes steps as protos/worker.proto demands. `guess` is the draft's acceptance; targets ignore it."""

    def __init__(self, spec: WorkerSpec, guess: float = 0.7) -> None:
        self.spec = spec
        self.guess = guess
        self.held: dict[int, Held] = {}
        self.pool = PagePool(spec.total_pages, spec.page_size)

    def run(self, step: SendStep) -> tuple[RowResult, ...]:
        for sequence_id in step.released:
            self.forget(sequence_id)
        return tuple(self.run_row(row) for row in step.rows)

    def forget(self, sequence_id: int) -> None:
        held = self.held.pop(sequence_id, None)
        if held is not None:
            self.pool.free(held.table)

    def adopt(self, sequence_id: int, tokens: DigestedTokens, table: PageTable) -> bool:
        """Takes over a sequence with its KV; False where a row has opened it meanwhile."""
        if sequence_id in self.held:
            return False
        self.held[sequence_id] = Held(tokens, table)
        return True

    def run_row(self, row: Row) -> RowResult:
        if row.sequence_id not in self.held:
            if row.opening is None:
                return RowResult(row.sequence_id, RowStatus.UNKNOWN_SEQUENCE, 0, 0)
            self.held[row.sequence_id] = Held(DigestedTokens(), PageTable())
        held = self.held[row.sequence_id]
        if row.opening is not None:
            assert row.committed[row.kv_len : row.kv_len + len(row.tokens)] == row.tokens, "feeds what is not committed"
            held.committed = row.committed
        length = len(held.tokens)
        if row.kv_len > length or held.tokens.digest(row.kv_len) != row.prefix_digest:
            return self._result(row, RowStatus.KV_MISMATCH)
        if not row.tokens:
            return self._result(row, RowStatus.INVALID, error="nothing to feed")
        end = row.kv_len + len(row.tokens)
        computes = row.sample or row.draft_length
        if row.opening is None and not computes and tuple(held.tokens.tokens[row.kv_len : end]) == row.tokens:
            return self._result(row, RowStatus.OK)
        held.tokens.truncate(row.kv_len)
        self.pool.truncate(held.table, row.kv_len)
        return self._verify(row, held) if self.spec.role is Role.TARGET else self._propose(row, held)

    def _append(self, held: Held, tokens: tuple[int, ...]) -> bool:
        if not self.pool.can_append(held.table, len(tokens)):
            return False
        self.pool.append(held.table, len(tokens))
        held.tokens.extend(tokens)
        return True

    def _verify(self, row: Row, held: Held) -> RowResult:
        if row.draft_length or (row.draft_tokens and not row.sample):
            return self._result(row, RowStatus.INVALID, error="not a row for a target")
        if not self._append(held, row.tokens + row.draft_tokens):
            return self._result(row, RowStatus.OUT_OF_PAGES)
        if not row.sample:
            return self._result(row, RowStatus.OK)
        fed, accepted = row.kv_len + len(row.tokens), 0
        while accepted < len(row.draft_tokens):
            if row.draft_tokens[accepted] != target_token(held.tokens.digest(fed + accepted)):
                break
            accepted += 1
        held.tokens.truncate(fed + accepted)
        self.pool.truncate(held.table, fed + accepted)
        bonus = target_token(held.tokens.digest(fed + accepted))
        tokens = (*row.draft_tokens[:accepted], bonus)
        return self._result(row, RowStatus.OK, tokens, accepted)

    def _propose(self, row: Row, held: Held) -> RowResult:
        if row.sample or bool(row.draft_tokens) != bool(row.outcomes) or (row.outcomes and not row.draft_length):
            return self._result(row, RowStatus.INVALID, error="not a row for a draft")
        if row.outcomes:
            return self._prepare(row, held)
        if not self._append(held, row.tokens):
            return self._result(row, RowStatus.OUT_OF_PAGES)
        if not row.draft_length:
            return self._result(row, RowStatus.OK)
        proposal: list[int] = []
        sure: list[int] = []
        for _ in range(row.draft_length):
            # The last proposed token is never fed.
            if proposal and not self._append(held, (proposal[-1],)):
                held.tokens.truncate(row.kv_len)
                self.pool.truncate(held.table, row.kv_len)
                return self._result(row, RowStatus.OUT_OF_PAGES)
            digest = held.tokens.digest(len(held.tokens))
            proposal.append(draft_token(digest, self.guess))
            sure.append(_mixed(digest, 7) % 160 + (95 if proposal[-1] == target_token(digest) else 0))
        # A draft may say nothing, or nonsense.
        confidences = bytes(sure) if row.kv_len % 5 else b"?"
        return self._result(row, RowStatus.OK, tuple(proposal), confidences=confidences)

    def _prepare(self, row: Row, held: Held) -> RowResult:
        """Of any outcomes, the true one among them more often than not, proposals of any lengths."""
        if not self._append(held, row.tokens + row.draft_tokens):
            return self._result(row, RowStatus.OUT_OF_PAGES)
        result = self._result(row, RowStatus.OK)
        fed, every = row.kv_len + len(row.tokens), held.tokens.tokens
        outcomes = []
        for accepted in range(len(row.draft_tokens) + 1):
            digest = held.tokens.digest(fed + accepted)
            token = draft_token(digest, 0.8)
            follows = DigestedTokens([*every[: fed + accepted], token])
            proposal: list[int] = []
            for _ in range(_mixed(digest, 11) % row.draft_length + 1):
                proposal.append(draft_token(follows.digest(len(follows)), self.guess))
                follows.extend(proposal[-1:])
            outcomes.append(Outcome(accepted, token, tuple(proposal), bytes([100] * len(proposal))))
        result.outcomes = tuple(outcomes[: row.outcomes])
        return result

    def _result(
        self,
        row: Row,
        status: RowStatus,
        tokens: tuple[int, ...] = (),
        accepted: int = 0,
        error: str = "",
        confidences: bytes = b"",
    ) -> RowResult:
        held = self.held[row.sequence_id].tokens
        digests = tuple(token * 7 for token in tokens) if self.spec.role is Role.TARGET else ()
        kv_len = len(held)
        return RowResult(
            sequence_id=row.sequence_id,
            status=status,
            kv_len=kv_len,
            prefix_digest=held.digest(kv_len),
            tokens=tokens,
            accepted=accepted,
            logits_digests=digests,
            error=error,
            confidences=confidences,
        )
