"""Decides how many tokens each sequence drafts in a round: what the most goodput takes, often none.

After TurboSpec (arXiv 2406.14066, section 4): costs of steps and acceptance are learnt online, and after every round a
target gets, for each draft worker, the length with the most expected tokens a second (`goodput`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice, takewhile
from statistics import fmean

from scheduler.config import Policy, SchedulerConfig
from scheduler.speculation.acceptance import ModelAcceptance, OwnAcceptance
from scheduler.speculation.cost_model import TOKEN_SHARE, LinearCost
from scheduler.speculation.draft_ahead import DraftAhead, outcomes_that_fit
from scheduler.speculation.goodput import Ahead, Choice, Cycle, choose, worth_drafting
from scheduler.state.fleet import Fleet
from scheduler.state.worker_base import DraftWork, TargetWork
from scheduler.state.workers import STEADY_KV_LAG, DraftWorker, Sequence, TargetWorker, Worker
from scheduler.statistics import Counters

_PROBE_SHARE = 0.01
"""Of the time, for looking at what is not done now: the most that is lost where nothing ever changes."""
_WHOLE_EVERY = 16
"""One proposal in so many is verified whole, to see what tokens that seemed not worth it come to: 6 % of their cost."""


@dataclass(slots=True)
class TargetFigures:
    """Of one target: what its steps cost, by (1, batched tokens, those of them to verify, tokens of KV that are read),
    and what was decided for it."""

    cost: LinearCost
    wire: LinearCost
    """Seconds by which an idle target's answer is later than its step takes."""
    typical: float
    """Seconds of a step that verifies as the last one did."""
    kv_share: float = 0.0
    """Tokens of KV that the last one read for each that it verified."""
    choices: dict[str, Choice] = field(default_factory=dict)
    rounds: int = 0
    decided_for: int = 0
    plain_step: bool = False
    credit: float = math.inf
    """Seconds saved up for probes."""

    @property
    def drafting(self) -> bool:
        return any(choice.length for choice in self.choices.values())


@dataclass(slots=True)
class DraftFigures:
    """Of one draft worker: what its steps cost, by (passes, tokens fed or proposed, tokens of KV that are read), and
    its model's acceptance."""

    cost: LinearCost
    wire: LinearCost
    """Seconds by which an idle draft's answer is later than its step takes."""
    acceptance: ModelAcceptance
    ahead: DraftAhead


class Controller:
    """Owns all that is learnt of workers and sequences, by their ids. Policies other than AUTO draft all they may."""

    def __init__(self, config: SchedulerConfig, fleet: Fleet, counters: Counters) -> None:
        self._config = config
        self._fleet = fleet
        self._counters = counters
        self._auto = config.policy is Policy.AUTO
        self._targets: dict[str, TargetFigures] = {}
        self._drafts: dict[str, DraftFigures] = {}
        self._models: dict[str, ModelAcceptance] = {}
        self._own: dict[int, OwnAcceptance] = {}
        self.kv_moves = LinearCost((1.0, TOKEN_SHARE))
        """What a move of KV between targets takes, by (1, positions)."""

    def target(self, target: TargetWorker) -> TargetFigures:
        found, first = self._targets.get(target.worker_id), self._config.initial_step_seconds
        if found is None:
            found = self._targets[target.worker_id] = TargetFigures(
                LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**2, TOKEN_SHARE**3), first), LinearCost((1.0,)), first
            )
        return found

    def draft(self, draft: DraftWorker) -> DraftFigures:
        found, model = self._drafts.get(draft.worker_id), draft.spec.model_id or draft.worker_id
        if found is None:
            acceptance = self._models.setdefault(model, ModelAcceptance(self._config.draft_length))
            found = self._drafts[draft.worker_id] = DraftFigures(
                LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**3), self._config.initial_step_seconds),
                LinearCost((1.0,)),
                acceptance,
                DraftAhead(self._config.draft_length),
            )
        return found

    def own(self, sequence: Sequence) -> OwnAcceptance:
        found = self._own.get(sequence.sequence_id)
        if found is None:
            found = self._own[sequence.sequence_id] = OwnAcceptance()
        return found

    @property
    def acceptance(self) -> float:
        """Over all draft models, in equal parts."""
        return fmean([model.rate for model in self._models.values()] or [ModelAcceptance(0).rate])

    def law(self, worker: Worker) -> tuple[float, float]:
        """Seconds of a target's step, or of a draft's pass: by itself, and for each token with the KV read for it."""
        if isinstance(worker, TargetWorker):
            target = self.target(worker)
            base, token, verified, kv = target.cost.coefficients
            return base, token + verified + kv * target.kv_share
        base, token, kv = self.draft(worker).cost.coefficients
        return base, token + kv * fmean([one.length for one in worker.sequences.values()] or [0])

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._own.pop(sequence.sequence_id, None)

    def lose(self, worker_id: str) -> None:
        """The worker is gone; one that comes under its name may be another."""
        self._targets.pop(worker_id, None)
        self._drafts.pop(worker_id, None)
        for figures in self._targets.values():
            figures.choices.pop(worker_id, None)

    # --- what is learnt -----------------------------------------------------------------------------------------------

    def draft_step(self, draft: DraftWorker, work: DraftWork, seconds: float, elapsed: float | None) -> None:
        """A step's answer came. `elapsed` are the seconds between both, None where the draft had another step then."""
        known = self.draft(draft)
        if work.any:
            known.cost.observe(seconds, work.passes, work.proposed_tokens + work.catch_up_tokens, work.kv_tokens)
        if elapsed is not None:
            known.wire.observe(elapsed - seconds, 1.0)

    def target_step(self, target: TargetWorker, work: TargetWork, seconds: float, elapsed: float | None) -> bool:
        """A step's answer came, whose rounds are observed next. Whether the target begins to draft or ceases to.

        `elapsed` are the seconds between step and answer, None where the target had another step meanwhile.
        """
        figures, count = self.target(target), len(target.sequences)
        features = (1.0, work.verify_tokens + work.prefill_tokens, work.verify_tokens, work.kv_tokens)
        if work.any:
            figures.cost.observe(seconds, *features)
        if elapsed is not None:
            figures.wire.observe(elapsed - seconds, 1.0)
        if not work.verify_tokens:
            return False
        figures.typical = figures.cost.predict(*features)
        figures.kv_share = work.kv_tokens / work.verify_tokens
        figures.credit += _PROBE_SHARE * figures.typical
        drafted, figures.plain_step = figures.drafting, False
        if not self._auto or figures.rounds < count < 2 * figures.decided_for:
            return False
        figures.rounds, figures.decided_for = 0, max(1, count)
        self._decide(target, figures)
        # Else a target that always drafts would never learn that plain steps cost less than it thinks.
        figures.plain_step = figures.drafting and figures.credit >= figures.typical
        if figures.plain_step:
            figures.credit = 0.0
        return drafted != figures.drafting

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A round ended: of the tokens that its draft was asked for so many were verified, and so many accepted."""
        target, draft, requested = sequence.target, sequence.draft, sequence.requested_draft_length
        if target is not None:
            self.target(target).rounds += 1
        if not requested or draft is None:
            self.own(sequence).observe(0.0, 0)
            return
        own, model, taken = self.own(sequence), self.draft(draft).acceptance, float(accepted)
        confidences = sequence.confidences
        if accepted == verified < len(confidences):
            # Had the next one been worth verifying: else drafts that are often cut short would seem to be bad ones.
            taken += model.chance(confidences[verified])
        if own.probing and accepted and own.survival(model.chances)[:1] < [0.5] and target is not None:
            self.target(target).credit = math.inf  # against the odds: worth another look at once
        tried, own.probing = accepted + (accepted < requested), False
        own.observe(taken, tried)
        model.observe(taken, tried, confidences[:verified], accepted, len(draft.sequences))

    def prepared(self, draft: DraftWorker, length: int, seconds: float, late: bool, now: float) -> None:
        """The draft has prepared proposals of up to so many tokens in so many seconds, perhaps after the verdict."""
        self.draft(draft).ahead.ended(length, seconds, late, now)

    def looked_for(self, draft: DraftWorker, target: TargetWorker, prepared: bool, found: bool, now: float) -> None:
        """A verification of what this draft had proposed is over; whether it was to prepare, and for this outcome."""
        self.draft(draft).ahead.verified(self.target(target).typical, prepared, found, now)
        self._counters.outcomes_sought += prepared
        self._counters.outcomes_found += prepared and found

    def relocation_seconds(
        self, source: TargetWorker, destination: TargetWorker, positions: int
    ) -> tuple[float, float]:
        """Predicted seconds to move this much KV, and to compute it at the destination. A destination that has not
        computed yet is taken to be as fast as the source."""
        cost = self.target(destination).cost
        if not cost.known:
            cost = self.target(source).cost
        return self.kv_moves.predict(1.0, positions), cost.predict(1.0, positions)

    # --- what is decided ----------------------------------------------------------------------------------------------

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        """Whether a sequence that begins to run will draft; if not, its draft KV can wait."""
        if not self._auto or not self._fleet.drafts:
            return not self._auto
        return self._length(self.target(target), sequence) > 0

    def for_round(self, sequence: Sequence, longest: int) -> int:
        """Tokens to draft in the round that begins, 0 to `longest`."""
        target = sequence.target
        if not self._auto or target is None or not self._fleet.drafts:
            return 0 if self._auto else longest
        figures, own = self.target(target), self.own(sequence)
        if figures.plain_step:
            return 0
        length = 1 if own.probing else self._length(figures, sequence)
        if not length and figures.credit >= self._probe_seconds(figures, sequence):
            # What was saved up beyond that is lost: else probes would come in bursts.
            figures.credit, own.probing, length = 0.0, True, 1
            self._counters.probes += 1
        return min(length, longest)

    def proposes_at_once(self, draft: DraftWorker, kv_lag: int) -> bool:
        """Whether a draft with so large a KV lag is to propose; else it catches up during a plain round.

        It may hold its sequence up for as long as a pass takes.
        """
        of_pass, of_token, _ = self.draft(draft).cost.coefficients
        return not self._auto or kv_lag <= STEADY_KV_LAG or of_token * kv_lag <= of_pass

    def ahead(self, draft: DraftWorker, sequences: list[Sequence]) -> tuple[int, int]:
        """For how many outcomes of each sequence an idle draft is to prepare while targets verify them, with how many
        tokens each: (0, 0) for none."""
        targets = [one.target for one in sequences if one.target is not None]
        if not targets:
            return 0, 0
        if not self._auto:
            return self._fitting(draft, len(sequences), fmean(one.length for one in sequences))
        choices = [self.target(target).choices.get(draft.worker_id) for target in targets]
        return min((0, 0) if choice is None else choice.ahead for choice in choices)

    def _fitting(self, draft: DraftWorker, sequences: int, length: float) -> tuple[int, int]:
        """Outcomes of each of so many sequences of this mean length to prepare for, and tokens of each."""
        known = self.draft(draft)
        if not self._config.draft_ahead or not known.cost.known:
            return 0, 0
        of_pass, of_token, of_kv = known.cost.coefficients
        outcomes = outcomes_that_fit(self._config.draft_ahead, of_pass, (of_token + of_kv * length) * sequences)
        return (outcomes, min(self._config.draft_length, known.ahead.length)) if outcomes else (0, 0)

    def chances(self, sequence: Sequence, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` proposed tokens to be accepted with all before it."""
        model = ModelAcceptance(0) if sequence.draft is None else self.draft(sequence.draft).acceptance
        return model.survival(confidences, count)

    def worth_verifying(self, sequence: Sequence, confidences: bytes) -> int:
        """How many leading tokens of a proposal with these confidences are."""
        target, draft = sequence.target, sequence.draft
        choice = None if target is None or draft is None else self.target(target).choices.get(draft.worker_id)
        whole = sequence.request.draft_length is not None or sequence.length % _WHOLE_EVERY == 0
        if choice is None or whole or self.own(sequence).probing:
            return len(confidences)
        found = self.chances(sequence, confidences, len(confidences))
        return sum(1 for _ in takewhile(choice.row_price.__le__, found))

    def _length(self, figures: TargetFigures, sequence: Sequence) -> int:
        """What pays for this sequence. A draft worker that nobody tried is tried."""
        choice = figures.choices.get(self._draft_of(sequence).worker_id)
        if choice is None or not choice.length:
            return int(choice is None)
        return min(choice.length, len(worth_drafting(self.own(sequence), sequence, choice)))

    def _draft_of(self, sequence: Sequence) -> DraftWorker:
        """The draft worker that has the sequence, or would get it."""
        return sequence.draft or min(self._fleet.drafts.values(), key=lambda draft: len(draft.sequences))

    def _probe_seconds(self, figures: TargetFigures, sequence: Sequence) -> float:
        """By how much all others are held up at most."""
        known = self.draft(self._draft_of(sequence))
        drafting = known.wire.predict(1.0) + known.cost.predict(1.0, 1.0, sequence.length)
        return drafting + figures.cost.predict(0.0, 1.0, 1.0)

    def _decide(self, target: TargetWorker, figures: TargetFigures) -> None:
        """Goes by as many of the sequences as one draft step takes: more would not change much."""
        members: dict[str, list[Sequence]] = {}
        every = 1 + max(0, len(target.sequences) - 1) // self._config.proposals_per_step
        for sequence in islice(target.sequences.values(), 0, None, every) if self._fleet.drafts else ():
            draft = self._draft_of(sequence)
            if self.draft(draft).cost.known:
                members.setdefault(draft.worker_id, []).append(sequence)
        for worker_id, sequences in members.items():
            figures.choices[worker_id] = self._choose(target, figures, self._fleet.drafts[worker_id], sequences)

    def _choose(
        self, target: TargetWorker, figures: TargetFigures, draft: DraftWorker, members: list[Sequence]
    ) -> Choice:
        """The choice for one draft worker, as if all sequences of the target were like `members`, which it has."""
        (base, token, verified, kv), known = figures.cost.coefficients, self.draft(draft)
        of_pass, of_feed, of_kv = known.cost.coefficients
        length, count = fmean(one.length for one in members), figures.decided_for
        base, of_feed = max(base, 1e-9), max(of_feed, 1e-9)  # nothing takes no time at all
        cycle = Cycle(
            count=count,
            load=max(count, len(draft.sequences)),
            parts=max(1.0, count / self._config.batch_size),
            base=base,
            row=token + verified,
            kv=kv * length,
            wire=figures.wire.coefficients[0],
            of_pass=of_pass,
            of_token=of_feed + of_kv * length,
            of_feed=of_feed,
            draft_wire=known.wire.coefficients[0],
        )
        ahead = Ahead(*self._fitting(draft, count, length), known.ahead.found) if cycle.serial else Ahead()
        before = figures.choices.get(draft.worker_id)
        return choose(cycle, known.acceptance.chances, [(one, self.own(one)) for one in members], before, ahead)
