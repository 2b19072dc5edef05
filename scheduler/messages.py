"""The vocabulary between the scheduler core and the service around it: events in, commands out.

Nobody but the core changes these dataclasses once they are made. Those made for every row or step are not frozen,
since making a frozen one takes five times as long. Times are seconds on any monotonic clock, always passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from spool.scheduler.sampling import SamplingParameters

MIN_PRIORITY = -(2**31)
MAX_PRIORITY = 2**31 - 1
"""Limits of a priority, in every API."""


class Role(Enum):
    DRAFT = "draft"
    TARGET = "target"


PROPOSERS = ("draft", "lookup", "none")
"""Whom a request can name as the only one to propose."""


class RowStatus(Enum):
    OK = "ok"
    UNKNOWN_SEQUENCE = "unknown_sequence"
    KV_MISMATCH = "kv_mismatch"
    OUT_OF_PAGES = "out_of_pages"
    INVALID = "invalid"
    FAILED = "failed"
    VOID = "void"
    """A row that follows has nothing to follow: most often because the row before has failed or ended its sequence."""


class ProposalSource(Enum):
    """Who has proposed what a row verifies."""

    DRAFT = "draft"
    """A draft worker, a draft inside the target's process or a drafting head."""
    LOOKUP = "lookup"
    EXPECTED = "expected"
    """The request itself, with an output that it expects."""


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Has no target and no KV yet, or has lost both."""
    PREFILLING = "prefilling"
    """The target's KV lags behind the committed tokens. The row that feeds the last of them samples the next token."""
    IDLE = "idle"
    """Has no row in flight, and may be in the target's next verify group."""
    VERIFYING = "verifying"
    MOVING = "moving"
    """The sequence's KV is on the way from one target to another. Both have pages for it."""
    ENDED = "ended"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the core must know of a worker to plan steps for it.

    Draft workers with the same `model_id` share what is learnt about acceptance; "" means a model of its own. So do
    targets with the same `own_draft_id`, that of a head, a draft inside or prompt lookup; "" means that the target has
    none, so that a draft worker can serve it.
    `page_spans` and `page_windows` as in scheduler/page_counts.py; without them, a page holds `page_size` positions.
    Targets with the same `fingerprint` give the same bits; "": nothing is known of them. `release` is the version of
    the worker's software in numbers, so that releases can be compared; empty of those that do not tell it.

    Raises `ValueError` naming field, value and limit.
    """

    worker_id: str
    role: Role
    page_size: int
    total_pages: int
    max_sequence_length: int
    max_num_batched_tokens: int
    model_id: str = ""
    own_draft_id: str = ""
    page_spans: tuple[int, ...] = ()
    page_windows: tuple[int, ...] = ()
    fingerprint: str = ""
    release: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.page_spans) != len(self.page_windows) or 0 in self.page_spans:
            raise ValueError(
                f"page_spans of worker {self.worker_id} is {self.page_spans}, must be above 0, as many as page_windows "
                f"{self.page_windows}"
            )
        for name in ("page_size", "total_pages", "max_sequence_length", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of worker {self.worker_id} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a committed token in the target's own distribution.

    `top` holds the likeliest tokens as (token id, log probability), likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """That a sequence may be the reason why targets were lost (scheduler/transitions/blame.py).

    The sequence was suspected `count` times, and is cleared after `tokens` more tokens; 0: it is not suspected now.
    """

    count: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One prompt to continue.

    `sequence_id` is unique for the life of the core. `max_tokens` is at least 1 and counts a stop token. `draft_length`
    None leaves the choice to the core, 0 turns speculation off. `logits_digests` asks for a digest of the logits that
    each token is sampled from. `committed_output` holds tokens of the output that were already delivered (resubmission
    after a scheduler's death): they count towards `max_tokens` and are not emitted again.
    `top_logprobs` None asks for no log probabilities, a number for those of the tokens and of that many likeliest ones.
    A request that was `admitted_before`, by a scheduler that is gone, is not refused for a full queue or for the limits
    of its key.

    `suspicion` is what another scheduler said of the sequence last.

    `prompt_logprobs` asks for those of the prompt's tokens in the same way; they come with the first output, so that a
    resubmission with `committed_output` gets none.

    `key` tells the requests of one API key from those of others ("": no key); one that is configured has a class of its
    own. `priority` orders the key's requests among each other: as in vLLM, a lower value is handled earlier.

    Only sequences of the same `cache_scope`, empty or 32 bytes, take over each other's KV.

    `fingerprint` is that of the target that computed the last of `committed_output`; empty where that is not known.

    What follows of an `expected_output` is proposed in each round, instead of what a draft would propose; the output is
    the same without it.

    `proposer` is one of PROPOSERS, of which lookup includes an expected output; empty: all may propose.
    """

    sequence_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    draft_length: int | None = None
    logits_digests: bool = False
    top_logprobs: int | None = None
    committed_output: tuple[int, ...] = ()
    admitted_before: bool = False
    key: str = ""
    priority: int = 0
    prompt_logprobs: int | None = None
    suspicion: Suspicion = Suspicion()
    cache_scope: bytes = b""
    expected_output: tuple[int, ...] = ()
    fingerprint: str = ""
    proposer: str = ""


@dataclass(slots=True)
class RowResult:
    """A target's answer for one row of a step; fields as in protos/worker.proto, RowAnswers.

    `kv_len` may exceed what the row asked for, if other sequences' KV was `reused`. `verified` counts the tokens of a
    proposal that were verified, of which the first `accepted` begin `tokens`. `source` is None where nobody proposed
    any, or the worker does not tell.
    """

    sequence_id: int
    status: RowStatus
    kv_len: int
    prefix_digest: int
    tokens: tuple[int, ...] = ()
    accepted: int = 0
    logits_digests: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    reused: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    verified: int = 0
    source: ProposalSource | None = None


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceSubmitted:
    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class SequenceCancelled:
    sequence_id: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker: WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """`reason`: why, for those who are told. `blameless`: no sequence can be the reason, since the worker was removed,
    has left, or lives and only its connection broke."""

    worker_id: str
    reason: str = ""
    blameless: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker will leave soon. A target gets no new sequences, and its own move to other targets; the targets that a
    draft serves are given to other drafts."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkersSettled:
    """The scheduler runs for so long that workers of a scheduler before it have joined, or are gone. Until then, what
    was begun on targets with a fingerprint that no target here has had waits for them."""


@dataclass(frozen=True, slots=True)
class KvMoved:
    """The answer to a `MoveKv`: whether the KV was `moved`, in `seconds`. `size` is in bytes."""

    move_id: int
    moved: bool
    seconds: float
    size: int = 0


@dataclass(slots=True)
class DraftingReport:
    """How a target's draft worker served it in a step: of the `asked` rows that count on a proposal, `in_time` had one,
    and `ahead` before it was asked for, which hid `hidden_seconds` of drafting. `connected`: whether its stream works;
    true without a grant. The draft is never asked for the sequences `refused` any more: it was lost with them twice."""

    connected: bool = True
    asked: int = 0
    in_time: int = 0
    refused: tuple[int, ...] = ()
    ahead: int = 0
    hidden_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """`results` has one for each row, in their order. `seconds` is the time that the worker spent on the step itself,
    without queueing, and on what it proposed since the step before, its waits for a draft worker included."""

    worker_id: str
    step_id: int
    results: tuple[RowResult, ...]
    seconds: float
    drafting: DraftingReport | None = None
    """None where no draft worker serves the target."""
    drafting_seconds: float = 0.0
    """Of `seconds`: for what it proposed, and for the waits."""


Event = (
    SequenceSubmitted
    | SequenceCancelled
    | WorkerJoined
    | WorkerLost
    | WorkerDraining
    | WorkersSettled
    | KvMoved
    | StepCompleted
)


# --- commands ---------------------------------------------------------------------------------------------------------


MAX_SCORED_TOKENS = 256
"""Prompt tokens whose log probabilities a row can ask for: a target has no memory for more logits."""


@dataclass(slots=True)
class PromptScoring:
    """Asks a target for the log probabilities of `tokens` of a prompt, at most `MAX_SCORED_TOKENS`, from position
    `first` on, and of the `top` likeliest tokens at each of these positions. The row feeds the tokens that they follow.
    Without `tokens`, later rows ask for those from `first` on."""

    first: int
    tokens: tuple[int, ...]
    top: int


@dataclass(slots=True)
class Row:
    """One sequence's part in a step; fields as in protos/worker.proto, Row.

    The row feeds tokens that are committed once it runs, up to position `end`, and then verifies what the target has
    proposed after them: at most `verify` tokens, fewer where it has fewer. `opening` is set when the worker does not
    know the sequence yet. `committed` then holds the committed tokens for which pages are reserved, those to feed
    included: the worker may have KV of them from other sequences. `known`: the worker got all `tokens` as `committed`
    ones before, and they are not sent again. `draft_length` tokens are to be proposed after the one that the row
    samples, for the sequence's next round; in a row that does not `sample`, that is what is expected for later, so that
    a draft may read the prompt. Where they are found, by lookup or in an expected output, they may be `lookup_length`;
    None: as many as `draft_length`. A row that `follows` feeds the token that the row before it samples. Nobody knows
    that one yet: the row has no `tokens`. Until the answer to the row before has come, `kv_len` is the `end` of that
    row, and its own `end` is a guess.

    `before`, `drafted`, `looked_up` and `abandoned` are the core's own: the row of the sequence in flight on this
    worker that comes before this one; how many of the tokens to verify a draft was asked for, and whether lookup was;
    and whether the answer is to be ignored, since the sequence left the worker or the row before it failed.
    """

    sequence_id: int
    kv_len: int
    prefix_digest: int
    tokens: tuple[int, ...]
    end: int
    verify: int = 0
    draft_length: int = 0
    sample: bool = False
    before: Row | None = field(default=None, repr=False, compare=False)
    known: bool = False
    opening: SequenceRequest | None = None
    committed: tuple[int, ...] = ()
    scoring: PromptScoring | None = None
    follows: bool = False
    lookup_length: int | None = None
    drafted: int = field(default=0, repr=False, compare=False)
    looked_up: bool = field(default=False, repr=False, compare=False)
    abandoned: bool = field(default=False, repr=False, compare=False)

    @property
    def asks(self) -> int:
        """The most tokens that may be proposed for the sequence's next round."""
        found = self.lookup_length
        return self.draft_length if found is None or found < self.draft_length else found


@dataclass(frozen=True, slots=True)
class DraftGrant:
    """Lets a target ask a draft worker for proposals. Of two grants for one target, the one with the higher number
    counts."""

    draft_id: str
    number: int


@dataclass(slots=True)
class SendStep:
    """`grant` is the target's at present; None: no draft worker serves it. The step may wait `wait_seconds` at most for
    proposals of a draft worker. `grouped` counts the rows of its verify group, which was `forced` if one of them must
    not be passed over any more. Whether its lengths are equal is known from the answers: see `Counters`."""

    worker_id: str
    step_id: int
    rows: tuple[Row, ...]
    released: tuple[int, ...] = ()
    grouped: int = 0
    forced: bool = False
    grant: DraftGrant | None = None
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveKv:
    """The destination must fetch the KV of `tokens` from the source, where no step works on the sequence meanwhile.

    Answered by `KvMoved`. Only then does the KV at the destination count.
    """

    move_id: int
    source_id: str
    destination_id: str
    tokens: tuple[int, ...]
    prefix_digest: int
    opening: SequenceRequest


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """Nothing is left on a draining target, or no target uses a draining draft."""

    worker_id: str


@dataclass(slots=True)
class EmitTokens:
    """Newly committed output of a sequence, in order, each token once. `drafted`, `accepted` and `source` describe the
    round: of the tokens that were proposed and verified, those that became output, and who proposed them.

    `target_id` names the worker that sampled it.

    The first one of a sequence also has what was asked for of the prompt, `prompt_logprobs` for its tokens from the
    second on, and tells how many of its tokens were `cached`: a target took their KV over from other sequences.
    """

    sequence_id: int
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    logits_digests: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = 0
    target_id: str = ""
    source: ProposalSource | None = None


@dataclass(frozen=True, slots=True)
class SuspectSequence:
    """For whoever submits the sequence to another scheduler: see `Suspicion`."""

    sequence_id: int
    suspicion: Suspicion


@dataclass(frozen=True, slots=True)
class FinishSequence:
    sequence_id: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FailSequence:
    sequence_id: int
    error: str


class RefusalCause(Enum):
    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    INVALID = "invalid"
    KEY_LIMIT = "key_limit"
    """A limit of the request's API key."""


@dataclass(frozen=True, slots=True)
class RefuseSequence:
    """The sequence never became a live one. `retry_after_seconds`: when it can be one, where the core knows that."""

    sequence_id: int
    cause: RefusalCause
    message: str
    retry_after_seconds: float | None = None


Command = (
    SendStep | MoveKv | WorkerDrained | EmitTokens | SuspectSequence | FinishSequence | FailSequence | RefuseSequence
)
