"""What a worker asks of the engine, and what it gets back. No torch here: these types cross into services/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spool.engine.drafting.lookup.prompt_lookup import TokenPlaces
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.kv.pages import PageTable
from spool.engine.sampling.grammars import GrammarState
from spool.scheduler.messages import PromptScoring, TokenLogprobs
from spool.scheduler.sampling import SamplingParameters

Computing = Callable[[], None]
"""Called when a pass begins to compute: on a GPU once it is launched, else before its long calls. From then on other
threads find the interpreter free."""


Interrupted = Callable[[], bool]
"""Asked between the passes of proposals, by whoever can do with what they have by then: whether they are to end."""


def no_callback() -> None:
    """A `Computing` for callers that need not know when the long calls begin."""


@dataclass(slots=True)
class VerifyRow:
    """Feed `tokens`, then `draft_tokens`, after the `table.length` positions already computed.

    `history` is prompt plus committed output up to and including `tokens`; only penalties and grammars read it. With
    `sample` false (all but the last chunk of a prefill) no token is sampled and `draft_tokens` is empty.
    `grammar_state` is that of the sequence in steps before; it follows `history` by itself. The tokens that `scoring`
    names follow some of `tokens`. `draft_length` tokens are to be proposed after the sampled one
    (engine/drafting/proposer.py), or `lookup_length` where they are found; in a row that does not sample, that is what
    is expected for later.
    """

    table: PageTable
    tokens: Sequence[int]
    draft_tokens: Sequence[int]
    sample: bool
    history: Sequence[int]
    prompt_length: int
    sampling: SamplingParameters
    logits_digests: bool = False
    top_logprobs: int | None = None
    grammar_state: GrammarState = field(default_factory=GrammarState)
    scoring: PromptScoring | None = None
    draft_length: int = 0
    lookup_length: int = 0
    drafting: SequenceDrafting = field(default_factory=SequenceDrafting)


@dataclass(slots=True)
class ProposeRow:
    """Feed `tokens`, then propose `draft_length` tokens (0 only feeds), and tell the `alternatives`.

    `places` and `grammar_state` are those of the sequence in steps before; prompt lookup keeps the places up with
    `history`, and the state follows it by itself.
    """

    table: PageTable
    tokens: Sequence[int]
    draft_length: int
    history: Sequence[int]
    prompt_length: int
    sampling: SamplingParameters
    places: TokenPlaces = field(default_factory=TokenPlaces)
    grammar_state: GrammarState = field(default_factory=GrammarState)
    alternatives: bool = False


@dataclass(slots=True)
class RowOutcome:
    """What became of a row. `table.length` has moved accordingly; a row with an `error` changed nothing.

    Target: `tokens` are the accepted drafts and the bonus token, `accepted` of them drafts; the table ends before the
    bonus token; `prompt_logprobs` are those that the row's `scoring` asked for. Draft: `tokens` is the proposal; the
    table covers all of it but its last token. `alternatives`, where they were asked for, are what the draft would
    choose in the place of each token if there were no such token, and negative where there is nothing else.
    """

    tokens: list[int]
    accepted: int = 0
    logits_digests: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    error: str | None = None
    out_of_pages: bool = False
    alternatives: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EngineTimings:
    """Seconds of one step, and tokens of its passes; `realign` is the part of `prepare` that unequal lengths cost."""

    prepare: float = 0.0
    realign: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    batched_tokens: int = 0
    padding_rows: int = 0

    def add_pass(self, forward: float, sample: float) -> None:
        """Adds the seconds that a pass took, and sampling from its logits."""
        self.forward += forward
        self.sample += sample

    def add(self, other: EngineTimings) -> None:
        """Adds another pass of the same step."""
        self.prepare += other.prepare
        self.realign += other.realign
        self.forward += other.forward
        self.sample += other.sample
        self.batched_tokens += other.batched_tokens
        self.padding_rows += other.padding_rows


@dataclass(slots=True)
class StepOutcome:
    rows: list[RowOutcome]
    timings: EngineTimings
