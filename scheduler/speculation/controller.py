"""Decides how many tokens each sequence drafts in a round: the number with the highest goodput, often none.

After TurboSpec (arXiv 2406.14066, section 4): costs of steps and acceptance are learnt online, and after every cycle a
target gets the length with the most expected tokens per second (goodput.py). A target pays for its proposals in its
own time, whoever makes them: so one law of what they cost is learnt, be it of a head or of waits for a draft worker.
"""

from __future__ import annotations

from itertools import islice
from statistics import fmean

from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import DraftingReport, ProposalSource, Row, RowResult
from spool.scheduler.speculation.acceptance import LookupAcceptance
from spool.scheduler.speculation.cost_model import FORGET, TOKEN_SHARE, LinearCost
from spool.scheduler.speculation.goodput import Cycle, TargetFigures, choose
from spool.scheduler.state.worker_records import Work
from spool.scheduler.state.workers import Sequence, TargetWorker
from spool.scheduler.statistics import Counters

_PROBE_EVERY = 100
"""Verify steps of a target between two probes, and between two plain steps while it drafts: about 1 % of its time.
Probes that took more of it come less often."""
_PROBE_ROUNDS = 5
"""A draft worker reads the prompt in the first round, the second proposal tells what others cost, and two rows of a
sequence may be sent before an answer comes."""
_SEQUENCES_ASKED = 64
"""A decision goes by so many sequences of a target: more would not change much."""
_SHORTEST_SECONDS = 1e-9
"""No step takes less time."""


class Controller:
    """Changes the figures of targets. Policies other than AUTO draft all they may."""

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._auto = config.policy is Policy.AUTO
        self._kv_move_cost = LinearCost((1.0, TOKEN_SHARE))

    # --- what is learnt -----------------------------------------------------------------------------------------------

    def step(self, target: TargetWorker, work: Work, verified: int, seconds: float, drafting_seconds: float) -> None:
        """A step took `seconds`, in which so many proposed tokens were verified, and `drafting_seconds` went by for
        proposals; its rounds are observed next."""
        figures, decoded = target.figures, work.decoded + verified
        if decoded or work.fed:
            figures.cost.observe(seconds, 1.0, decoded + work.fed, decoded, work.kv)
        if work.drafted:
            self._learn_drafting(figures, work, drafting_seconds)
        if not decoded:
            return
        figures.step.observe(seconds)
        sequences = len(target.sequences)
        # Once in a cycle, or when the target has at least twice as many sequences as when it was decided last.
        if self._auto and figures.rounds and (figures.rounds >= sequences or sequences >= 2 * figures.decided_for):
            figures.rounds, figures.decided_for = 0, max(1, sequences)
            self._decide(target, figures)
        self._count_step(target, figures)

    def _learn_drafting(self, figures: TargetFigures, work: Work, seconds: float) -> None:
        """The mean is what counts: lookup takes next to nothing in many steps, and the draft behind it all the more in
        others. A proposal saves as many steps as it has tokens, at most: all that takes twice as long is too long."""
        step = figures.step.seconds
        features = 1.0, work.longest, work.drafted, work.starting
        figures.drafting_cost.observe(min(seconds, 2 * work.longest * step), *features, unit=step)
        if not work.starting and work.drafted > figures.tried:
            figures.tried = work.drafted
        if not figures.length and work.drafted == 1:
            figures.next_probe += _PROBE_EVERY * min(max(0.0, seconds) / step, 1.0)

    def _count_step(self, target: TargetWorker, figures: TargetFigures) -> None:
        """Now and then a target that drafts takes a plain step, else it would never learn that plain steps cost less
        than it thinks; and a sequence that decodes plainly drafts a token, else nothing would be learnt of its draft.
        """
        figures.steps += 1
        figures.plain_step = figures.length > 0 and figures.steps % _PROBE_EVERY == 0
        if figures.steps >= figures.next_probe:
            self._probe(target, figures)
        # A first guess that was too high would stay, as one sequence with one token says nothing of many.
        other = None if figures.choice is None else figures.choice.other
        if other is not None and figures.steps >= max(figures.next_trial, _PROBE_EVERY):
            figures.choice, figures.trial_until = other, figures.steps + 2 * _PROBE_ROUNDS
            figures.next_trial = 2 * figures.trial_until

    def _probe(self, target: TargetWorker, figures: TargetFigures) -> None:
        prober = None if figures.prober is None else target.sequences.get(figures.prober)
        if prober is None or not self._drafts(prober):
            # A draft worker has the least to read of the shortest. Of those that may only look up, it has nothing.
            able = filter(self._drafts, target.sequences.values())
            shortest = min(able, key=lambda one: (one.request.proposer == "lookup", one.length), default=None)
            figures.prober = None if shortest is None else shortest.sequence_id
        figures.probes_left, figures.next_probe = _PROBE_ROUNDS, figures.steps + _PROBE_EVERY / 2

    def round(self, target: TargetWorker, sequence: Sequence, row: Row, result: RowResult) -> None:
        """A round ended."""
        figures, accepted, sequences = target.figures, result.accepted, len(target.sequences)
        figures.rounds += 1
        model, found = figures.acceptance, result.source is ProposalSource.LOOKUP
        if not row.verify or model is None or sequence.request.expected_output:
            return
        if found and figures.lookup is None:
            figures.lookup = LookupAcceptance(self._config.draft_length)
        if figures.lookup is not None and row.looked_up:
            figures.lookup.looked_up(found, sequences)
            if found:
                # Of those that only probes have asked for, the last few count, whoever's they are.
                probed = figures.choice is not None and figures.choice.lookup == 0
                figures.lookup.observe(accepted, result.verified, 1 if probed else sequences)
                return
        # What a draft worker was late with says nothing of its model.
        asked = row.drafted if target.grant is None else result.verified
        if not asked:
            return
        if not figures.length and sequence.sequence_id == figures.prober:
            if accepted and model.chances[0] < 0.5:
                # Against expectation: worth other probes at once.
                self._probe(target, figures)
            elif sequence.proposed_before:
                figures.probes_left = 0
        model.observe(accepted, asked, sequences)

    def served(self, target: TargetWorker, report: DraftingReport) -> None:
        """How the target's draft worker served it in one step."""
        figures = target.figures
        if report.asked <= 0:
            return
        in_time = min(report.in_time, report.asked) / report.asked
        if in_time > figures.in_time and figures.in_time < 0.9:
            self._probe(target, figures)  # as above
        # First, the draft reads what came since it was asked: that it is late by then tells nothing of later ones.
        if in_time > figures.in_time or (figures.length and figures.steps >= figures.reading_until):
            figures.in_time += (1 - FORGET) * (in_time - figures.in_time)

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

    def longest(self, sequence: Sequence) -> int:
        """Tokens that may be verified in the sequence's next round: 0 where nobody proposes any."""
        request, target = sequence.request, sequence.target
        if sequence.suspected or request.proposer == "none":
            return 0
        length, asked = self._config.draft_length, request.draft_length
        if asked is not None and (asked < length or request.expected_output):
            length = asked
        if length >= (rest := sequence.end - sequence.length):
            length = rest - 1
        if target is None:
            return length
        if (sequence.drafting_refused or target.figures.acceptance is None) and not request.expected_output:
            return 0
        return length if length < target.longest_draft else target.longest_draft

    def to_propose(self, sequence: Sequence) -> tuple[int, int | None]:
        """Tokens to propose with the sequence's next row, which samples, for the round after it: by a draft, and where
        lookup finds them; None: as many."""
        draft, lookup = self._lengths(sequence)
        match sequence.request.proposer:
            case "draft":
                return draft, 0
            case "lookup":
                return 0, draft if lookup is None else lookup
            case _:
                return draft, lookup

    def _lengths(self, sequence: Sequence) -> tuple[int, int | None]:
        """As `to_propose`, whoever may propose."""
        length, target = self.longest(sequence), sequence.target
        if length >= (rest := sequence.end - sequence.length - 1):
            length = rest - 1
        if length <= 0:
            return 0, None
        if target is None or not self._chooses(sequence):
            return length, None
        figures = target.figures
        chosen, lookup = figures.length, None if figures.choice is None else figures.choice.lookup
        if not figures.tried and figures.prober is None:
            self._probe(target, figures)
        probes = not chosen and figures.probes_left > 0 and sequence.sequence_id == figures.prober
        if probes:
            figures.probes_left -= 1
            self._counters.probes += 1
            chosen = 1
        elif figures.plain_step:
            chosen = 0
        if lookup is not None:
            lookup = min(lookup or int(probes or figures.plain_step), length)
        return chosen if chosen < length else length, lookup

    def to_expect(self, sequence: Sequence) -> int:
        """What `to_propose` will most likely ask of a draft once the prompt is computed; where 0, none need read it."""
        length, target = self.longest(sequence), sequence.target
        if sequence.request.proposer == "lookup":
            return 0
        return length if target is None or not self._chooses(sequence) else min(length, target.figures.length)

    def _chooses(self, sequence: Sequence) -> bool:
        """Whether the sequence drafts as many tokens as pay, not as many as it may."""
        request = sequence.request
        return self._auto and request.draft_length is None and not request.expected_output

    def _drafts(self, sequence: Sequence) -> bool:
        """Whether the sequence would draft if that paid."""
        return self._chooses(sequence) and self.longest(sequence) > 0

    def _decide(self, target: TargetWorker, figures: TargetFigures) -> None:
        """As if all sequences of the target had the mean length."""
        model, sequences = figures.acceptance, list(islice(target.sequences.values(), _SEQUENCES_ASKED))
        if model is None:
            figures.choice = None
            return
        share = sum(map(self._drafts, sequences)) / max(1, len(sequences))
        if not share or figures.steps < figures.trial_until:
            return  # those here are cancelled, about to end or on trial: the last choice holds for those to come
        if not figures.tried:
            # Who proposes may never be of use: until something is known of its costs, one sequence tries it.
            if figures.prober not in target.sequences:
                self._probe(target, figures)
            if figures.lookup is None:
                return
        base, token, verified, kv = figures.cost.coefficients
        of_step, of_pass, of_token, _ = figures.drafting_cost.coefficients
        count = figures.decided_for
        cycle = Cycle(
            count=count,
            parts=max(1.0, count / self._config.batch_size),
            base=max(base, _SHORTEST_SECONDS),
            row=token + verified,
            kv=kv * fmean(one.length for one in sequences),
            of_step=of_step,
            of_pass=of_pass,
            of_token=of_token,
        )
        # A first guess of costs or chances may be far off: what has been tried is at most doubled.
        chances = model.chances[: max(1, 2 * figures.tried // count)] if figures.tried else []
        if not figures.length:
            figures.reading_until = figures.steps + _PROBE_ROUNDS
        choice = figures.choice = choose(cycle, chances, share, figures.in_time, figures.choice, figures.lookup)
        if choice.length and figures.steps < figures.reading_until:
            choice.wait = max(choice.wait, self._config.wait_bound_steps * figures.step.seconds)
