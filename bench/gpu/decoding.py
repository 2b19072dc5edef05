"""Decoding with engines alone, without a scheduler: streams that advance together, with or without drafts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.drafting.proposer import LocalProposer
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.kv.pages import PageTable
from spool.engine.steps import EngineTimings, ProposeRow, RowOutcome, VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.sampling import SamplingParameters

GREEDY = SamplingParameters()


@dataclass(slots=True)
class Stream:
    """One sequence: `history` is prompt and output; the target's KV ends before its last token."""

    prompt: Sequence[int]
    history: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    draft_table: PageTable = field(default_factory=PageTable)
    drafting: SequenceDrafting = field(default_factory=SequenceDrafting)
    """Of a draft inside the target, in place of one with a `draft_table`."""
    proposal: Sequence[int] = ()
    digests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = self.history or list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.history[len(self.prompt) :]


@dataclass(slots=True)
class Rounds:
    """Rounds of all streams together. Seconds of each round: in all, in the draft engine, in the target engine, and on
    the device in the target's passes; tokens that all streams got."""

    total: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    verifying: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / sum(self.total)

    def milliseconds(self) -> dict[str, float]:
        """Medians; `host_ms` is what is spent in neither engine."""
        total, drafting, verifying, forward = (
            1000 * statistics.median(seconds) for seconds in (self.total, self.drafting, self.verifying, self.forward)
        )
        return {
            "round_ms": total,
            "draft_ms": drafting,
            "target_ms": verifying,
            "target_device_ms": forward,
            "host_ms": total - drafting - verifying,
        }


def prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random tokens, the same for a seed and a number, whatever the count."""
    return [
        [random.Random(f"{seed} {number} {place}").randrange(vocabulary) for place in range(tokens)]
        for number in range(count)
    ]


def prefill(target: TargetEngine, draft: DraftEngine | None, streams: Sequence[Stream], chunk: int) -> None:
    """Computes the KV of all known tokens but the last, `chunk` tokens of a stream a step."""
    for stream in streams:
        while (missing := len(stream.history) - 1 - stream.table.length) > 0:
            first = stream.table.length
            tokens = stream.history[first : first + min(missing, chunk)]
            row = VerifyRow(stream.table, tokens, (), False, stream.history, len(stream.prompt), GREEDY)
            _checked(target.step([row]).rows)
        while draft is not None and (missing := len(stream.history) - 1 - stream.draft_table.length) > 0:
            first = stream.draft_table.length
            tokens = stream.history[first : first + min(missing, chunk)]
            fed = ProposeRow(stream.draft_table, tokens, 0, stream.history, len(stream.prompt), GREEDY)
            _checked(draft.step([fed]).rows)


def decode(
    target: TargetEngine,
    draft: DraftEngine | None,
    streams: Sequence[Stream],
    rounds: int,
    draft_length: int = 0,
    sampling: SamplingParameters = GREEDY,
    digests: bool = False,
    inside: LocalProposer | None = None,
) -> Rounds:
    """So many rounds of all streams together: drafts, if there is a draft, then one step of the target, and what the
    draft `inside` it does after that."""
    found = Rounds()
    for _ in range(rounds):
        began = time.perf_counter()
        if draft is not None and draft_length:
            _propose(draft, streams, draft_length, sampling)
        drafted = time.perf_counter()
        timings = _verify(target, streams, draft_length, sampling, digests, inside, found)
        verified = time.perf_counter()
        if draft is not None and draft_length:
            for stream in streams:
                kept = min(stream.draft_table.length, len(stream.history) - 1)
                draft.pool.truncate(stream.draft_table, kept)
        found.total.append(time.perf_counter() - began)
        found.drafting.append(drafted - began)
        found.verifying.append(verified - drafted)
        found.forward.append(timings.forward)
    return found


def free(target: TargetEngine, draft: DraftEngine | None, streams: Sequence[Stream]) -> None:
    for stream in streams:
        target.pool.free(stream.table)
        stream.drafting.kv.drop()
        if draft is not None:
            draft.pool.free(stream.draft_table)


def _propose(draft: DraftEngine, streams: Sequence[Stream], draft_length: int, sampling: SamplingParameters) -> None:
    rows = [
        ProposeRow(
            stream.draft_table,
            stream.history[stream.draft_table.length :],
            draft_length,
            stream.history,
            len(stream.prompt),
            sampling,
        )
        for stream in streams
    ]
    for stream, outcome in zip(streams, _checked(draft.step(rows).rows), strict=True):
        stream.proposal = outcome.tokens


def _verify(
    target: TargetEngine,
    streams: Sequence[Stream],
    draft_length: int,
    sampling: SamplingParameters,
    digests: bool,
    inside: LocalProposer | None,
    found: Rounds,
) -> EngineTimings:
    rows = [
        VerifyRow(
            stream.table,
            stream.history[stream.table.length :],
            stream.proposal,
            True,
            stream.history,
            len(stream.prompt),
            sampling,
            digests,
            draft_length=draft_length,
            drafting=stream.drafting,
        )
        for stream in streams
    ]
    stepped = target.step(rows)
    for stream, outcome in zip(streams, _checked(stepped.rows), strict=True):
        stream.history += outcome.tokens[:-1]
        stream.digests += outcome.logits_digests
        found.tokens += len(outcome.tokens)
        found.drafted += len(stream.proposal)
        found.accepted += outcome.accepted
    if inside is not None and draft_length:
        inside.offer(rows, stepped.rows, [0] * len(rows))
    for stream, outcome in zip(streams, stepped.rows, strict=True):
        stream.history += outcome.tokens[-1:]
        stream.proposal = stream.drafting.kept(0, draft_length)
    return stepped.timings


def _checked(outcomes: Sequence[RowOutcome]) -> Sequence[RowOutcome]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise RuntimeError(f"a row failed: {outcome.error}")
    return outcomes
