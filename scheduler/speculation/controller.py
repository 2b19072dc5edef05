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
from scheduler.state.worker_records import Work
from scheduler.state.workers import Drafter, DraftWorker, Sequence, TargetWorker, Worker
from scheduler.statistics import Counters

_PROBE_EVERY = 100
"""Verify steps of a target between two probes, and between two plain steps while it drafts: about 1 % of its time."""
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
            base, token, verified, kv, *_ = target.cost.coefficients
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
        of_own = (work.own_passes, work.proposed) if target.drafts_itself else ()
        features = (1.0, work.decoded + work.fed, work.decoded, work.kv, *of_own)
        if work.decoded or work.fed:
            figures.cost.observe(seconds, *features)
        if elapsed is not None:
            figures.wire.observe(elapsed - seconds)
        if not work.decoded:
            return False
        figures.step.observe(seconds)
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

    def observe(self, sequence: Sequence, accepted: int) -> None:
        """A round ended: so many tokens of the sequence's proposal were accepted."""
        target, requested = sequence.target, sequence.requested_draft_length
        if target is not None:
            target.figures.rounds += 1
        drafter = self._present_drafter(sequence)
        model = None if drafter is None else drafter.figures.acceptance
        if not requested or drafter is None or model is None:
            return
        if sequence.probing:
            sequence.probing = False
            if accepted and target is not None and model.chances[0] < 0.5:
                target.figures.probe_due = True  # against expectation: worth another probe at once
        model.observe(accepted, requested, len(drafter.sequences))

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
        if target is None or self._drafter(sequence) is None:
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
        """Whether `for_round` will say 0 after the round under way, whatever comes of that."""
        target = sequence.target
        if sequence.request.expected_output:
            return False
        if self._drafter(sequence) is None:
            return True
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

    def preparation(self, draft: Drafter, targets: set[TargetWorker], sequences: int) -> Preparation | None:
        """What the draft can prepare for so many sequences while these targets verify them.

        A step that prepares takes a pass over the tokens that are verified, and one for each token of the proposals.
        All outcomes together may cost as much as these passes alone.
        """
        if not self._config.draft_ahead or isinstance(draft, TargetWorker) or not draft.figures.cost.known:
            return None
        known = draft.figures
        of_pass, of_token, of_kv = known.cost.coefficients
        of_outcome = sequences * (of_token + of_kv * fmean([one.length for one in draft.sequences.values()] or [0]))
        outcomes = min(self._config.draft_ahead, int(of_pass / max(of_outcome, _SHORTEST_SECONDS)))
        verification = min(target.figures.step.seconds for target in targets)
        passes = int(verification / max(of_pass + outcomes * of_outcome, _SHORTEST_SECONDS))
        length = min(passes - 1, self._config.draft_length)
        return Preparation(outcomes, length, known.found) if outcomes and length > 0 else None

    def _length(self, figures: TargetFigures, sequence: Sequence) -> int:
        """The length that pays. With a drafter that no sequence has tried, 1."""
        drafter = self._drafter(sequence)
        choice = None if drafter is None else figures.choices.get(drafter.worker_id)
        return 1 if choice is None else choice.length

    @staticmethod
    def _present_drafter(sequence: Sequence) -> Drafter | None:
        """The sequence's target, if that drafts itself; else the draft worker that has the sequence."""
        target = sequence.target
        return target if target is not None and target.drafts_itself else sequence.draft

    def _drafter(self, sequence: Sequence) -> Drafter | None:
        """As `_present_drafter`, or the draft worker that would get the sequence."""
        present, drafts = self._present_drafter(sequence), self._fleet.drafts.values()
        return present or min(drafts, key=lambda draft: len(draft.sequences), default=None)

    def acceptance_of(self, worker_id: str) -> tuple[float, ...]:
        """By place, of what a draft worker or a target that drafts itself proposes."""
        worker = self._fleet.find(worker_id)
        model = None if worker is None else worker.figures.acceptance
        return () if model is None else tuple(model.chances)

    def _decide(self, target: TargetWorker, figures: TargetFigures) -> None:
        """Goes by as many of the sequences as one draft step takes: more would not change much."""
        members: dict[Drafter, list[Sequence]] = {}
        for sequence in islice(target.sequences.values(), self._config.proposals_per_step):
            drafter = self._drafter(sequence)
            if drafter is None:
                break
            if drafter.figures.cost.known:
                members.setdefault(drafter, []).append(sequence)
        for drafter, sequences in members.items():
            cycle = self._cycle(figures, drafter, fmean(one.length for one in sequences))
            figures.choices[drafter.worker_id] = choose(
                cycle,
                [] if drafter.figures.acceptance is None else drafter.figures.acceptance.chances,
                fmean(_follows_choice(one) for one in sequences),
                figures.choices.get(drafter.worker_id),
                self.preparation(drafter, {target}, cycle.count) if cycle.serial else None,
            )
        figures.drafting = any(choice.length for choice in figures.choices.values())

    def _cycle(self, figures: TargetFigures, drafter: Drafter, length: float) -> Cycle:
        """As if all sequences of the target had this length and were drafted for by this worker."""
        base, token, verified, kv, *of_own = figures.cost.coefficients
        count, wire, draft_wire = figures.decided_for, figures.wire.seconds, 0.0
        parts = max(1.0, count / self._config.batch_size)
        if isinstance(drafter, DraftWorker):
            of_pass, of_token, of_kv = drafter.figures.cost.coefficients
            of_token += of_kv * length
            draft_wire = drafter.figures.wire.seconds
        else:
            # Its passes are in each of the steps, which are sent before the answer to the one before has come.
            (of_pass, of_token), wire = of_own, 0.0
        return Cycle(
            count=count,
            load=max(count, len(drafter.sequences)),
            parts=parts,
            base=max(base, _SHORTEST_SECONDS),
            row=token + verified,
            kv=kv * length,
            wire=wire,
            of_pass=of_pass,
            of_token=of_token,
            draft_wire=draft_wire,
            shared=self._config.shared_device or bool(of_own),
        )


def _follows_choice(sequence: Sequence) -> bool:
    """Whether the controller decides how many tokens the sequence drafts."""
    return sequence.request.draft_length is None and not sequence.drafting_refused and not sequence.suspected
