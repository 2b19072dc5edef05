"""Decides, for each sequence and round, how many tokens to draft: as many as the most goodput takes, often none.

After TurboSpec (arXiv 2406.14066, section 4): costs of steps and acceptance are learnt online, and after every round
each target gets, for each draft worker, the length with the most expected tokens a second. With n sequences on a
target, a *cycle* is the time in which each of them has one round. In `parts` target steps a cycle it takes

    verify = parts · base + row · tokens,   draft = min(parts, 2) · passes · pass + token · drafted + feed · fed,

where both go on side by side the longer of them, but no less than the way of one part through both workers; where draft
and target share cores, the sum. `fed` are the tokens of prompts and of rounds without a draft that the draft has to
take in, spread over what is left of their sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from scheduler.config import SchedulerConfig
from scheduler.costs.step_times import Acceptance
from scheduler.speculation.acceptance import ModelAcceptance, OwnAcceptance
from scheduler.speculation.cost_model import FORGET, LinearCost
from scheduler.state.fleet import Fleet
from scheduler.state.worker_base import DraftWork, OutstandingStep, TargetWork
from scheduler.state.workers import STEADY_KV_LAG, DraftWorker, Sequence, TargetWorker
from scheduler.statistics import Counters

_HYSTERESIS = 1.05
"""Drafting must promise so much more to begin: by that much the best of several estimates looks better than it is."""
_PROBE_SHARE = 0.01
"""Of the time, for looking at what is not done now. So much, at most, is lost where nothing ever changes."""
_WHOLE_EVERY = 16
"""One proposal in so many is verified whole, to see what tokens that seemed not worth it would have come to."""


@dataclass(slots=True)
class Choice:
    """What one target's sequences draft with one draft worker: up to `length` tokens each.

    In a cycle that is `drafted` tokens, of which `accepted` are expected to be, for `seconds` of the draft. A draft
    token is worth it from a chance of `price` on, and one to feed costs as much as `feed_price` tokens.
    """

    length: int = 1
    drafted: float = 0.0
    accepted: float = 0.0
    seconds: float = 0.0
    price: float = 0.0
    feed_price: float = 0.0


@dataclass(slots=True)
class TargetFigures:
    """What is known of one target and decided for it. `gain`: by how much `rate` exceeds that of plain decoding."""

    verify: LinearCost
    prefill: LinearCost
    overhead: LinearCost
    typical: float
    """Seconds of a step that verifies as the last one did."""
    verify_steps: int = 0
    seen: set[bool] = field(default_factory=set)
    """Of verify steps with and without draft tokens, which were measured."""
    rounds: int = 0
    decided_for: int = 0
    parts: float = 1.0
    cycle: float = 0.0
    rate: float = 0.0
    gain: float = 1.0
    credit: float = 0.0
    """Seconds saved up for probes."""
    plain_step: bool = False
    choices: dict[str, Choice] = field(default_factory=dict)

    @property
    def drafting(self) -> bool:
        return any(choice.length for choice in self.choices.values())


@dataclass(slots=True)
class DraftFigures:
    """What is known of one draft worker."""

    cost: LinearCost
    overhead: LinearCost
    acceptance: ModelAcceptance


class Controller:
    """Every draft as long as allowed; what steps cost and what becomes of tokens is learnt all the same."""

    def __init__(self, config: SchedulerConfig, fleet: Fleet, counters: Counters, common: Acceptance) -> None:
        self._common = common
        self._config = config
        self._fleet = fleet
        self._counters = counters
        self._targets: dict[str, TargetFigures] = {}
        self._drafts: dict[str, DraftFigures] = {}
        self._models: dict[str, ModelAcceptance] = {}
        self._own: dict[int, OwnAcceptance] = {}
        self._answer = math.inf
        """Tokens of the sequences that ended, older ones for less."""

    # --- what is known ------------------------------------------------------------------------------------------------

    def target(self, target: TargetWorker) -> TargetFigures:
        found = self._targets.get(target.worker_id)
        if found is None:
            first = self._config.initial_step_seconds
            found = TargetFigures(LinearCost(2, first), LinearCost(3, first), LinearCost(1), first)
            self._targets[target.worker_id] = found
        return found

    def draft(self, draft: DraftWorker) -> DraftFigures:
        found = self._drafts.get(draft.worker_id)
        if found is None:
            model = draft.spec.model_id or draft.worker_id
            if model not in self._models:
                self._models[model] = ModelAcceptance(self._config.draft_length)
            cost = LinearCost(3, self._config.initial_step_seconds)
            found = self._drafts[draft.worker_id] = DraftFigures(cost, LinearCost(1), self._models[model])
        return found

    def own(self, sequence: Sequence) -> OwnAcceptance:
        found = self._own.get(sequence.sequence_id)
        if found is None:
            found = self._own[sequence.sequence_id] = OwnAcceptance()
        return found

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._own.pop(sequence.sequence_id, None)
        output = sequence.length - len(sequence.request.prompt)
        self._answer = output if math.isinf(self._answer) else self._answer * FORGET + output * (1 - FORGET)

    def lose(self, worker_id: str) -> None:
        """The worker is gone; one that comes under its name may be another."""
        self._targets.pop(worker_id, None)
        self._drafts.pop(worker_id, None)
        for figures in self._targets.values():
            figures.choices.pop(worker_id, None)

    # --- what is learnt -----------------------------------------------------------------------------------------------

    def target_step(
        self, target: TargetWorker, step: OutstandingStep[Sequence, TargetWork], seconds: float, now: float
    ) -> bool:
        """A target's answer came, whose rounds are about to be observed. Whether it drafts now and did not, or not."""
        figures, work = self.target(target), step.work
        if work.prefill_tokens:
            figures.prefill.observe(seconds, 1.0, work.verify_tokens, work.prefill_tokens)
        elif work.verify_tokens:
            figures.verify.observe(seconds, 1.0, work.verify_tokens)
            figures.typical = figures.verify.predict(1.0, work.verify_tokens)
            figures.seen.add(work.verify_tokens > len(step.rows))
        if step.to_idle_worker and step.rows:
            figures.overhead.observe(now - step.sent_at - seconds, 1.0)
        if step.group is None:
            return False
        figures.verify_steps += 1
        count = len(target.sequences)
        ended = figures.rounds >= figures.decided_for
        if not ended and figures.decided_for / 2 < count < figures.decided_for * 2:
            return False
        for model in self._models.values() if ended else ():
            model.end_round()
        figures.rounds, figures.decided_for = 0, count
        drafted = figures.drafting
        self._decide(target, figures)
        return drafted != figures.drafting

    def draft_step(
        self, draft: DraftWorker, step: OutstandingStep[Sequence, DraftWork], seconds: float, now: float
    ) -> None:
        figures, work = self.draft(draft), step.work
        if work.any:
            figures.cost.observe(seconds, work.passes, work.proposed_tokens, work.catch_up_tokens)
        if step.to_idle_worker and step.rows:
            figures.overhead.observe(now - step.sent_at - seconds, 1.0)

    def observe(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A round ended: of the tokens that its draft was asked for so many were verified, and so many accepted."""
        target, draft, requested = sequence.target, sequence.draft, sequence.requested_draft_length
        figures, own = self.target(target), self.own(sequence)
        figures.rounds += 1
        figures.credit += _PROBE_SHARE * figures.cycle / max(1, figures.decided_for)
        if not requested or draft is None:
            return
        model, taken = self.draft(draft).acceptance, float(accepted)
        confidences = sequence.confidences
        if accepted == verified < len(confidences):
            # Had the next one been worth verifying: else drafts that are often cut short would seem to be bad ones.
            taken += model.chance(confidences[verified])
        if own.probing and accepted and model.survival(own)[0] < 0.5:
            figures.credit = math.inf  # against the odds: worth another look at once
        own.probing = False
        tried = accepted + (accepted < requested)
        own.observe(taken, tried)
        self._common.observe(taken, tried)
        model.observe(taken, tried)
        model.observe_confidences(confidences[:verified], accepted)

    # --- what is decided ----------------------------------------------------------------------------------------------

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        """Whether a sequence that begins to run will probably draft; if not, its draft KV can wait."""
        return True

    def for_round(self, sequence: Sequence, longest: int) -> int:
        """Tokens to draft in the round that begins, 0 to `longest`; to be called once a round."""
        return longest

    def proposes_at_once(self, draft: DraftWorker, kv_lag: int) -> bool:
        """Whether a draft with so large a KV lag is to propose; else it catches up during a plain round."""
        return True

    def chances(self, sequence: Sequence, confidences: bytes) -> list[float]:
        """For each leading token of a proposal that is worth verifying, the chance that it will be accepted."""
        return self.trust(sequence, confidences, len(confidences))

    def expected_tokens(self, sequence: Sequence, drafted: int) -> float:
        return 1.0 + drafted

    def finished(self, sequence: Sequence) -> None:
        pass

    def trust(self, sequence: Sequence, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` proposed tokens to be accepted with all before it."""
        draft = sequence.draft
        return [0.5**place for place in range(1, count + 1)] if draft is None else self.draft(draft).acceptance.trust(
            confidences, count
        )

    def _decide(self, target: TargetWorker, figures: TargetFigures) -> None:
        """Everything stays as it is."""


class GoodputController(Controller):
    """Policy AUTO: the draft length with the highest expected rate of committed tokens."""

    def newcomer_drafts(self, target: TargetWorker, sequence: Sequence) -> bool:
        # Where cores are shared all others would wait for the draft of one that may never decode.
        return not target.time_sliced and self._length(self.target(target), sequence) > 0

    def for_round(self, sequence: Sequence, longest: int) -> int:
        target, drafts = sequence.target, self._fleet.drafts
        if target is None or not drafts or not longest:
            return 0
        figures = self.target(target)
        if figures.plain_step:
            return 0
        own = self.own(sequence)
        length = 1 if own.probing else self._length(figures, sequence)
        if not length and figures.credit >= self._probe_seconds(target, figures, sequence):
            # What was saved up beyond is lost: else probes would come in bursts.
            figures.credit = 0.0
            self._counters.probes += 1
            own.probing, length = True, 1
        return min(length, longest)

    def proposes_at_once(self, draft: DraftWorker, kv_lag: int) -> bool:
        # Time-sliced, all sequences wait for the draft either way; otherwise the others wait for at most another pass.
        of_pass, _, of_feed = self.draft(draft).cost.coefficients
        return draft.time_sliced or kv_lag <= STEADY_KV_LAG or of_feed * kv_lag <= of_pass

    def chances(self, sequence: Sequence, confidences: bytes) -> list[float]:
        chances = super().chances(sequence, confidences)
        whole = self.own(sequence).probing or sequence.request.draft_length is not None
        if sequence.target is None or whole or sequence.length % _WHOLE_EVERY == 0:
            return chances
        figures = self.target(sequence.target)
        price = figures.rate * figures.verify.coefficients[1]
        return list(takewhile(lambda chance: chance >= price, chances))

    def _draft_of(self, sequence: Sequence) -> DraftWorker:
        """The draft worker that has the sequence, or would get it."""
        drafts = self._fleet.drafts.values()
        return sequence.draft or min(drafts, key=lambda draft: len(draft.sequences))

    def _length(self, figures: TargetFigures, sequence: Sequence) -> int:
        """What pays for this sequence."""
        own = self.own(sequence)
        if own.length is None:
            draft = self._draft_of(sequence)
            choice = figures.choices.get(draft.worker_id)
            if choice is None:
                return 1 - figures.verify_steps % 2  # nobody knows: with and without a draft in turns
            worth = _worth(self._survival(draft, sequence), self._lag(sequence), choice.price, choice.feed_price)
            own.length = min(choice.length, len(worth))
        return own.length

    def _survival(self, draft: DraftWorker, sequence: Sequence) -> list[float]:
        return self.draft(draft).acceptance.survival(self.own(sequence))

    def _lag(self, sequence: Sequence) -> _Lag:
        """Tokens that a draft has to take in first, and those that the sequence is still to commit."""
        return max(0, _kv_lag(sequence) - STEADY_KV_LAG), max(1.0, min(sequence.end - sequence.length, self._answer))

    def _probe_seconds(self, target: TargetWorker, figures: TargetFigures, sequence: Sequence) -> float:
        """What the cell loses by a probe: the others wait for its draft, or it misses rounds while they go on."""
        draft, lag = self._draft_of(sequence), _kv_lag(sequence)
        known = self.draft(draft)
        wire = known.overhead.coefficients[0] + figures.overhead.coefficients[0]
        away = known.cost.predict(1.0, 1.0) + wire
        if target.time_sliced:
            return away + known.cost.predict(0.0, 0.0, lag) + wire * (lag // draft.chunk)
        return min(away, (figures.cycle + away) / max(1, len(target.sequences)))

    def _decide(self, target: TargetWorker, figures: TargetFigures) -> None:
        count = max(1, figures.decided_for)
        plain_cycle, figures.parts = min(
            (self._cycle(target, figures, parts, count), parts) for parts in self._parts(target, count)
        )
        if not figures.drafting:
            figures.rate, figures.gain, figures.cycle = count / plain_cycle, 1.0, plain_cycle
        members: dict[str, list[_Member]] = {}
        for sequence in target.sequences.values() if self._fleet.drafts and len(figures.seen) == 2 else ():
            draft = self._draft_of(sequence)
            free = sequence.request.draft_length is None and not (sequence.drafting_refused or sequence.suspected)
            survival = self._survival(draft, sequence) if free else []
            members.setdefault(draft.worker_id, []).append((sequence, survival, self._lag(sequence)))
        for worker_id, found in members.items():
            draft = self._fleet.drafts[worker_id]
            if self.draft(draft).cost.known:
                self._choose(target, figures, draft, found, count / plain_cycle)
        # Else a target that always drafts would never learn that plain steps cost less than it thinks.
        figures.plain_step = figures.drafting and figures.credit >= plain_cycle / figures.parts
        if figures.plain_step:
            figures.credit = 0.0

    def _parts(self, target: TargetWorker, tokens: float) -> tuple[float, ...]:
        """In how many steps the target may verify so many tokens of all its sequences."""
        parts = max(len(target.sequences) / self._config.batch_size, tokens / target.spec.max_num_batched_tokens)
        if target.time_sliced:
            return (max(1.0, parts),)
        return (max(2.0, parts),) if parts > 1 else (1.0, 2.0) if len(target.sequences) > 1 else (1.0,)

    def _cycle(
        self,
        target: TargetWorker,
        figures: TargetFigures,
        parts: float,
        tokens: float,
        of_passes: float = 0.0,
        of_tokens: float = 0.0,
        of_fed: float = 0.0,
        elsewhere: float = 0.0,
    ) -> float:
        """Seconds in which all sequences have a round; the draft's for passes and tokens, other drafts' `elsewhere`."""
        base, row = figures.verify.coefficients
        verify, wire = parts * base + row * tokens, figures.overhead.coefficients[0]
        if target.time_sliced:
            return verify + of_passes + of_tokens + of_fed + (wire if parts == 1 or of_passes else 0.0)
        way = verify / parts + of_passes + of_tokens / parts + wire
        return max(way, verify, min(parts, 2.0) * of_passes + of_tokens + of_fed, elsewhere)

    def _choose(
        self, target: TargetWorker, figures: TargetFigures, draft: DraftWorker, members: list[_Member], plain: float
    ) -> None:
        """The length for the sequences of one draft worker, while the other drafts do as they do."""
        known, count = self.draft(draft), max(1, figures.decided_for)
        per_pass, per_token, per_fed = known.cost.coefficients
        load = max(1.0, len(draft.sequences) / len(members))  # the draft works for other targets too
        others = [choice for worker_id, choice in figures.choices.items() if worker_id != draft.worker_id]
        tokens = count + sum(choice.accepted for choice in others)
        rows = count + sum(choice.drafted for choice in others)
        elsewhere = max((choice.seconds for choice in others), default=0.0)
        before = figures.choices.get(draft.worker_id)
        best, best_rate, best_cycle, best_parts, lengths = Choice(0), 0.0, 0.0, 1.0, [0] * len(members)
        for parts in self._parts(target, rows):
            cycle = self._cycle(target, figures, parts, rows, elsewhere=elsewhere)
            if tokens / cycle > best_rate:
                best_rate, best_cycle, best_parts = tokens / cycle, cycle, parts
        least = best_rate * (_HYSTERESIS if before is None or not before.length else 1.0)
        found_rate = 0.0
        for parts in self._parts(target, rows):
            serial = load if target.time_sliced or parts == 1 else 0.0
            rate = plain * figures.gain
            price = rate * (figures.verify.coefficients[1] + serial * per_token)
            feed_price = rate * per_fed if target.time_sliced else 0.0
            worth = [_worth(survival, lag, price, feed_price) for _, survival, lag in members]
            fed = sum(_fed(lag, kept) for (_, _, lag), kept in zip(members, worth, strict=True) if kept)
            accepted = drafted = 0.0
            for passes in range(1, max(map(len, worth)) + 1):
                reach = [kept[passes - 1] for kept in worth if len(kept) >= passes]
                accepted, drafted = accepted + sum(reach), drafted + len(reach)
                of_passes = passes * per_pass + known.overhead.coefficients[0]
                of_tokens, of_fed = load * per_token * drafted, load * per_fed * fed
                cycle = self._cycle(target, figures, parts, rows + drafted, of_passes, of_tokens, of_fed, elsewhere)
                rate = (tokens + accepted) / cycle
                if rate > max(least, found_rate):
                    found_rate, best_cycle, best_parts = rate, cycle, parts
                    best = Choice(passes, drafted, accepted, min(parts, 2) * of_passes + of_tokens + of_fed, price, feed_price)
                    lengths = [min(passes, len(kept)) for kept in worth]
        figures.choices[draft.worker_id] = best
        figures.rate = max(found_rate, best_rate)
        figures.gain = figures.rate / plain
        figures.parts, figures.cycle = best_parts, best_cycle
        for (sequence, _, _), length in zip(members, lengths, strict=True):
            self.own(sequence).length = length


_Lag = tuple[float, float]
_Member = tuple[Sequence, list[float], _Lag]


def _worth(survival: list[float], lag: _Lag, price: float, feed_price: float) -> list[float]:
    """The leading tokens that are worth their price, if together they also make up for what has to be fed first."""
    kept = list(takewhile(lambda chance: chance >= price, survival))
    return kept if sum(kept) - price * len(kept) >= feed_price * _fed(lag, kept) else []


def _fed(lag: _Lag, kept: list[float]) -> float:
    """The lag's share in each round until the sequence ends, or for as long as anything is remembered."""
    return lag[0] * max(1 - FORGET, (1 + sum(kept)) / lag[1])


def _kv_lag(sequence: Sequence) -> int:
    """Tokens of KV that a draft lacks before it can propose."""
    return sequence.length if sequence.draft is None else sequence.draft.kv_lag(sequence)
