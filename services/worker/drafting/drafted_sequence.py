"""What a draft worker has of one sequence of a target."""

from __future__ import annotations

from dataclasses import dataclass, field

from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.drafting.model_drafting import DraftAnswer, DraftAsk
from spool.engine.kv.pages import PagePool
from spool.scheduler.sampling import SamplingParameters
from spool.scheduler.state.digests import DigestedTokens


@dataclass(slots=True, eq=False)
class Path:
    """Tokens of a sequence with their KV: the target's, then those that the draft has chosen. `alternatives` are the
    draft's second choices, by position."""

    kv: DraftKv
    tokens: DigestedTokens
    alternatives: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, answer: DraftAnswer) -> None:
        self.alternatives.update(enumerate(answer.alternatives, len(self.tokens)))
        self.tokens.extend(answer.tokens)

    def fork(self, pool: PagePool, length: int, token: int, shared: int) -> Path:
        """Another path, with the first `length` tokens and then this one, on the pages that the first `shared` fill."""
        tokens = DigestedTokens()
        tokens.tokens, tokens.digests = self.tokens.tokens[:length], self.tokens.digests[: length + 1]
        tokens.extend([token])
        return Path(self.kv.fork(pool, shared), tokens)

    def truncate(self, length: int) -> None:
        """Forgets the tokens after the first `length`."""
        self.tokens.truncate(length)
        self.kv.truncate(length)
        self.alternatives.clear()


@dataclass(slots=True)
class Work:
    """The `passes` of a step of the draft, and the `tokens` that they feed."""

    passes: int = 1
    tokens: int = 0

    def add(self, path: Path, end: int) -> None:
        """Extends a path to `end`."""
        missing = max(0, end - len(path))
        self.passes = max(self.passes, missing)
        self.tokens += len(path) - path.kv.table.length + max(0, missing - 1)


@dataclass(slots=True, eq=False)
class Guess:
    """The next verdict may be the first `start` tokens of a path. The tokens up to `end` are the proposal for it, which
    the target has once it is `sent`."""

    path: Path
    start: int
    end: int
    sent: bool = False

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """The first `committed` tokens of its `path` are the target's; those up to `proposed` are the proposal that the
    target verifies now, if it came in time. `guesses` (ahead.py) are found by the digest of their first tokens.

    `draft_length` is that of the latest request. `asked` and `asked_before` are the numbers of the batches in which the
    latest two requests came, `served` of the last one that computed for the sequence; 0: none.
    """

    sequence_id: int
    prompt_length: int
    sampling: SamplingParameters
    path: Path
    committed: int = 0
    proposed: int = 0
    guesses: dict[int, Guess] = field(default_factory=dict)
    draft_length: int = 0
    asked: int = 0
    asked_before: int = 0
    served: int = 0

    @property
    def lag(self) -> int:
        """How many tokens the draft must read before it can propose, unless other sequences have their KV."""
        kv = self.path.kv
        return self.committed - min(kv.table.length, len(kv.known))

    @property
    def end(self) -> int:
        """Of the proposal that was asked for."""
        return self.committed + self.draft_length

    def request(self, path: Path, end: int, alternatives: bool) -> DraftAsk:
        """For the tokens that the path lacks up to `end`."""
        missing, tokens = max(0, end - len(path)), path.tokens.tokens
        return DraftAsk(
            path.kv, tokens, (), self.prompt_length, self.sampling, missing, self.committed, alternatives=alternatives
        )
