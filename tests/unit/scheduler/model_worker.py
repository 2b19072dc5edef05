"""Targets in plain Python, for schedulers in virtual time, and the tokens that they choose.

Nothing here shares code with the services or the engine. tests/sim judges whether scheduler and workers keep to the
protocol; the worker below only follows it.
"""

from __future__ import annotations

from spool.scheduler.messages import (
    FinishReason,
    ProposalSource,
    Row,
    RowResult,
    RowStatus,
    SequenceRequest,
    WorkerSpec,
)
from spool.scheduler.state.digests import DigestedTokens

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
    """Answers rows. `held` are the tokens of each sequence whose KV it has, `guess` is how often a proposed token is
    right, whoever proposes it. A target that is not `served` has none. After the share `found` of all prefixes, lookup
    finds something, of which each token is right with the chance `lookup_guess`. `tells`: who has proposed."""

    def __init__(self, spec: WorkerSpec, guess: float = 1.0) -> None:
        self.spec = spec
        self.guess = guess
        self.served = True
        self.found = self.lookup_guess = 0.0
        self.tells = True
        self.held: dict[int, DigestedTokens] = {}
        self.sampled: dict[int, int] = {}
        """What each sequence's last row has sampled: for the row that follows it."""
        self.asked: dict[int, tuple[int, int]] = {}
        """How many tokens each sequence's last row wanted proposed: of a draft, and where lookup finds them."""
        self.expected: dict[int, SequenceRequest] = {}
        """The sequences with an expected output."""

    def forget(self, sequence_id: int) -> None:
        self.held.pop(sequence_id, None)
        self.asked.pop(sequence_id, None)

    def run_row(self, row: Row) -> RowResult:
        if row.opening is not None:
            assert row.committed[row.kv_len : row.kv_len + len(row.tokens)] == row.tokens, "feeds what is not committed"
            self.held.setdefault(row.sequence_id, DigestedTokens())
            if row.opening.expected_output:
                self.expected[row.sequence_id] = row.opening
        held = self.held.get(row.sequence_id)
        if held is None:
            return RowResult(row.sequence_id, RowStatus.UNKNOWN_SEQUENCE, 0, 0)
        if row.kv_len > len(held) or held.digest(row.kv_len) != row.prefix_digest:
            return RowResult(row.sequence_id, RowStatus.KV_MISMATCH, len(held), held.digest(len(held)))
        tokens, accepted, proposal, source = list[int](), 0, list[int](), None
        if row.follows:
            held.extend((self.sampled[row.sequence_id],))
        else:
            held.truncate(row.kv_len)
            held.extend(row.tokens)
        if row.sample:
            proposal, source = self._proposal(row, held)
            while proposal[accepted : accepted + 1] == [target_token(held.digest(len(held)))]:
                held.extend(proposal[accepted : accepted + 1])
                accepted += 1
            tokens = [*proposal[:accepted], target_token(held.digest(len(held)))]
            self.sampled[row.sequence_id] = tokens[-1]
            found = row.draft_length if row.lookup_length is None else row.lookup_length
            self.asked[row.sequence_id] = row.draft_length, found
        result = RowResult(row.sequence_id, RowStatus.OK, len(held), held.digest(len(held)), tuple(tokens), accepted)
        result.verified, result.logits_digests = len(proposal), tuple(token * 7 for token in tokens)
        result.source = source if proposal and self.tells else None
        return result

    def _proposal(self, row: Row, held: DigestedTokens) -> tuple[list[int], ProposalSource]:
        request = self.expected.get(row.sequence_id)
        if request is not None:
            begun = len(held) - len(request.prompt)
            return list(request.expected_output[begun : begun + row.verify]), ProposalSource.EXPECTED
        by_draft, by_lookup = self.asked.get(row.sequence_id, (0, 0))
        assert row.verify <= max(by_draft, by_lookup), "verifies more than were to be proposed"
        source, count, guess = ProposalSource.DRAFT, by_draft if self.served else 0, self.guess
        if by_lookup and _mixed(held.digest(len(held)), 3) % 1000 < self.found * 1000:
            source, count, guess = ProposalSource.LOOKUP, by_lookup, self.lookup_guess
        known = DigestedTokens(held.tokens)
        for _ in range(min(count, row.verify)):
            known.extend((draft_token(known.digest(len(known)), guess),))
        return known.tokens[len(held) :], source
