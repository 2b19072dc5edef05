"""Proposals before they are asked for, while targets verify the ones before.

Where a draft has nothing else to do, it goes on behind each proposal as if that would be accepted whole, and the token
that it would choose next were the target's own. If the verdict says so, the next proposal has been at the target before
it (as in SSD, arXiv 2603.03251); if not, nothing but the draft's idle time is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.drafting.model_drafting import DraftAsk, ModelDrafting
from engine.kv.pages import PagePool
from protos import draft_pb2
from services.worker.drafting.messages import Verdict
from services.worker.drafting.target_stream import DraftedSequence, TargetStream

MOST_SEQUENCES = 8
"""Of a draft worker that goes ahead: a step waits unless all of its proposals are there, and of more some are not."""


class Ahead:
    """Of all sequences of a draft worker. Tokens that no verdict has are behind the first `committed` of a sequence:
    what was proposed, the guess of the token that follows it, and what is proposed after that."""

    def __init__(self, drafting: ModelDrafting, pool: PagePool) -> None:
        self._drafting = drafting
        self._pool = pool
        self._going: dict[DraftedSequence, TargetStream] = {}

    def __len__(self) -> int:
        """Sequences for which there is something to compute."""
        return len(self._going)

    def begin(self, one: DraftedSequence, stream: TargetStream, proposal: Sequence[int]) -> bool:
        """Behind a proposal that is sent, if it is whole. Not behind a single token: who asks for that wants to know
        what it costs. Sequences with grammars wait for their verdicts."""
        if not len(proposal) == one.draft_length > 1 or one.sampling.grammar is not None:
            return False
        one.tokens.extend(proposal)
        return self._go(one, stream)

    def stop(self, one: DraftedSequence) -> None:
        """Nothing is known of the sequence beyond its last verdict."""
        self._going.pop(one, None)
        one.tokens.truncate(one.committed)
        one.guessed = 0

    def met(self, one: DraftedSequence, stream: TargetStream, verdict: Verdict) -> bool:
        """Whether the verdict is the one whose proposal was sent ahead. Goes on behind that then."""
        right = 0 < one.guessed == verdict.length and one.tokens.digest(one.guessed) == verdict.digest
        if not right or not verdict.draft_length:
            return False
        one.committed, one.draft_length = verdict.length, verdict.draft_length
        one.kv.truncate(one.committed)
        self._go(one, stream)
        return True

    def go_on(self) -> dict[TargetStream, draft_pb2.Proposals]:
        """Computes what is missing of each, as far as there are pages; gives what is complete, by target."""
        asked: list[DraftedSequence] = []
        reserved = 0
        for one in [*self._going]:
            needed = self._pool.missing(one.kv.table, one.goal)
            if reserved + needed > self._pool.free_pages:
                self.stop(one)
            else:
                reserved += needed
                asked.append(one)
        found: defaultdict[TargetStream, draft_pb2.Proposals] = defaultdict(draft_pb2.Proposals)
        for one, answer in zip(asked, self._drafting.propose([*map(_ask, asked)]), strict=True):
            if answer.tokens:
                one.tokens.extend(answer.tokens)
                if len(one.tokens) == one.goal:
                    _add(found[self._going.pop(one)], one)
            elif not answer.behind:
                self.stop(one)
        return found

    def _go(self, one: DraftedSequence, stream: TargetStream) -> bool:
        """The tokens of the sequence end with a proposal."""
        one.guessed, one.goal = 0, len(one.tokens) + 1 + one.draft_length
        if one.goal > self._drafting.description.max_sequence_length:
            return False
        self._going[one] = stream
        return True


def _ask(one: DraftedSequence) -> DraftAsk:
    missing = one.goal - len(one.tokens)
    return DraftAsk(one.kv, one.tokens.tokens, (), one.prompt_length, one.sampling, missing)


def _add(proposals: draft_pb2.Proposals, one: DraftedSequence) -> None:
    one.guessed = one.goal - one.draft_length
    proposal = one.tokens.tokens[one.guessed :]
    proposals.ahead = True
    proposals.sequence_ids.append(one.sequence_id)
    proposals.digests.append(one.tokens.digest(one.guessed))
    proposals.counts.append(len(proposal))
    proposals.tokens.extend(proposal)
