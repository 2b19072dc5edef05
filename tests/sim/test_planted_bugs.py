"""The simulation finds bugs: each of these, planted into the product's own code, breaks a rule within few schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from spool.engine.drafting.inside_target import InsideDrafting
from spool.engine.drafting.proposer import Asked, LocalProposer
from spool.engine.kv.groups import PageGroup
from spool.engine.kv.pages import PagePool
from spool.protos import scheduler_pb2, worker_pb2
from spool.scheduler import core
from spool.scheduler.batching import verify_steps
from spool.scheduler.config import Policy
from spool.scheduler.messages import EmitTokens, SequenceRequest
from spool.scheduler.page_counts import PageCounts
from spool.scheduler.state.fleet import Fleet
from spool.scheduler.state.key_accounts import KeyAccount
from spool.scheduler.state.live_set import LiveSet, WaitingQueue
from spool.scheduler.state.workers import Sequence, TargetWorker
from spool.scheduler.transitions.assignment import Assignment
from spool.services.scheduler import session
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.worker_set import WorkerSet
from spool.services.scheduler_client.remote_stream import RemoteStream
from spool.services.worker import kv_pages
from spool.services.worker.drafting import ahead, messages
from spool.services.worker.drafting.mailbox import Mailbox, RemoteSequence
from spool.services.worker.drafting.messages import Answer
from spool.services.worker.drafting.service import DrafterService
from spool.services.worker.executor import StepExecutor
from spool.services.worker.sequences import WorkerSequence
from tests.sim.audit.books import digest_of
from tests.sim.cell import world
from tests.sim.cell.schedule import ScheduleError, run_schedule
from tests.sim.cell.world import World

MOST_SCHEDULES = 80

Patch = pytest.MonkeyPatch


def fencing_is_skipped(patch: Patch) -> None:
    execute = StepExecutor.execute

    def trusting(self: Any, request: worker_pb2.StepRequest, *others: Any) -> worker_pb2.StepReply:
        if request.scheduler_epoch < self.scheduler_epoch:
            original, request = request, worker_pb2.StepRequest()
            request.CopyFrom(original)
            request.scheduler_epoch = self.scheduler_epoch
        return execute(self, request, *others)

    patch.setattr(StepExecutor, "execute", trusting)


def fenced_scheduler_goes_on(patch: Patch) -> None:
    patch.setattr(SchedulerService, "link_broken", lambda self, endpoint, error: None)


def every_connection_has_the_same_epoch(patch: Patch) -> None:
    patch.setattr(WorkerSet, "take_epoch", lambda self: self.epoch)


def resubmission_lacks_the_last_delivered_token(patch: Patch) -> None:
    submission = RemoteStream.submission

    def short(self: RemoteStream) -> scheduler_pb2.SequenceSubmission:
        message = submission(self)
        if message.committed_output:
            message.committed_output.pop()
        return message

    patch.setattr(RemoteStream, "submission", short)


def grammar_is_lost_when_another_scheduler_goes_on(patch: Patch) -> None:
    submission = RemoteStream.submission

    def bare(self: RemoteStream) -> scheduler_pb2.SequenceSubmission:
        message = submission(self)
        if message.committed_output:
            message.sampling.ClearField("grammar")
        return message

    patch.setattr(RemoteStream, "submission", bare)


def last_token_is_delivered_twice(patch: Patch) -> None:
    write_output = session.write_output

    def stammer(emission: EmitTokens, event: scheduler_pb2.SequenceEvent) -> None:
        write_output(emission, event)
        event.tokens.append(event.tokens[-1])

    patch.setattr(session, "write_output", stammer)


def releases_are_forgotten(patch: Patch) -> None:
    evict = TargetWorker.evict

    def forgetful(self: TargetWorker, sequence: Sequence) -> None:
        evict(self, sequence)
        self.releases.pop(sequence.sequence_id, None)

    patch.setattr(TargetWorker, "evict", forgetful)


def damaged_kv_is_taken(patch: Patch) -> None:
    patch.setattr(kv_pages.zlib, "crc32", lambda data: 0)


def proposals_are_found_by_their_sequence_alone(patch: Patch) -> None:
    """Whatever prefix they belong to."""

    def take_in(self: RemoteSequence, answer: Answer) -> bool:
        self.answered, self.tokens, self.met = True, answer.tokens, True
        return True

    patch.setattr(RemoteSequence, "take_in", take_in)


def token_ids_of_proposals_are_believed(patch: Patch) -> None:
    """Where they come, and where they are verified."""

    def trusting(self: Any, rows: Iterable[WorkerSequence], wait_seconds: float) -> None:
        asked = [Asked(row.drafting, digest_of(row.history), row.verify) for row in rows]
        for row, proposal in zip(rows, self._proposer.take(asked, wait_seconds), strict=True):
            row.draft_tokens = proposal

    patch.setattr(messages, "_check_tokens", lambda *_: None)
    patch.setattr(StepExecutor, "_add_proposals", trusting)


def steps_wait_as_long_as_it_takes(patch: Patch) -> None:
    wait = Mailbox._wait
    patch.setattr(Mailbox, "_wait", lambda self, due, until: wait(self, due, until + 60.0))


def scheduler_lets_steps_wait_for_long(patch: Patch) -> None:
    patch.setattr(verify_steps, "_wait_seconds", lambda *_: 1.0)


def every_grant_holds(patch: Patch) -> None:
    patch.setattr(DrafterService, "_check", lambda self, grant: None)


def draft_keeps_its_targets_while_it_drains(patch: Patch) -> None:
    patch.setattr(Assignment, "renew", _renew_once)


def _renew_once(self: Assignment, now: float) -> None:
    drafts = list(self._fleet.drafts.values())
    for target in self._fleet.targets.values():
        if drafts and not target.spec.own_draft_id and target.draft not in drafts:
            self._grant(target, drafts[0], now)


def draft_inside_keeps_what_has_ended(patch: Patch) -> None:
    patch.setattr(InsideDrafting, "forget", LocalProposer.forget)


def draft_keeps_the_pages_of_wrong_guesses(patch: Patch) -> None:
    patch.setattr(ahead, "_release", lambda *_: None)


def page_keeps_its_key_when_it_is_written_to(patch: Patch) -> None:
    patch.setattr(PagePool, "forget", lambda self, page: None)


def windows_are_left_too_early(patch: Patch) -> None:
    left_behind = PageGroup.left_behind
    patch.setattr(PageGroup, "left_behind", lambda self, length: left_behind(self, length + (self.window is not None)))


def windows_take_no_pages(patch: Patch) -> None:
    patch.setattr(PageCounts, "pages_for", lambda self, positions: -(-positions // max(self.spans)))


def lost_workers_blame_nobody(patch: Patch) -> None:
    patch.setattr(core, "blame", lambda *_: None)


def priority_is_ignored(patch: Patch) -> None:
    start = Sequence.__init__

    def without(self: Sequence, request: SequenceRequest, order: int, account: KeyAccount) -> None:
        start(self, request, order, account)
        self.rank = (0, order)

    patch.setattr(Sequence, "__init__", without)


def keys_have_no_part_of_the_queue(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "part_of", lambda self, total, account: 0)
    patch.setattr(WaitingQueue, "tokens_of", lambda self, account: self.tokens)


def rows_follow_others_that_are_not_answered(patch: Patch) -> None:
    """Two steps ahead, at a place that nobody knows yet."""

    def can_follow(self: TargetWorker) -> list[Sequence]:
        last = next(reversed(self.outstanding.values()), None)
        rows = [row for row in (last.rows if last is not None else ()) if row.sample and not row.abandoned]
        return [self.sequences[row.sequence_id] for row in rows]

    patch.setattr(TargetWorker, "can_follow", can_follow)


def policies_wait_for_a_second_sequence(patch: Patch) -> None:
    pick = verify_steps.pick

    def waiting(policy: Policy, idle: dict[int, Sequence], *others: Any, **more: Any) -> tuple[list[Sequence], bool]:
        return pick(policy, idle, *others, **more) if len(idle) > 1 else ([], False)

    patch.setattr(verify_steps, "pick", waiting)


def pages_are_freed_twice(patch: Patch) -> None:
    evict = TargetWorker.evict

    def generous(self: TargetWorker, sequence: Sequence) -> None:
        pages = self.kv[sequence.sequence_id].pages
        evict(self, sequence)
        self.free_pages += pages

    patch.setattr(TargetWorker, "evict", generous)


def runs_of_keys_are_not_counted(patch: Patch) -> None:
    patch.setattr(LiveSet, "_count_running", lambda self, sequence, by: None)


def fingerprints_are_ignored(patch: Patch) -> None:
    def takers(self: Fleet, sequence: Sequence) -> list[TargetWorker]:
        return [target for target in self.targets.values() if not target.draining]

    patch.setattr(Fleet, "takers", takers)


def failure_of(seed: int, kinds: tuple[str, ...]) -> str | None:
    try:
        run_schedule(seed, kinds=kinds)
    except ScheduleError as error:
        return str(error)
    return None


def only_the_auditor_judges(patch: Patch) -> None:
    """In every schedule."""
    fail = World.fail

    def fail_by_messages(self: World, text: str) -> None:
        if text.startswith("audit: "):
            fail(self, text)

    patch.setattr(World, "fail", fail_by_messages)
    patch.setattr(world, "AUDIT_EVERY", 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plant", "first", "kinds", "broken_rule"),
    [
        (fencing_is_skipped, 0, ("two schedulers",), "audit: .*is answered with status 1, epoch .* has spoken"),
        (fenced_scheduler_goes_on, 0, ("two schedulers",), "audit: .*although it has been fenced off"),
        (every_connection_has_the_same_epoch, 0, ("reset",), "audit: .*a connection to .* has epoch"),
        (resubmission_lacks_the_last_delivered_token, 0, ("scheduler crash",), "audit: .*submitted with .* received"),
        (last_token_is_delivered_twice, 0, (), "audit: .*(which no target has made|asked for were)"),
        (releases_are_forgotten, 0, (), "audit: .*was not told to release"),
        (damaged_kv_is_taken, 0, ("kv damaged",), "audit: .*with a page that is damaged"),
        (proposals_are_found_by_their_sequence_alone, 0, ("draft link slow",), "audit: .*verifies .* proposed were"),
        (token_ids_of_proposals_are_believed, 69, ("proposals corrupted",), "audit: .*verifies .* that there are"),
        (steps_wait_as_long_as_it_takes, 0, ("draft hangs",), "a step waits"),
        (scheduler_lets_steps_wait_for_long, 0, (), "may wait for a draft worker too long"),
        (every_grant_holds, 18, ("draft crash",), "audit: .*whose grant is for epoch"),
        (draft_keeps_its_targets_while_it_drains, 0, ("draft leaves",), "with DraftGrant.*drafts are"),
        (draft_inside_keeps_what_has_ended, 0, (), "the draft of target. holds"),
        (draft_keeps_the_pages_of_wrong_guesses, 0, (), "draft-. holds|holds .* pages"),
        (page_keeps_its_key_when_it_is_written_to, 0, (), "must get|has a key"),
        (windows_are_left_too_early, 0, (), "must get|failed unprovoked"),
        (windows_take_no_pages, 0, (), "failed unprovoked"),
        (grammar_is_lost_when_another_scheduler_goes_on, 15, ("scheduler crash",), "must get"),
        (lost_workers_blame_nobody, 12, ("poison",), "has killed .* workers"),
        (rows_follow_others_that_are_not_answered, 0, (), "audit: .*follows"),
        (priority_is_ignored, 5, (), "comes first"),
        (keys_have_no_part_of_the_queue, 154, (), "and none of that key waits"),
        (policies_wait_for_a_second_sequence, 0, (), "has no step, and a sequence|has heard nothing from"),
        (pages_are_freed_twice, 0, (), "pages are miscounted|has too few pages reserved"),
        (runs_of_keys_are_not_counted, 0, (), "sequences of keys are miscounted"),
        (fingerprints_are_ignored, 4, ("worker drains",), "goes on with other bits"),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: Patch, plant: Callable[[Patch], None], first: int, kinds: tuple[str, ...], broken_rule: str
) -> None:
    """From seed `first` on. With rules of the audit, all other rules are off."""
    plant(monkeypatch)
    if broken_rule.startswith("audit"):
        only_the_auditor_judges(monkeypatch)
    failures = ((seed, failure_of(seed, kinds)) for seed in range(first, first + MOST_SCHEDULES))
    seed, failure = next((seed, failure) for seed, failure in failures if failure is not None)
    assert re.search(broken_rule, failure.partition("\\n")[0])
    assert failure_of(seed, kinds) == failure
