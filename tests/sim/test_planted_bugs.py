"""The simulation finds bugs: each of these, planted into the product's own code, breaks a rule within few schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.kv.groups import PageGroup
from engine.kv.pages import PagePool
from protos import scheduler_pb2, worker_pb2
from scheduler import core
from scheduler.core import SchedulerCore
from scheduler.messages import EmitTokens, Outcome, SequenceRequest
from scheduler.page_counts import PageCounts
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.live_set import WaitingQueue
from scheduler.state.worker_records import KvEntry
from scheduler.state.workers import Sequence, TargetWorker, WorkerState
from services.scheduler import session
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_set import WorkerSet
from services.scheduler_client.remote_stream import RemoteStream
from services.worker import kv_pages
from services.worker.executor import StepExecutor
from services.worker.sequences import WorkerSequences
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
    evict = WorkerState.evict

    def forgetful(self: WorkerState, sequence: Sequence) -> None:
        evict(self, sequence)
        self.releases.pop(sequence.sequence_id, None)

    patch.setattr(WorkerState, "evict", forgetful)


def ledger_keeps_a_rejected_token(patch: Patch) -> None:
    def settle(self: KvEntry, accepted: int) -> None:
        self.valid += self.ahead
        self.ahead = 0

    patch.setattr(KvEntry, "settle_proposal", settle)


def damaged_kv_is_taken(patch: Patch) -> None:
    patch.setattr(kv_pages.zlib, "crc32", lambda data: 0)


def first_prepared_proposal_is_taken(patch: Patch) -> None:
    """Whatever the target has accepted and chosen."""

    def prepared(self: Sequence, accepted: int, token: int) -> Outcome | None:
        outcomes, self.outcomes = self.outcomes, ()
        return next(iter(outcomes), None)

    patch.setattr(Sequence, "prepared", prepared)


def page_keeps_its_key_when_it_is_written_to(patch: Patch) -> None:
    patch.setattr(PagePool, "forget", lambda self, page: None)


def windows_are_left_too_early(patch: Patch) -> None:
    left_behind = PageGroup.left_behind
    patch.setattr(PageGroup, "left_behind", lambda self, length: left_behind(self, length + (self.window is not None)))


def windows_take_no_pages(patch: Patch) -> None:
    patch.setattr(PageCounts, "pages_for", lambda self, positions: -(-positions // max(self.spans)))


def lost_workers_blame_nobody(patch: Patch) -> None:
    patch.setattr(core, "blame", lambda *_: None)


def nobody_ends_a_wait(patch: Patch) -> None:
    patch.setattr(SchedulerCore, "next_deadline", lambda self: None)


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


def rows_that_follow_verify_nothing(patch: Patch) -> None:
    settle = WorkerSequences.settle
    patch.setattr(WorkerSequences, "settle", lambda self, sequence, *of: settle(self, sequence, *of[:2]))


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
        (ledger_keeps_a_rejected_token, 4, (), "audit: .*counts on .* positions of KV"),
        (damaged_kv_is_taken, 0, ("kv damaged",), "audit: .*with a page that is damaged"),
        (first_prepared_proposal_is_taken, 4, (), "audit: .*has draft_tokens .* proposed were"),
        (page_keeps_its_key_when_it_is_written_to, 0, (), "must get|has a key"),
        (windows_are_left_too_early, 0, (), "must get|failed unprovoked"),
        (windows_take_no_pages, 0, (), "failed unprovoked"),
        (grammar_is_lost_when_another_scheduler_goes_on, 15, ("scheduler crash",), "must get"),
        (lost_workers_blame_nobody, 12, ("poison",), "has killed .* workers"),
        (rows_follow_others_that_are_not_answered, 0, (), "audit: .*follows"),
        (rows_that_follow_verify_nothing, 3, (), "audit: .*is not accepted, although the target chose it"),
        (nobody_ends_a_wait, 0, (), "overdue"),
        (priority_is_ignored, 5, (), "comes first"),
        (keys_have_no_part_of_the_queue, 0, (), "and none of that key waits"),
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
