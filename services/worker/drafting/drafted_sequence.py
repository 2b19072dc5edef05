"""What a draft worker has of one sequence of a target."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.drafting.draft_kv import DraftKv
from engine.drafting.model_drafting import DraftAnswer, DraftAsk
from engine.kv.pages import PagePool
from scheduler.sampling import SamplingParameters
from scheduler.state.digests import DigestedTokens


@dataclass(slots=True, eq=False)
class Path:
    """Tokens of a sequence and their KV. They begin with the target's; behind these are those that the draft has
    chosen, and by the position of such a one what it would have chosen in its place."""

    kv: DraftKv
    tokens: DigestedTokens
    alternatives: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, answer: DraftAnswer) -> None:
        self.alternatives.update(enumerate(answer.alternatives, len(self.tokens)))
        self.tokens.extend(answer.tokens)

    def fork(self, pool: PagePool, length: int, token: int, shared: int) -> Path:
        """Goes on otherwise behind the first `length` tokens, with another one; on the pages that the first `shared`
        tokens fill."""
        tokens = DigestedTokens()
        tokens.tokens, tokens.digests = self.tokens.tokens[:length], self.tokens.digests[: length + 1]
        tokens.extend([token])
        return Path(self.kv.fork(pool, shared), tokens)

    def cut(self, length: int) -> None:
        """Nothing is known from there on."""
        self.tokens.truncate(length)
        self.alternatives.clear()


@dataclass(slots=True)
class Work:
    """Of a step of the draft: so many `passes`, which feed so many `tokens`."""

    passes: int = 1
    tokens: int = 0

    def add(self, path: Path, end: int) -> None:
        """The tokens that are missing of a path."""
        missing = max(0, end - len(path))
        self.passes = max(self.passes, missing)
        self.tokens += len(path) - path.kv.table.length + max(0, missing - 1)


@dataclass(slots=True, eq=False)
class Guess:
    """That a verdict will say the first `start` tokens of a path. What follows them up to `end` is the proposal for it,
    which the target has once it is `sent`."""

    path: Path
    start: int
    end: int
    sent: bool = False

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """The first `committed` tokens of its `path` are the target's. The tokens up to `proposed` are the proposal that
    the target verifies now, if it came in time. What is computed ahead of the verdict (ahead.py) are further tokens of
    the path, and `guesses`, by the digest of the prefix.

    `draft_length` is of the latest request. `asked` and `asked_before` number the batches for which the latest two
    came, `served` the one that computed for the sequence last; 0: none.
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

    def ask(self, path: Path, end: int, alternatives: bool) -> DraftAsk:
        """For the tokens of a path that are missing up to `end`."""
        tokens, kv = path.tokens.tokens, path.kv
        settled, chosen = tokens[: self.committed], tokens[self.committed :]
        missing = max(0, end - len(path))
        return DraftAsk(kv, settled, chosen, self.prompt_length, self.sampling, missing, alternatives)
