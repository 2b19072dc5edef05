"""Decides how many tokens each sequence drafts in a round: the number with the highest goodput, often none.

After TurboSpec (arXiv 2406.14066, section 4): costs of steps and acceptance are learnt online, and after every cycle a
target gets, for each draft worker, the length with the most expected tokens per second (goodput.py).
"""

from __future__ import annotations

from itertools import islice
from statistics import fmean

from scheduler.config import Policy, SchedulerConfig
from scheduler.speculation.acceptance import ModelAcceptance
from scheduler.speculation.cost_model import FORGET, TOKEN_SHARE, LinearCost
from scheduler.speculation.goodput import Cycle, Preparation, TargetFigures, choose
from scheduler.state.fleet import Fleet
from scheduler.state.workers import DraftWorker, Sequence, TargetWorker, Work, Worker
from scheduler.statistics import Counters

_PROBE_EVERY = 100
"""Verify steps of a target between two probes, and between two plain steps while it drafts: about 1 % of its time."""
_WHOLE_EVERY = 16
"""One proposal in so many is verified whole, to learn how often tokens are accepted that seem not worth verifying."""
_SHORTEST_SECONDS = 1e-9
"""No step takes less time."""


class Controller:
    """Changes the figures of workers and sequences. Policies other than AUTO draft all they may."""

    def __init__(self, config: SchedulerConfig, fleet: Fleet, counters: Counters) -> None:
        self._config = config
        self._fleet = fleet
        self._counters = counters
        self._auto = config.policy is Policy.AUTO
        self._kv_move_cost = LinearCost((1.0, TOKEN_SHARE))

    @property
    def acceptance(self) -> float:
        """The mean over all draft models that were tried."""
        return fmean([model.rate for model in self._fleet.models.values() if model.known] or [ModelAcceptance(0).rate])

    def law(self, worker: Worker) -> tuple[float, float]:
        """Seconds of a target's step, or of a draft's pass: by itself, and for each token with the KV read for it."""
        if isinstance(worker, TargetWorker):
            target = worker.figures
            base, token, verified, kv = target.cost.coefficients
            return base, token + verified + kv * target.kv_share
        base, token, kv = worker.figures.cost.coefficients
        return base, token + kv * fmean([one.length for one in worker.sequences.values()] or [0])

    def lose(self, worker_id: str) -> None:
        """The worker is gone; one that joins with the same id may be another one."""
        for target in self._fleet.targets.values():
            figures = target.figures
            figures.choices.pop(worker_id, None)
            figures.drafting = any(choice.length for choice in figures.choices.values())

    # --- what is learnt -----------------------------------------------------------------------------------------------

    def draft_step(self, draft: DraftWorker, work: Work, seconds: float, elapsed: float | None) -> None:
        """A step took `seconds`, and its answer came after `elapsed`; None where the draft had another step then."""
        figures = draft.figures
        if work.decoded or work.fed:
            figures.cost.observe(seconds, work.passes, work.decoded + work.fed, work.kv)
        if elapsed is not None:
            figures.wire.observe(elapsed - seconds)

    def target_step(self, target: TargetWorker, work: Work, seconds: float, elapsed: float | None) -> bool:
        """As `draft_step`; the rounds of the step are observed next. Whether the target begins or ceases to draft."""
        figures = target.figures
        features = (1.0, work.decoded + work.fed, work.decoded, work.kv)
        if work.decoded or work.fed:
            figures.cost.observe(seconds, *features)
        if elapsed is not None:
            figures.wire.observe(elapsed - seconds)
        if not work.decoded:
            return False
        figures.features = features
        figures.kv_share = work.kv / work.decoded
        drafted, sequences = figures.drafting, len(target.sequences)
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
            target.figures.rounds += 1
        if not requested or draft is None:
            return
        model, confidences = draft.figures.acceptance, sequence.confidences
        if sequence.probing:
            sequence.probing = False
            if accepted and target is not None and model.chances[0] < 0.5:
                target.figures.probe_due = True  # against expectation: worth another probe at once
        # A next token that was not verified counts with its chance, else drafts cut short would seem bad.
        cut_short = accepted == verified < len(confidences)
        taken = accepted + model.chance(confidences[verified]) if cut_short else float(accepted)
        tried = accepted + 1 if accepted < requested else requested
        model.observe(taken, tried, confidences[:verified], accepted, len(draft.sequences))

    def looked_for(self, draft: DraftWorker, found: bool) -> None:
        """The draft was asked to prepare for a verification that is over now; was its outcome among the prepared?"""
        figures = draft.figures
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
        cost = destination.figures.cost
        if not cost.known:
            cost = source.figures.cost
        return self._kv_move_cost.predict(1.0, positions), cost.predict(1.0, positions)

    # --- what is decided ----------------------------------------------------------------------------------------------

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        """Whether a sequence that begins to run will draft; if not, its draft KV can wait."""
        if not self._auto:
            return True
        return bool(self._fleet.drafts) and self._length(target.figures, sequence) > 0

    def for_round(self, sequence: Sequence, longest: int) -> int:
        """Tokens to draft in the round that begins, 0 to `longest`; for AUTO alone."""
        target = sequence.target
        if target is None or not self._fleet.drafts:
            return 0
        figures = target.figures
        if figures.plain_step:
            return 0
        length = 1 if sequence.probing else self._length(figures, sequence)
        if not length and figures.probe_due:
            figures.probe_due, sequence.probing, length = False, True, 1
            self._counters.probes += 1
        return min(length, longest)

    def stays_plain(self, sequence: Sequence) -> bool:
        """Whether `for_round`, with a draft worker, will say 0 after the round under way, whatever comes of that."""
        target = sequence.target
        if target is None or not self._auto or sequence.request.draft_length is not None:
            return False
        figures = target.figures
        return not (figures.probe_due or figures.plain_step or self._length(figures, sequence))

    def prepares(self, draft: DraftWorker, target: TargetWorker) -> bool:
        """Whether an idle draft worker prepares proposals while this target verifies."""
        if not self._auto:
            return True
        choice = target.figures.choices.get(draft.worker_id)
        return choice is not None and choice.prepares

    def preparation(self, draft: DraftWorker, targets: set[TargetWorker], sequences: int) -> Preparation | None:
        """What the draft can prepare for so many sequences while these targets verify them.

        A step that prepares takes a pass over the tokens that are verified, and one for each token of the proposals.
        All outcomes together may cost as much as these passes alone.
        """
        known = draft.figures
        if not self._config.draft_ahead or not known.cost.known:
            return None
        of_pass, of_token, of_kv = known.cost.coefficients
        of_outcome = sequences * (of_token + of_kv * fmean([one.length for one in draft.sequences.values()] or [0]))
        outcomes = min(self._config.draft_ahead, int(of_pass / max(of_outcome, _SHORTEST_SECONDS)))
        verification = min(target.figures.typical for target in targets)
        passes = int(verification / max(of_pass + outcomes * of_outcome, _SHORTEST_SECONDS))
        length = min(passes - 1, self._config.draft_length)
        return Preparation(outcomes, length, known.found) if outcomes and length > 0 else None

    def chances(self, sequence: Sequence, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` proposed tokens to be accepted with all before it."""
        model = ModelAcceptance(0) if sequence.draft is None else sequence.draft.figures.acceptance
        return model.survival(confidences, count)

    def worth_verifying(self, sequence: Sequence, confidences: bytes) -> int:
        """How many leading tokens of a proposal with these confidences are worth verifying."""
        target, draft = sequence.target, sequence.draft
        choice = None if target is None or draft is None else target.figures.choices.get(draft.worker_id)
        whole = sequence.request.draft_length is not None or sequence.length % _WHOLE_EVERY == 0
        if choice is None or whole or sequence.probing:
            return len(confidences)
        for length, chance in enumerate(self.chances(sequence, confidences, len(confidences))):
            if chance < choice.verify_price:
                return length
        return len(confidences)

    def _length(self, figures: TargetFigures, sequence: Sequence) -> int:
        """The length that pays. With a draft worker that no sequence has tried, 1."""
        choice = figures.choices.get(self._draft_of(sequence).worker_id)
        return 1 if choice is None else choice.length

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
            if draft.figures.cost.known:
                members.setdefault(draft.worker_id, []).append(sequence)
        for worker_id, sequences in members.items():
            draft = self._fleet.drafts[worker_id]
            cycle = self._cycle(figures, draft, fmean(one.length for one in sequences))
            figures.choices[worker_id] = choose(
                cycle,
                draft.figures.acceptance.chances,
                fmean(_follows_choice(one) for one in sequences),
                figures.choices.get(worker_id),
                self.preparation(draft, {target}, cycle.count) if cycle.serial else None,
            )
        figures.drafting = any(choice.length for choice in figures.choices.values())

    def _cycle(self, figures: TargetFigures, draft: DraftWorker, length: float) -> Cycle:
        """As if all sequences of the target had this length and were drafted for by this worker."""
        base, token, verified, kv = figures.cost.coefficients
        known = draft.figures
        of_pass, of_token, of_kv = known.cost.coefficients
        count = figures.decided_for
        return Cycle(
            count=count,
            load=max(count, len(draft.sequences)),
            parts=max(1.0, count / self._config.batch_size),
            base=max(base, _SHORTEST_SECONDS),
            row=token + verified,
            kv=kv * length,
            wire=figures.wire.seconds,
            of_pass=of_pass,
            of_token=of_token + of_kv * length,
            draft_wire=known.wire.seconds,
            shared=self._config.shared_device,
        )


def _follows_choice(sequence: Sequence) -> bool:
    """Whether the controller decides how many tokens the sequence drafts."""
    return sequence.request.draft_length is None and not sequence.drafting_refused and not sequence.suspected
