"""Who drafts how much in its next round: the configured length, or what pays (policy AUTO)."""

from __future__ import annotations

import math
from itertools import islice, takewhile
from typing import Protocol

from scheduler.confidence import ConfidenceBins
from scheduler.config import Policy, SchedulerConfig
from scheduler.draft_plan import CatchUp, CellCosts, Population, StepCosts, best_plan
from scheduler.fleet import Fleet
from scheduler.sequence import Sequence
from scheduler.statistics import Counters
from scheduler.step_times import Acceptance, DraftTimes, PromptShare, ProposedShare, TargetTimes, expected_commit
from scheduler.worker_book import DraftBook, TargetBook

_LEAST_BASE_SHARE = 0.1
PROBE_SHARE = 0.003
"""Of a target's time, spent on drafting where that is not expected to pay."""
_PROBE_LENGTH = 1
_FREE_PROBE_LACK = 24
"""A probe that is free is not worth more than this many tokens that the draft has to take in for it."""
_UNLIKELY = 0.3
_PLAIN_ROUNDS_BETWEEN_PROBES = 12
_FORGET_ROUND = 0.95
_FORGET_PLAIN_ROUND = 0.98
_COMMON_FORGETS_PLAIN_ROUND = 0.999
_OWN_PRIOR_WEIGHT = 3.0
_SAMPLE = 64
_ACCEPTANCE_GROUPS = 5
_TRIAL_LENGTHS = (1, 0)
_TRIAL_STEPS = 4
_MOST_TRIAL_STEPS = 40
_MOST_STEPS_BETWEEN_PLAIN_ONES = 256
_MOST_ROUNDS_BETWEEN_PLANS = 32
_ROUNDS_TO_REPAY = 100.0
"""By then a change to speculation must have made up for what it cost."""
# One proposal in so many is verified whole, to see what the tokens that were not worth it would have come to.
_WHOLE_PROPOSAL_EVERY = 16


class DraftLengths(Protocol):
    """Chooses draft lengths. What a request asks for, and what fits, is settled elsewhere."""

    eager_lack: float
    """A draft that lacks more tokens than that catches up beside a plain round instead of proposing at once, unless the
    two take turns."""

    confidence: ConfidenceBins

    def for_newcomer(self, target: TargetBook, longest: int) -> int:
        """What a sequence that enters the window will probably draft; 0: its draft KV can wait."""
        ...

    def for_round(self, sequence: Sequence, longest: int) -> int:
        """Tokens to draft in the round that begins, 0 to `longest`; to be called once a round."""
        ...

    def expected_tokens(self, sequence: Sequence, drafted: int) -> float:
        """Tokens that a round with so many draft tokens is expected to commit, the target's own token included."""
        ...

    def promising(self, sequence: Sequence, confidences: bytes) -> list[float]:
        """The chances of as many leading tokens of a proposal with these confidences as are worth verifying."""
        ...

    def step_answered(self, target: TargetBook, now: float) -> None:
        """A verify step came back; its rounds are about to be observed."""
        ...

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A round ended: of the tokens that its draft was asked for so many were verified, and so many accepted."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


class FixedDraftLengths:
    """Always the longest allowed."""

    eager_lack = math.inf

    def __init__(self, common: Acceptance) -> None:
        self.confidence = ConfidenceBins()
        self._common = common

    def for_newcomer(self, target: TargetBook, longest: int) -> int:
        return longest

    def for_round(self, sequence: Sequence, longest: int) -> int:
        return longest

    def expected_tokens(self, sequence: Sequence, drafted: int) -> float:
        """Not asked for by the policies that draft so."""
        return 1.0 + drafted

    def promising(self, sequence: Sequence, confidences: bytes) -> list[float]:
        return self.confidence.chances(confidences, len(confidences))

    def step_answered(self, target: TargetBook, now: float) -> None:
        pass

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        self._common.observe(accepted, accepted + (accepted < sequence.asked_length))

    def finished(self, sequence: Sequence) -> None:
        pass


class DraftLengthsByCost:
    """By the target's plan (scheduler/draft_plan.py) and the sequence's own acceptance.

    The acceptance of a sequence fades and is drawn towards that of all, so that a new one starts from there. The first
    steps of a target try several lengths, and both ways to use cores that are shared, to learn what rows cost; later
    ones are plain now and then, more and more rarely. A sequence that decodes plainly drafts now and then, to notice
    when that would pay: such probes are paid from `PROBE_SHARE` of the target's time, once enough of it has been saved
    up; so those probe whose draft KV lacks little. The first probe after a change to plain decoding is free, for it may
    have been a mistake, and so is the next one after a token that was taken against all expectation; but not for those
    whose draft KV lacks much.

    A plan is made again after about as many rounds as there are sequences, and when their number changes: at once where
    it has doubled or halved.
    """

    eager_lack = 8.0

    def __init__(self, config: SchedulerConfig, fleet: Fleet, common: Acceptance, counters: Counters) -> None:
        self.confidence = ConfidenceBins()
        self._config = config
        self._fleet = fleet
        self._common = common
        self._proposed = ProposedShare()
        self._prompts = PromptShare()
        self._counters = counters

    def acceptance(self, sequence: Sequence) -> float:
        """The chance that a draft token the sequence asks for is proposed and accepted, given those before it were."""
        return (sequence.taken + self._common.rate * _OWN_PRIOR_WEIGHT) / (sequence.tried + _OWN_PRIOR_WEIGHT)

    def for_newcomer(self, target: TargetBook, longest: int) -> int:
        plan = target.plan
        if target.turns:
            return 0  # what the draft computes for it would hold up all others: first the plan must want that
        return longest if plan is None else min(longest, plan.length(self._common.rate))

    def for_round(self, sequence: Sequence, longest: int) -> int:
        target = sequence.target
        if target is None or not self._fleet.drafts:
            return 0
        plan = target.plan
        if plan is None:
            return min(longest, _TRIAL_LENGTHS[target.verify_steps % len(_TRIAL_LENGTHS)])
        if target.plain_step:
            return 0
        if sequence.probing:
            return min(longest, _PROBE_LENGTH)
        length = min(longest, plan.length(self.acceptance(sequence)))
        may_probe = length == 0 and sequence.plain_rounds >= _PLAIN_ROUNDS_BETWEEN_PROBES
        if may_probe and target.probe_credit >= self._probe_seconds(target, self._lack(sequence)):
            # Nothing is carried over, so that the plain rounds in which nobody could probe do not end in a burst.
            target.probe_credit = 0.0
            self._counters.probes += 1
            sequence.probing = True
            return min(longest, _PROBE_LENGTH)
        return length

    def expected_tokens(self, sequence: Sequence, drafted: int) -> float:
        return expected_commit(self.acceptance(sequence), drafted) if drafted else 1.0

    def promising(self, sequence: Sequence, confidences: bytes) -> list[float]:
        """Those whose chance is worth more than the tokens that the target could commit in the time of their row."""
        chances = self.confidence.chances(confidences, len(confidences))
        target = sequence.target
        if target is None or target.plan is None or sequence.probing or sequence.request.draft_length is not None:
            return chances
        if sequence.length % _WHOLE_PROPOSAL_EVERY == 0:
            return chances
        price = target.plan.rate * target.times.per_row
        return list(takewhile(lambda chance: chance >= price, chances))

    def step_answered(self, target: TargetBook, now: float) -> None:
        # Else a target that always speculates would never learn that a plain step is cheaper than it thinks.
        target.plain_step = target.verify_steps >= target.plain_step_due
        if target.plain_step:
            target.plain_step_due = target.verify_steps + min(target.verify_steps, _MOST_STEPS_BETWEEN_PLAIN_ONES)
        rows = len(target.sequences)
        plan_due = target.rounds_since_plan >= min(rows, target.planned_for) or (
            rows != target.planned_for and target.rounds_since_plan >= rows // 8
        )
        plan_due &= target.rounds_since_plan >= min(_MOST_ROUNDS_BETWEEN_PLANS, target.verify_steps // 4)
        # What pays for one sequence is no plan for the crowd that has just come in.
        if plan_due or not target.planned_for / 2 < rows < target.planned_for * 2:
            self._plan(target, now)

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        target, asked = sequence.target, sequence.asked_length
        if target is not None:
            target.rounds_since_plan += 1
            target.chosen_tokens += 1 + accepted
        if asked:
            taken, tried = float(accepted), accepted + (accepted < asked)
            proposed = max(verified, len(sequence.confidences))
            if accepted == verified < proposed:
                # Had the next one been worth verifying, what would have become of it? Else drafts that are often cut
                # short would seem to be bad ones, be worth even less, and be cut the more.
                taken += self.confidence.chance(sequence.confidences[verified])
            if sequence.probing and accepted and target is not None and self.acceptance(sequence) < _UNLIKELY:
                self._allow_probe(target)
            self._common.observe(taken, tried)
            self._proposed.observe(asked, proposed)
            sequence.taken = sequence.taken * _FORGET_ROUND + taken
            sequence.tried = sequence.tried * _FORGET_ROUND + tried
            sequence.plain_rounds = 0
            sequence.probing = False
        elif target is not None and target.plan is not None:
            # What was seen long ago counts less, so that a few probes can tell that it has changed.
            sequence.plain_rounds += 1
            sequence.taken *= _FORGET_PLAIN_ROUND
            sequence.tried *= _FORGET_PLAIN_ROUND
            self._common.fade(_COMMON_FORGETS_PLAIN_ROUND)
            target.probe_credit += target.probe_income

    def finished(self, sequence: Sequence) -> None:
        prompt_tokens = len(sequence.request.prompt)
        self._prompts.observe(prompt_tokens, sequence.length - prompt_tokens)

    def _plan(self, target: TargetBook, now: float) -> None:
        target.rounds_since_plan = 0
        target.planned_for = len(target.sequences)
        drafts = list(self._fleet.drafts.values()) if self._config.draft_length else []
        if drafts and not self._tried(target, drafts):
            return
        costs = self._costs(target, drafts)
        longest = self._config.draft_length if drafts else 0
        speculating = target.plan is not None and bool(target.plan.thresholds)
        catch_up = self._catch_up(target, drafts, speculating)
        plan = best_plan(costs, self._population(target), longest, target.record.trust, speculating, catch_up)
        target.record.planned(plan, now, target.planned_for, target.chosen_tokens, not target.prefilling)
        self._fleet.take_turns(plan.turns)
        # Speculation was given up, perhaps by mistake.
        given_up = (speculating or target.plan is None) and not plan.thresholds
        target.plan = plan
        if given_up:
            self._allow_probe(target)
        target.probe_income = PROBE_SHARE * plan.cycle / costs.sequences

    def _tried(self, target: TargetBook, drafts: list[DraftBook]) -> bool:
        """Whether enough is known for a plan. Until then steps are tried: where cores are shared, in turns first."""
        if target.verify_steps >= _MOST_TRIAL_STEPS:
            return True
        trials = _TRIAL_STEPS
        if self._fleet.shares_cores:
            in_turns = target.verify_steps < trials or not all(draft.times_alone.known for draft in drafts)
            self._fleet.take_turns(in_turns)
            if in_turns:
                return False
            trials *= 2
        return target.verify_steps >= trials and all(draft.times_beside.known for draft in drafts)

    def _costs(self, target: TargetBook, drafts: list[DraftBook]) -> CellCosts:
        count = max(1, len(drafts))
        beside = _step_costs(target.times_beside, [draft.times_beside for draft in drafts])
        alone = None
        if self._fleet.shares_cores:
            alone = _step_costs(target.times_alone, [draft.times_alone for draft in drafts])
        return CellCosts(
            sequences=max(1, len(target.sequences) - len(target.prefilling)),
            batch_size=self._config.batch_size,
            packed_rows=target.spec.max_packed_rows,
            overhead=target.overhead.value,
            draft_overhead=sum(draft.overhead.value for draft in drafts) / count,
            targets_per_draft=len(self._fleet.targets) / count,
            beside=beside,
            alone=alone,
            proposed_share=self._proposed.rate,
            prompt_share=self._prompts.rate,
            prefill_chunk=target.chunk,
            coming=len(target.prefilling),
        )

    def _population(self, target: TargetBook) -> Population:
        """The acceptances on the target, a sample of them, in a few groups."""
        sequences = target.sequences
        groups: dict[int, tuple[float, int]] = {}
        for sequence in islice(sequences.values(), 0, None, 1 + len(sequences) // _SAMPLE):
            acceptance = 0.0 if sequence.drafting_refused else self.acceptance(sequence)
            group = int(acceptance * _ACCEPTANCE_GROUPS)
            total, count = groups.get(group, (0.0, 0))
            groups[group] = total + acceptance, count + 1
        return sorted((total / count, count) for total, count in groups.values()) or [(self._common.rate, 1)]

    def _catch_up(self, target: TargetBook, drafts: list[DraftBook], speculating: bool) -> CatchUp | None:
        """For all draft KV that is missing."""
        sequences = target.sequences
        if not (self._fleet.shares_cores and drafts and sequences):
            return None
        draft = drafts[0]
        every = 1 + len(sequences) // _SAMPLE
        sample = list(islice(sequences.values(), 0, None, every))
        lack = every * sum(self._lack(sequence) for sequence in sample)
        left = sum(sequence.end - sequence.length for sequence in sample) / len(sample)
        return CatchUp(
            seconds=draft.times_alone.predict(0, 0, lack) + self._wire_seconds(target, draft, lack),
            # Where drafting goes on, those that wait for their turn are newcomers: no reason to give it up.
            rounds=0.0 if speculating else max(0.0, lack / draft.chunk - 1),
            rounds_left=max(1.0, min(_ROUNDS_TO_REPAY, left)),
        )

    def _lack(self, sequence: Sequence) -> int:
        """Tokens of KV that a draft would first have to compute for it."""
        return sequence.length if sequence.draft is None else sequence.draft.lack(sequence)

    def _allow_probe(self, target: TargetBook) -> None:
        """A free one."""
        target.probe_credit = max(target.probe_credit, self._probe_seconds(target, _FREE_PROBE_LACK))

    def _probe_seconds(self, target: TargetBook, lack: int) -> float:
        """What the cell loses by a probe: the others wait for its draft, or it misses rounds while they go on."""
        plan, draft = target.plan, next(iter(self._fleet.drafts.values()), None)
        if draft is None:
            return 0.0
        drafting = draft.times.predict(_PROBE_LENGTH, _PROBE_LENGTH)
        rows = _PROBE_LENGTH * target.times.per_row
        if target.turns:
            # No step of the target is under way or queued meanwhile, so its way to and fro shows as well.
            return drafting + draft.times.predict(0, 0, lack) + self._wire_seconds(target, draft, lack) + rows
        away = drafting + draft.overhead.value
        cycle = plan.cycle if plan is not None else 0.0
        missed = (cycle + away) / max(1, len(target.sequences))
        return min(away, missed) + rows

    def _wire_seconds(self, target: TargetBook, draft: DraftBook, lack: int) -> float:
        """For taking in so many tokens in turns: nothing computes while a step, then the turn, is handed over."""
        return max(1, -(-lack // draft.chunk)) * (draft.overhead.value + target.overhead.value)


def _step_costs(target: TargetTimes, drafts: list[DraftTimes]) -> StepCosts:
    count = max(1, len(drafts))
    return StepCosts(
        # Few and like observations can leave nothing for the base of a step, and no step takes no time.
        base=max(target.base, _LEAST_BASE_SHARE * target.typical),
        per_row=target.per_row,
        draft_per_pass=sum(times.base for times in drafts) / count,
        draft_per_row=sum(times.per_row for times in drafts) / count,
        per_prefill_row=target.per_prefill_row,
        draft_per_prompt_token=sum(times.per_catch_up_row for times in drafts) / count,
    )


def make_draft_lengths(config: SchedulerConfig, fleet: Fleet, common: Acceptance, counters: Counters) -> DraftLengths:
    """They keep `common`, the acceptance of all sequences together, up to date."""
    if config.policy is Policy.AUTO:
        return DraftLengthsByCost(config, fleet, common, counters)
    return FixedDraftLengths(common)
