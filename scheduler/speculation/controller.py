"""Decides how many tokens each sequence drafts in a round: the number with the highest goodput, often none.

After TurboSpec (arXiv 2406.14066, section 4): costs of steps and acceptance are learnt online, and after every cycle a
target gets, for each draft worker, the length with the most expected tokens per second (goodput.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from scheduler.config import Policy, SchedulerConfig
from scheduler.speculation.acceptance import PRIOR_CHANCE, ModelAcceptance, OwnAcceptance
from scheduler.speculation.cost_model import FORGET, TOKEN_SHARE, LinearCost
from scheduler.speculation.goodput import Choice, Cycle, Preparation, choose
from scheduler.state.fleet import Fleet
from scheduler.state.worker_base import DraftWork, TargetWork
from scheduler.state.workers import DraftWorker, Sequence, TargetWorker, Worker
from scheduler.statistics import Counters

_PROBE_EVERY = 100
"""Verify steps of a target between two probes, and between two plain steps while it drafts: about 1 % of its time."""
_WHOLE_EVERY = 16
"""One proposal in so many is verified whole, to learn how often tokens are accepted that seem not worth verifying."""
_SHORTEST_SECONDS = 1e-9
"""No step takes less time."""


@dataclass(slots=True)
class TargetFigures:
    """What was learnt of one target, and what was decided for it.

    `cost` is that of a step by (1, batched tokens, those of them to verify, tokens of KV that are read), `wire` the
    delay of an answer beyond its step. `typical` are the seconds of a step that verifies as the last one did, for which
    it read `kv_share` tokens of KV for each token to verify. `choices` are by draft worker. In a `plain_step`, no
    sequence drafts; `probe_due` lets one sequence that decodes plainly draft one token.
    """

    cost: LinearCost
    wire: LinearCost
    typical: float
    kv_share: float = 0.0
    choices: dict[str, Choice] = field(default_factory=dict)
    rounds: int = 0
    decided_for: int = 0
    steps: int = 0
    plain_step: bool = False
    probe_due: bool = False

    @property
    def drafting(self) -> bool:
        return any(choice.length for choice in self.choices.values())


@dataclass(slots=True)
class DraftFigures:
    """What was learnt of one draft worker: the `cost` of a step by (passes, tokens fed or proposed, tokens of KV that
    are read), the delay of an answer beyond its step (`wire`), the acceptance of its model, and in which share of
    verifications the outcome was `found` among those that it had prepared for."""

    cost: LinearCost
    wire: LinearCost
    acceptance: ModelAcceptance
    found: float = PRIOR_CHANCE


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
        self._kv_move_cost = LinearCost((1.0, TOKEN_SHARE))

    def target(self, target: TargetWorker) -> TargetFigures:
        figures = self._targets.get(target.worker_id)
        if figures is None:
            seconds = self._config.initial_step_seconds
            cost = LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**2, TOKEN_SHARE**3), seconds)
            figures = self._targets[target.worker_id] = TargetFigures(cost, LinearCost((1.0,)), seconds)
        return figures

    def draft(self, draft: DraftWorker) -> DraftFigures:
        figures = self._drafts.get(draft.worker_id)
        if figures is None:
            model_id = draft.spec.model_id or draft.worker_id
            acceptance = self._models.setdefault(model_id, ModelAcceptance(self._config.draft_length))
            cost = LinearCost((1.0, TOKEN_SHARE, TOKEN_SHARE**3), self._config.initial_step_seconds)
            figures = self._drafts[draft.worker_id] = DraftFigures(cost, LinearCost((1.0,)), acceptance)
        return figures

    def own(self, sequence: Sequence) -> OwnAcceptance:
        own = self._own.get(sequence.sequence_id)
        if own is None:
            own = self._own[sequence.sequence_id] = OwnAcceptance()
        return own

    @property
    def acceptance(self) -> float:
        """The mean over all draft models."""
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
        """The sequence has ended."""
        self._own.pop(sequence.sequence_id, None)

    def lose(self, worker_id: str) -> None:
        """The worker is gone; one that joins with the same id may be another one."""
        self._targets.pop(worker_id, None)
        self._drafts.pop(worker_id, None)
        for figures in self._targets.values():
            figures.choices.pop(worker_id, None)

    # --- what is learnt -----------------------------------------------------------------------------------------------

    def draft_step(self, draft: DraftWorker, work: DraftWork, seconds: float, elapsed: float | None) -> None:
        """A step took `seconds`, and its answer came after `elapsed`; None where the draft had another step then."""
        figures = self.draft(draft)
        if work.any:
            tokens = work.proposed_tokens + work.catch_up_tokens
            figures.cost.observe(seconds, work.passes, tokens, work.kv_tokens)
        if elapsed is not None:
            figures.wire.observe(elapsed - seconds, 1.0)

    def target_step(self, target: TargetWorker, work: TargetWork, seconds: float, elapsed: float | None) -> bool:
        """As `draft_step`; the rounds of the step are observed next. Whether the target begins or ceases to draft."""
        figures = self.target(target)
        features = (1.0, work.verify_tokens + work.prefill_tokens, work.verify_tokens, work.kv_tokens)
        if work.any:
            figures.cost.observe(seconds, *features)
        if elapsed is not None:
            figures.wire.observe(elapsed - seconds, 1.0)
        if not work.verify_tokens:
            return False
        figures.typical = figures.cost.predict(*features)
        figures.kv_share = work.kv_tokens / work.verify_tokens
        drafted = figures.drafting
        sequences = len(target.sequences)
        # Once in a cycle, or when the target has at least twice as many sequences as when it was decided last.
        if self._auto and figures.rounds and (figures.rounds >= sequences or sequences >= 2 * figures.decided_for):
            figures.rounds, figures.decided_for = 0, max(1, sequences)
            self._decide(target, figures)
        self._count_step(figures)
        return drafted != figures.drafting

    def _count_step(self, figures: TargetFigures) -> None:
        """Now and then a target that drafts takes a plain step, else it would never learn that plain steps cost less
        than it thinks; and a sequence that decodes plainly drafts a token, else nothing would be learnt of its draft.
        """
        figures.steps += 1
        figures.plain_step = figures.drafting and figures.steps % _PROBE_EVERY == 0
        if figures.steps % _PROBE_EVERY == _PROBE_EVERY // 2:
            figures.probe_due = True

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A round ended: `verified` tokens of the sequence's proposal were verified and `accepted` of them accepted."""
        target, draft, requested = sequence.target, sequence.draft, sequence.requested_draft_length
        if target is not None:
            self.target(target).rounds += 1
        if not requested or draft is None:
            if (known := self._own.get(sequence.sequence_id)) is not None:
                known.observe(0.0, 0)
            return
        own = self.own(sequence)
        model, confidences = self.draft(draft).acceptance, sequence.confidences
        if own.probing and accepted and target is not None and own.chance(model.chances[0]) < 0.5:
            self.target(target).probe_due = True  # against expectation: worth another probe at once
        own.probing = False
        taken = float(accepted)
        if accepted == verified < len(confidences):
            # The next token was not verified: it counts with its chance, else drafts cut short would seem bad.
            taken += model.chance(confidences[verified])
        tried = min(accepted + 1, requested)
        own.observe(taken, tried)
        model.observe(taken, tried, confidences[:verified], accepted, len(draft.sequences))

    def looked_for(self, draft: DraftWorker, found: bool) -> None:
        """The draft was asked to prepare for a verification that is over now; was its outcome among the prepared?"""
        figures = self.draft(draft)
        figures.found += (1 - FORGET) * (found - figures.found)
        self._counters.outcomes_sought += 1
        if found:
            self._counters.outcomes_found += 1

    def kv_moved(self, positions: int, seconds: float) -> None:
        self._kv_move_cost.observe(seconds, 1.0, positions)

    def relocation_seconds(
        self, source: TargetWorker, destination: TargetWorker, positions: int
    ) -> tuple[float, float]:
        """Predicted seconds to move this much KV, and to compute it at the destination. A destination that has not
        computed yet is taken to be as fast as the source."""
        cost = self.target(destination).cost
        if not cost.known:
            cost = self.target(source).cost
        return self._kv_move_cost.predict(1.0, positions), cost.predict(1.0, positions)

    # --- what is decided ----------------------------------------------------------------------------------------------

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        """Whether a sequence that begins to run will draft; if not, its draft KV can wait."""
        if not self._auto:
            return True
        return bool(self._fleet.drafts) and self._length(self.target(target), sequence) > 0

    def for_round(self, sequence: Sequence, longest: int) -> int:
        """Tokens to draft in the round that begins, 0 to `longest`."""
        target = sequence.target
        if not self._auto:
            return longest
        if target is None or not self._fleet.drafts:
            return 0
        figures, own = self.target(target), self.own(sequence)
        if figures.plain_step:
            return 0
        length = 1 if own.probing else self._length(figures, sequence)
        if not length and figures.probe_due:
            figures.probe_due, own.probing, length = False, True, 1
            self._counters.probes += 1
        return min(length, longest)

    def stays_plain(self, sequence: Sequence) -> bool:
        """Whether `for_round`, with a draft worker, will say 0 after the round under way, whatever comes of that."""
        target = sequence.target
        if target is None or not self._auto or sequence.request.draft_length is not None:
            return False
        figures = self.target(target)
        return not (figures.probe_due or figures.plain_step or self._length(figures, sequence))

    def prepares(self, draft: DraftWorker, target: TargetWorker) -> bool:
        """Whether an idle draft worker prepares proposals while this target verifies."""
        if not self._auto:
            return True
        choice = self.target(target).choices.get(draft.worker_id)
        return choice is not None and choice.prepares

    def preparation(self, draft: DraftWorker, targets: set[TargetWorker], sequences: int) -> Preparation | None:
        """What the draft can prepare for so many sequences while these targets verify them.

        A step that prepares takes a pass over the tokens that are verified, and one for each token of the proposals.
        All outcomes together may cost as much as these passes alone.
        """
        known = self.draft(draft)
        if not self._config.draft_ahead or not known.cost.known:
            return None
        of_pass, of_token, of_kv = known.cost.coefficients
        of_outcome = sequences * (of_token + of_kv * fmean([one.length for one in draft.sequences.values()] or [0]))
        outcomes = min(self._config.draft_ahead, int(of_pass / max(of_outcome, _SHORTEST_SECONDS)))
        verification = min(self.target(target).typical for target in targets)
        passes = int(verification / max(of_pass + outcomes * of_outcome, _SHORTEST_SECONDS))
        length = min(passes - 1, self._config.draft_length)
        return Preparation(outcomes, length, known.found) if outcomes and length > 0 else None

    def chances(self, sequence: Sequence, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` proposed tokens to be accepted with all before it."""
        model = ModelAcceptance(0) if sequence.draft is None else self.draft(sequence.draft).acceptance
        return model.survival(confidences, count)

    def worth_verifying(self, sequence: Sequence, confidences: bytes) -> int:
        """How many leading tokens of a proposal with these confidences are worth verifying."""
        target, draft = sequence.target, sequence.draft
        choice = None if target is None or draft is None else self.target(target).choices.get(draft.worker_id)
        whole = sequence.request.draft_length is not None or sequence.length % _WHOLE_EVERY == 0
        if choice is None or whole or self.own(sequence).probing:
            return len(confidences)
        for length, chance in enumerate(self.chances(sequence, confidences, len(confidences))):
            if chance < choice.verify_price:
                return length
        return len(confidences)

    def _length(self, figures: TargetFigures, sequence: Sequence) -> int:
        """The length that pays for this sequence. With a draft worker that no sequence has tried, 1."""
        choice = figures.choices.get(self._draft_of(sequence).worker_id)
        if choice is None:
            return 1
        if not choice.length or not _follows_choice(sequence):
            return 0
        return min(choice.length, len(self.own(sequence).survival(choice.chances, choice.price)))

    def _draft_of(self, sequence: Sequence) -> DraftWorker:
        """The draft worker that has the sequence, or would get it."""
        return sequence.draft or min(self._fleet.drafts.values(), key=lambda draft: len(draft.sequences))

    def _decide(self, target: TargetWorker, figures: TargetFigures) -> None:
        """Goes by as many of the sequences as one draft step takes: more would not change much."""
        members: dict[str, list[Sequence]] = {}
        for sequence in islice(target.sequences.values(), self._config.proposals_per_step):
            if not self._fleet.drafts:
                break
            draft = self._draft_of(sequence)
            if self.draft(draft).cost.known:
                members.setdefault(draft.worker_id, []).append(sequence)
        for worker_id, sequences in members.items():
            draft = self._fleet.drafts[worker_id]
            cycle = self._cycle(figures, draft, fmean(one.length for one in sequences))
            figures.choices[worker_id] = choose(
                cycle,
                self.draft(draft).acceptance.chances,
                [self.own(one) if _follows_choice(one) else None for one in sequences],
                figures.choices.get(worker_id),
                self.preparation(draft, {target}, cycle.count) if cycle.serial else None,
            )

    def _cycle(self, figures: TargetFigures, draft: DraftWorker, length: float) -> Cycle:
        """As if all sequences of the target had this length and were drafted for by this worker."""
        base, token, verified, kv = figures.cost.coefficients
        known = self.draft(draft)
        of_pass, of_token, of_kv = known.cost.coefficients
        count = figures.decided_for
        return Cycle(
            count=count,
            load=max(count, len(draft.sequences)),
            parts=max(1.0, count / self._config.batch_size),
            base=max(base, _SHORTEST_SECONDS),
            row=token + verified,
            kv=kv * length,
            wire=figures.wire.coefficients[0],
            of_pass=of_pass,
            of_token=of_token + of_kv * length,
            draft_wire=known.wire.coefficients[0],
        )


def _follows_choice(sequence: Sequence) -> bool:
    """Whether the controller decides how many tokens the sequence drafts."""
    return sequence.request.draft_length is None and not sequence.drafting_refused and not sequence.suspected
