"""Who drafts how much in its next round: the configured length, or what pays (policy AUTO)."""

from __future__ import annotations

import math
import os
from itertools import islice, takewhile
from typing import Protocol

from scheduler.config import Policy, SchedulerConfig
from scheduler.costs.draft_plan import AcceptanceGroups, CatchUp, CellCosts, StepCosts, best_plan
from scheduler.costs.step_times import Acceptance, DraftTimes, PromptShare, ProposedShare, TargetTimes, expected_commit
from scheduler.speculation.confidence import ConfidenceBins
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.workers import DraftWorker, Sequence, TargetWorker
from scheduler.statistics import Counters

_MIN_BASE_SHARE = 0.1
PROBE_SHARE = 0.003
"""Of a target's time, spent on drafting where that is not expected to pay."""
_PROBE_LENGTH = 1
_FREE_PROBE_KV_LAG = 24
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
_MAX_TRIAL_STEPS = 40
_MAX_STEPS_BETWEEN_PLAIN_ONES = 256
_MAX_ROUNDS_BETWEEN_PLANS = 32
_ROUNDS_TO_REPAY = 100.0
"""By then a change to speculation must have made up for what it cost."""
# One proposal in so many is verified whole, to see what the tokens that were not worth it would have come to.
_WHOLE_PROPOSAL_EVERY = 16


class DraftLengths(Protocol):
    """Decides draft lengths, except for requests that ask for one; `Lifecycle.longest_draft` is the limit."""

    max_eager_kv_lag: float
    """A draft with a larger KV lag catches up during a plain round instead of proposing at once.

    Time-sliced drafts always propose at once.
    """

    confidence: ConfidenceBins

    def newcomer_drafts(self, target: TargetWorker) -> bool:
        """Whether a sequence that begins to run will probably draft; if not, its draft KV can wait."""
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

    def step_answered(self, target: TargetWorker, now: float) -> bool:
        """A verify step came back; its rounds are about to be observed. Returns whether the target has a new plan."""
        ...

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A round ended: of the tokens that its draft was asked for so many were verified, and so many accepted."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


class Old:
    def target(self, target):  # type: ignore
        return None

    def target_step(self, target, work, seconds):  # type: ignore
        return work.verify_tokens > 0 and self.step_answered(target, self.now)  # type: ignore

    def draft_step(self, *_):  # type: ignore
        pass

    def forget(self, sequence):  # type: ignore
        pass

    def lose(self, worker_id):  # type: ignore
        pass

    def proposes_at_once(self, draft, kv_lag):  # type: ignore
        return kv_lag <= self.max_eager_kv_lag or draft.time_sliced  # type: ignore

    def chances(self, sequence, confidences, count):  # type: ignore
        return self.confidence.chances(confidences, count)  # type: ignore

    def worth_verifying(self, sequence, confidences):  # type: ignore
        return len(self.promising(sequence, confidences))  # type: ignore


class FixedDraftLengths(Old):
    """Always the longest allowed."""

    max_eager_kv_lag = math.inf

    def __init__(self, common: Acceptance) -> None:
        self.confidence = ConfidenceBins()
        self._common = common

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        return True

    def for_round(self, sequence: Sequence, longest: int) -> int:
        return longest

    def expected_tokens(self, sequence: Sequence, drafted: int) -> float:
        """Not asked for by the policies that draft so."""
        return 1.0 + drafted

    def promising(self, sequence: Sequence, confidences: bytes) -> list[float]:
        return self.confidence.chances(confidences, len(confidences))

    def step_answered(self, target: TargetWorker, now: float) -> bool:
        return False

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        self._common.observe(accepted, accepted + (accepted < sequence.requested_draft_length))
        if sequence.confidences:
            self.confidence.observe(sequence.confidences[:verified], accepted)

    def finished(self, sequence: Sequence) -> None:
        pass


class DraftLengthsByCost(Old):
    """By the target's plan (scheduler/costs/draft_plan.py) and the sequence's own acceptance.

    The acceptance of a sequence decays and shrinks towards the global mean, where a new sequence starts. The first
    steps of a target try several lengths, and both ways to use shared cores, to learn what tokens cost. Later ones are
    plain now and then, more and more rarely. A sequence that decodes plainly drafts now and then, to notice when that
    would pay. Such probes are paid from `PROBE_SHARE` of the target's time, once enough of it has been saved up; so
    sequences with a small KV lag probe first. The first probe after a change to plain decoding is free, since the
    change may have been a mistake. So is the next one after a token that was accepted against all expectation. Neither
    is free for a sequence with a large KV lag.

    A plan is made again after about as many rounds as there are sequences, and when their number changes: at once where
    it has doubled or halved.
    """

    max_eager_kv_lag = 8.0

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

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        if target.time_sliced:
            return False  # the draft's work for it would hold up all others: first the plan must want that
        return target.plan is None or target.plan.length(self._common.rate) > 0

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
        if may_probe and target.probe_credit >= self._probe_seconds(target, self._kv_lag(sequence)):
            # Nothing is carried over, so that plain rounds without a possible probe do not end in a burst of them.
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
        price = target.plan.rate * target.times.per_token
        return list(takewhile(lambda chance: chance >= price, chances))

    def step_answered(self, target: TargetWorker, now: float) -> bool:
        # Else a target that always speculates would never learn that a plain step is cheaper than it thinks.
        target.plain_step = target.verify_steps >= target.plain_step_due
        if target.plain_step:
            target.plain_step_due = target.verify_steps + min(target.verify_steps, _MAX_STEPS_BETWEEN_PLAIN_ONES)
        rows = len(target.sequences)
        plan_due = target.rounds_since_plan >= min(rows, target.planned_for) or (
            rows != target.planned_for and target.rounds_since_plan >= rows // 8
        )
        plan_due &= target.rounds_since_plan >= min(_MAX_ROUNDS_BETWEEN_PLANS, target.verify_steps // 4)
        # What pays for one sequence is no plan for the crowd that has just come in.
        if plan_due or not target.planned_for / 2 < rows < target.planned_for * 2:
            return self._plan(target, now)
        return False

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        target, requested = sequence.target, sequence.requested_draft_length
        if target is not None:
            target.rounds_since_plan += 1
            target.sampled_tokens += 1 + accepted
        if requested:
            taken, tried = float(accepted), accepted + (accepted < requested)
            proposed = max(verified, len(sequence.confidences))
            if accepted == verified < proposed:
                # Had the next one been worth verifying, what would have become of it? Else drafts that are often cut
                # short would seem to be bad ones, be worth even less, and be cut the more.
                taken += self.confidence.chance(sequence.confidences[verified])
            if sequence.probing and accepted and target is not None and self.acceptance(sequence) < _UNLIKELY:
                self._allow_probe(target)
            self._common.observe(taken, tried)
            self._proposed.observe(requested, proposed)
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
        if sequence.confidences:
            self.confidence.observe(sequence.confidences[:verified], accepted)

    def finished(self, sequence: Sequence) -> None:
        prompt_tokens = len(sequence.request.prompt)
        self._prompts.observe(prompt_tokens, sequence.length - prompt_tokens)

    def _plan(self, target: TargetWorker, now: float) -> bool:
        """Makes a new plan, unless the first trials still go on."""
        target.rounds_since_plan = 0
        target.planned_for = len(target.sequences)
        drafts = list(self._fleet.drafts.values()) if self._config.draft_length else []
        if drafts and not self._tried(target, drafts):
            return False
        costs = self._costs(target, drafts)
        longest = self._config.draft_length if drafts else 0
        speculating = target.plan is not None and bool(target.plan.thresholds)
        catch_up = self._catch_up(target, drafts, speculating)
        plan = best_plan(costs, self._acceptance_groups(target), longest, target.record.trust, speculating, catch_up)
        target.record.planned(plan, now, target.planned_for, target.sampled_tokens, not target.prefilling)
        self._fleet.set_time_sliced(plan.time_sliced)
        # Speculation was given up, perhaps by mistake.
        given_up = (speculating or target.plan is None) and not plan.thresholds
        target.plan = plan
        if given_up:
            self._allow_probe(target)
        target.probe_income = PROBE_SHARE * plan.cycle / costs.sequences
        return True

    def _tried(self, target: TargetWorker, drafts: list[DraftWorker]) -> bool:
        """Whether enough is known for a plan. Until then steps are tried: where cores are shared, time-sliced first."""
        if target.verify_steps >= _MAX_TRIAL_STEPS:
            return True
        trials = _TRIAL_STEPS
        if self._fleet.shares_cores:
            sliced = target.verify_steps < trials or not all(draft.exclusive_times.known for draft in drafts)
            self._fleet.set_time_sliced(sliced)
            if sliced:
                return False
            trials *= 2
        return target.verify_steps >= trials and all(draft.shared_times.known for draft in drafts)

    def _costs(self, target: TargetWorker, drafts: list[DraftWorker]) -> CellCosts:
        count = max(1, len(drafts))
        shared = _step_costs(target.shared_times, [draft.shared_times for draft in drafts])
        exclusive = None
        if self._fleet.shares_cores:
            exclusive = _step_costs(target.exclusive_times, [draft.exclusive_times for draft in drafts])
        return CellCosts(
            sequences=max(1, len(target.sequences) - len(target.prefilling)),
            batch_size=self._config.batch_size,
            max_num_batched_tokens=target.spec.max_num_batched_tokens,
            overhead=target.overhead.value,
            draft_overhead=sum(draft.overhead.value for draft in drafts) / count,
            targets_per_draft=len(self._fleet.targets) / count,
            shared=shared,
            exclusive=exclusive,
            proposed_share=self._proposed.rate,
            prompt_share=self._prompts.rate,
            prefill_chunk=target.chunk,
            coming=len(target.prefilling),
        )

    def _acceptance_groups(self, target: TargetWorker) -> AcceptanceGroups:
        """The acceptances on the target, a sample of them, in a few groups."""
        sequences = target.sequences
        groups: dict[int, tuple[float, int]] = {}
        for sequence in islice(sequences.values(), 0, None, 1 + len(sequences) // _SAMPLE):
            acceptance = 0.0 if sequence.drafting_refused else self.acceptance(sequence)
            group = int(acceptance * _ACCEPTANCE_GROUPS)
            total, count = groups.get(group, (0.0, 0))
            groups[group] = total + acceptance, count + 1
        return sorted((total / count, count) for total, count in groups.values()) or [(self._common.rate, 1)]

    def _catch_up(self, target: TargetWorker, drafts: list[DraftWorker], speculating: bool) -> CatchUp | None:
        """For all draft KV that is missing."""
        sequences = target.sequences
        if not (self._fleet.shares_cores and drafts and sequences):
            return None
        draft = drafts[0]
        every = 1 + len(sequences) // _SAMPLE
        sample = list(islice(sequences.values(), 0, None, every))
        kv_lag = every * sum(self._kv_lag(sequence) for sequence in sample)
        left = sum(sequence.end - sequence.length for sequence in sample) / len(sample)
        return CatchUp(
            seconds=draft.exclusive_times.predict(0, 0, kv_lag) + self._wire_seconds(target, draft, kv_lag),
            # Where drafting goes on, those that wait for their turn are newcomers: no reason to give it up.
            rounds=0.0 if speculating else max(0.0, kv_lag / draft.chunk - 1),
            rounds_left=max(1.0, min(_ROUNDS_TO_REPAY, left)),
        )

    def _kv_lag(self, sequence: Sequence) -> int:
        """Tokens of KV that a draft would first have to compute for it."""
        return sequence.length if sequence.draft is None else sequence.draft.kv_lag(sequence)

    def _allow_probe(self, target: TargetWorker) -> None:
        """A free one."""
        target.probe_credit = max(target.probe_credit, self._probe_seconds(target, _FREE_PROBE_KV_LAG))

    def _probe_seconds(self, target: TargetWorker, kv_lag: int) -> float:
        """What the cell loses by a probe: the others wait for its draft, or it misses rounds while they go on."""
        plan, draft = target.plan, next(iter(self._fleet.drafts.values()), None)
        if draft is None:
            return 0.0
        drafting = draft.times.predict(_PROBE_LENGTH, _PROBE_LENGTH)
        rows = _PROBE_LENGTH * target.times.per_token
        if target.time_sliced:
            # No step of the target is under way or queued meanwhile, so its way to and fro shows as well.
            return drafting + draft.times.predict(0, 0, kv_lag) + self._wire_seconds(target, draft, kv_lag) + rows
        away = drafting + draft.overhead.value
        cycle = plan.cycle if plan is not None else 0.0
        missed = (cycle + away) / max(1, len(target.sequences))
        return min(away, missed) + rows

    def _wire_seconds(self, target: TargetWorker, draft: DraftWorker, kv_lag: int) -> float:
        """Time-sliced catching up with so many tokens: no worker computes while steps and answers are on the wire."""
        return max(1, -(-kv_lag // draft.chunk)) * (draft.overhead.value + target.overhead.value)


def _step_costs(target: TargetTimes, drafts: list[DraftTimes]) -> StepCosts:
    count = max(1, len(drafts))
    return StepCosts(
        # Few and like observations can leave nothing for the base of a step, and no step takes no time.
        base=max(target.base, _MIN_BASE_SHARE * target.typical),
        per_token=target.per_token,
        draft_per_pass=sum(times.base for times in drafts) / count,
        draft_per_token=sum(times.per_token for times in drafts) / count,
        per_prefill_token=target.per_prefill_token,
        draft_per_prompt_token=sum(times.per_catch_up_token for times in drafts) / count,
    )


def make_draft_lengths(config: SchedulerConfig, fleet: Fleet, common: Acceptance, counters: Counters) -> DraftLengths:
    """They keep `common`, the acceptance of all sequences together, up to date."""
    if not os.environ.get("SPOOL_OLD_CONTROLLER"):
        # Temporary, to compare the two.
        fleet.always_sliced = config.policy is Policy.AUTO
        return Controller(config, fleet, counters, common)  # type: ignore
    if config.policy is Policy.AUTO:
        return DraftLengthsByCost(config, fleet, common, counters)
    return FixedDraftLengths(common)
