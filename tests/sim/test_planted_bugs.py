"""The simulation finds bugs: each of these, planted into the product's own code, soon breaks a rule."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as IntSequence
from typing import Any

import pytest

from engine.kv import prefix_cache
from engine.kv.pages import PageKey, PagePool, PageTable
from engine.kv.prefix_cache import page_key
from engine.sampling.grammars import GrammarState
from protos import scheduler_pb2, worker_pb2
from scheduler import core
from scheduler.core import SchedulerCore
from scheduler.messages import Outcome, Role, RowResult, RowStatus, SendStep, SequenceRequest, WorkerSpec
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.kv_ledger import KvEntry, PageLedger
from scheduler.state.waiting_queue import WaitingQueue
from scheduler.state.worker_base import InFlightRow, WorkerState
from scheduler.state.workers import Sequence, TargetWorker
from scheduler.transitions import results
from scheduler.transitions.lifecycle import Lifecycle
from services.scheduler.service import SchedulerService
from services.scheduler.session import GatewaySession
from services.scheduler.workers import worker_link
from services.scheduler.workers.worker_link import WorkerEndpoint, WorkerLink
from services.scheduler.workers.worker_set import WorkerSet
from services.scheduler_client import session
from services.scheduler_client.remote_stream import RemoteStream
from services.scheduler_client.session import ClientSession
from services.worker import kv_pages as kv_transfer
from services.worker import registration
from services.worker.executor import StepExecutor
from services.worker.kv_pages import KvTransfer
from services.worker.sequences import PreparedRow, RowRejectedError, WorkerSequence, WorkerSequences
from tests.sim.cell import world
from tests.sim.cell.plan import FAULTS, HANGING
from tests.sim.cell.schedule import ScheduleError, run_schedule
from tests.sim.cell.world import World

MOST_SCHEDULES = 80
# Bugs that few schedules show: the search begins where it was successful before.
BEGIN_AT = {
    "kv_that_did_not_arrive_keeps_its_room": 16,
    "grammar_does_not_move_with_the_kv": 17,
    "scored_positions_are_taken_over": 7,
    "scores_are_kept_for_the_second_delivery": 32,
}

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


def resubmission_lacks_the_last_delivered_token(patch: Patch) -> None:
    submission = RemoteStream.submission

    def short(self: RemoteStream) -> scheduler_pb2.SequenceSubmission:
        message = submission(self)
        if message.committed_output:
            message.committed_output.pop()
        return message

    patch.setattr(RemoteStream, "submission", short)


def ledger_keeps_a_rejected_token(patch: Patch) -> None:
    def settle(self: KvEntry, accepted: int) -> None:
        self.valid += self.ahead
        self.ahead = 0

    patch.setattr(KvEntry, "settle_proposal", settle)


def worker_keeps_the_pages_of_a_scheduler_that_is_gone(patch: Patch) -> None:
    patch.setattr(WorkerSequences, "drop_all", lambda self: None)


def core_keeps_the_pages_of_sequences_that_left(patch: Patch) -> None:
    patch.setattr(PageLedger, "release", lambda self, sequence_id: None)


def releases_are_forgotten(patch: Patch) -> None:
    evict = WorkerState.evict

    def forgetful(self: WorkerState[Any, Any], sequence: Sequence) -> None:
        evict(self, sequence)
        self.releases.pop(sequence.sequence_id, None)

    patch.setattr(WorkerState, "evict", forgetful)


def sequence_that_returns_to_the_queue_forgets_a_token(patch: Patch) -> None:
    return_to_queue = Lifecycle.return_to_queue

    def forgetful(self: Lifecycle, sequence: Sequence) -> None:
        return_to_queue(self, sequence)
        if sequence.length > len(sequence.request.prompt):
            self._live.waiting.remove(sequence)
            sequence.length -= 1
            sequence.tokens.truncate(sequence.length)
            self._live.waiting.push(sequence)

    patch.setattr(Lifecycle, "return_to_queue", forgetful)


def repeated_reply_is_applied_twice(patch: Patch) -> None:
    """The link lets it pass, and the core takes it for the first."""
    take, take_answered = WorkerLink._take, TargetWorker.take_answered

    def take_again(self: Any, reply: worker_pb2.StepReply) -> None:
        known = self.__dict__.setdefault("known", {})
        known.update(self._in_flight)
        if reply.step_id in known:
            self._in_flight[reply.step_id] = known[reply.step_id]
        take(self, reply)

    def answered_again(self: Any, step_id: int, now: float) -> Any:
        answered = self.__dict__.setdefault("answered", {})
        step: Any = take_answered(self, step_id, now)
        if step is None and (step := answered.get(step_id)) is not None:
            step.rows[:] = [f for f in step.rows if f.row.sequence_id in self.sequences and not f.abandoned]
            self.in_flight.update({flight.row.sequence_id: flight for flight in step.rows})
        answered[step_id] = step
        return step

    patch.setattr(WorkerLink, "_take", take_again)
    patch.setattr(TargetWorker, "take_answered", answered_again)


def step_out_of_turn_fails_its_sequences(patch: Patch) -> None:
    check_reply, results = WorkerLink._check_reply, worker_link._results

    def lenient(self: WorkerLink, reply: worker_pb2.StepReply) -> None:
        if reply.status != worker_pb2.STEP_STATUS_INVALID:
            check_reply(self, reply)

    def failures(step: SendStep, reply: worker_pb2.StepReply) -> tuple[RowResult, ...]:
        if reply.status == worker_pb2.STEP_STATUS_INVALID:
            return tuple(RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error=reply.error) for row in step.rows)
        return results(step, reply)

    patch.setattr(WorkerLink, "_check_reply", lenient)
    patch.setattr(worker_link, "_results", failures)


def draining_worker_fails_what_is_new(patch: Patch) -> None:
    execute, prepare = StepExecutor.execute, WorkerSequences.prepare

    def lenient(self: Any, request: worker_pb2.StepRequest, *others: Any) -> worker_pb2.StepReply:
        self._sequences.closed, self.draining = self.draining, False
        try:
            return execute(self, request, *others)
        finally:
            self.draining = self._sequences.closed

    def refusing(self: Any, row: worker_pb2.Row) -> PreparedRow:
        if self.closed and row.sequence_id not in self:
            raise RowRejectedError(RowStatus.FAILED, "the worker is draining")
        return prepare(self, row)

    patch.setattr(StepExecutor, "execute", lenient)
    patch.setattr(WorkerSequences, "prepare", refusing)


def answer_changes_nothing(patch: Patch) -> None:
    take_answered = WorkerState.take_answered

    def unnoticed(self: WorkerState[Any, Any], step_id: int, now: float) -> Any:
        before, step = self.changed, take_answered(self, step_id, now)
        self.changed = before
        return step

    patch.setattr(WorkerState, "take_answered", unnoticed)


def nobody_ends_a_wait(patch: Patch) -> None:
    patch.setattr(SchedulerCore, "next_deadline", lambda self: None)


def failure_of(seed: int, faults: tuple[str, ...]) -> str | None:
    try:
        run_schedule(seed, kinds=faults)
    except ScheduleError as error:
        return str(error)
    return None


def sessions_without_a_lease(patch: Patch) -> None:
    async def read(self: Any, requests: AsyncIterator[scheduler_pb2.SessionRequest]) -> None:
        async for request in requests:
            self._take(request)

    patch.setattr(GatewaySession, "_read", read)


def client_that_leaves_is_not_reported(patch: Patch) -> None:
    patch.setattr(ClientSession, "cancel", lambda self, request_id: None)


def sequences_of_a_lost_session_go_on(patch: Patch) -> None:
    patch.setattr(GatewaySession, "_drop_all", lambda self: None)


def replies_are_kept_for_the_next_scheduler(patch: Patch) -> None:
    start = StepExecutor.__init__

    class Kept(OrderedDict[int, worker_pb2.StepReply]):
        def clear(self) -> None:
            pass

    def start_with_them(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self._replies = Kept()

    patch.setattr(StepExecutor, "__init__", start_with_them)


def every_connection_has_the_same_epoch(patch: Patch) -> None:
    patch.setattr(WorkerSet, "take_epoch", lambda self: self.epoch)


def core_does_not_hear_of_lost_workers(patch: Patch) -> None:
    patch.setattr(SchedulerService, "worker_lost", lambda self, endpoint, reason, blameless: None)


def lost_workers_blame_nobody(patch: Patch) -> None:
    patch.setattr(core, "blame", lambda *_: None)


def others_go_beside_a_suspect(patch: Patch) -> None:
    """So that a second loss has more than one who can be the reason."""
    patch.setattr(TargetWorker, "lone_step", property(lambda self: None, lambda self, step_id: None), raising=False)


def unreadable_replies_are_taken_for_messages(patch: Patch) -> None:
    for module in (worker_link, session, registration):
        patch.setattr(module, "readable", lambda reply: reply)


def hang_leaves_no_mark(patch: Patch) -> None:
    worker_lost = SchedulerService.worker_lost

    def forgiving(self: SchedulerService, endpoint: WorkerEndpoint, reason: str, blameless: bool) -> None:
        worker_lost(self, endpoint, reason, blameless or "no reply to step" in reason)

    patch.setattr(SchedulerService, "worker_lost", forgiving)


def mark_is_lost_when_a_worker_comes_back(patch: Patch) -> None:
    join = SchedulerCore._join

    def forgetful(self: SchedulerCore, spec: WorkerSpec) -> None:
        join(self, spec)
        for sequence in self._live.waiting.members():
            sequence.suspected = False

    patch.setattr(SchedulerCore, "_join", forgetful)


def fenced_scheduler_goes_on(patch: Patch) -> None:
    patch.setattr(SchedulerService, "link_broken", lambda self, endpoint, error: None)


def damaged_kv_is_taken(patch: Patch) -> None:
    patch.setattr(kv_transfer.zlib, "crc32", lambda data: 0)


def kv_that_did_not_arrive_keeps_its_room(patch: Patch) -> None:
    patch.setattr(KvTransfer, "give_up", lambda self, sequence: None)


def page_keeps_its_key_when_it_is_written_to(patch: Patch) -> None:
    patch.setattr(PagePool, "forget", lambda self, page: None)


def key_of_a_page_leaves_out_what_comes_before_it(patch: Patch) -> None:
    patch.setattr(prefix_cache, "page_key", lambda before, tokens: page_key(b"", tokens))


def shared_page_has_no_reference(patch: Patch) -> None:
    share = PagePool.share

    def uncounted(self: PagePool, table: PageTable, keys: Iterable[PageKey]) -> int:
        shared = share(self, table, keys)
        for page in table.pages[len(table.pages) - shared :]:
            self._references[page] = max(1, self._references[page] - 1)
        return shared

    patch.setattr(PagePool, "share", uncounted)


def output_is_not_charged(patch: Patch) -> None:
    def uncharged(self: KeyAccount, tokens: int, now: float) -> None:
        self.output_tokens += tokens

    patch.setattr(KeyAccount, "serve_output", uncharged)


def priority_is_ignored(patch: Patch) -> None:
    start = Sequence.__init__

    def without(self: Sequence, request: SequenceRequest, order: int, account: KeyAccount) -> None:
        start(self, request, order, account)
        self.rank = (0, order)

    patch.setattr(Sequence, "__init__", without)


def key_that_was_served_most_is_next(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "first_key", lambda self: max(self._competing, key=lambda a: a.claimed, default=None))


def limit_of_running_sequences_is_forgotten(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "update", forgetful_of_limits(WaitingQueue.update))


def forgetful_of_limits(update: Callable[..., None]) -> Callable[..., None]:
    """A key competes on when it has reached its limit."""

    def without_limits(self: WaitingQueue, account: KeyAccount, shrunk: bool = False) -> None:
        if account.waiting and account in self._competing and not account.may_run_more:
            return
        update(self, account, shrunk)

    return without_limits


FOLLOW = GrammarState.follow


class TrustingState(GrammarState):
    """Takes the tokens that it knows for those of the output, as many as these are."""

    __slots__ = ()

    def follow(self, definition: str, output: IntSequence[int], fresh: Any) -> Any:
        known = min(len(self._tokens), len(output))
        self._tokens[:known] = output[:known]
        return FOLLOW(self, definition, output, fresh)


def grammar_state_is_not_compared_with_the_output(patch: Patch) -> None:
    patch.setattr(GrammarState, "follow", TrustingState.follow)


def grammar_state_outlives_its_scheduler(patch: Patch) -> None:
    """A target knows it by the number of the sequence, which the next scheduler gives to another one."""
    find = WorkerSequences._find

    def find_with_state(self: Any, row: worker_pb2.Row) -> WorkerSequence:
        held = find(self, row)
        if self._role is Role.TARGET:
            held.grammar_state = self.__dict__.setdefault("states", {}).setdefault(row.sequence_id, TrustingState())
        return held

    patch.setattr(WorkerSequences, "_find", find_with_state)


def grammar_is_lost_where_another_scheduler_goes_on(patch: Patch) -> None:
    submission = RemoteStream.submission

    def bare(self: RemoteStream) -> scheduler_pb2.SequenceSubmission:
        message = submission(self)
        if message.committed_output:
            message.sampling.ClearField("grammar")
        return message

    patch.setattr(RemoteStream, "submission", bare)


def grammar_does_not_move_with_the_kv(patch: Patch) -> None:
    expect = KvTransfer.expect

    def bare(self: KvTransfer, request: worker_pb2.ImportKvRequest) -> WorkerSequence:
        request.parameters.sampling.ClearField("grammar")
        return expect(self, request)

    patch.setattr(KvTransfer, "expect", bare)


def scored_positions_are_taken_over(patch: Patch) -> None:
    """From other sequences: nobody computes their logits."""
    take_over = WorkerSequences._take_over

    def greedy(self: Any, sequence: WorkerSequence, end: int, computes: bool, scored: int | None) -> None:
        take_over(self, sequence, end, computes, None)

    patch.setattr(WorkerSequences, "_take_over", greedy)


def scores_are_kept_for_the_second_delivery(patch: Patch) -> None:
    """A sequence that comes to another target before its first token is scored anew from its beginning."""
    return_to_queue = Lifecycle.return_to_queue

    def forgetful(self: Lifecycle, sequence: Sequence) -> None:
        return_to_queue(self, sequence)
        if sequence.prompt_logprobs:
            sequence.score_from = 0

    patch.setattr(Lifecycle, "return_to_queue", forgetful)


def tokens_that_a_draft_assumed_count_as_committed(patch: Patch) -> None:
    take = results._take_outcomes

    def trusting(entry: KvEntry, flight: InFlightRow[Sequence], result: RowResult) -> None:
        take(entry, flight, result)
        entry.valid += entry.ahead
        entry.ahead = 0

    patch.setattr(results, "_take_outcomes", trusting)


def first_prepared_proposal_is_taken(patch: Patch) -> None:
    """Whatever the target has accepted and chosen."""

    def prepared(self: Sequence, accepted: int, token: int) -> Outcome | None:
        outcomes, self.outcomes = self.outcomes, ()
        return next(iter(outcomes), None)

    patch.setattr(Sequence, "prepared", prepared)


def fork_writes_to_the_page_that_it_shares(patch: Patch) -> None:
    def fork(self: PagePool, table: PageTable, length: int) -> tuple[PageTable, None]:
        pages = table.pages[: self.pages_for(length)]
        for page in pages:
            self._references[page] += 1
        return PageTable(pages, length), None

    patch.setattr(PagePool, "fork", fork)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plant", "faults", "broken_rule"),
    [
        (page_keeps_its_key_when_it_is_written_to, (), "must get|has a key"),
        (key_of_a_page_leaves_out_what_comes_before_it, (), "must get"),
        (shared_page_has_no_reference, (), "must get|page accounting"),
        (fencing_is_skipped, ("two schedulers",), "answered a fenced scheduler"),
        (resubmission_lacks_the_last_delivered_token, ("scheduler crash",), "must get"),
        (ledger_keeps_a_rejected_token, (), "the ledger counts"),
        (tokens_that_a_draft_assumed_count_as_committed, (), "the ledger counts"),
        (fork_writes_to_the_page_that_it_shares, (), "is that of other tokens"),
        (worker_keeps_the_pages_of_a_scheduler_that_is_gone, ("scheduler crash",), "KV of .* lost|holds|positions"),
        (core_keeps_the_pages_of_sequences_that_left, (), "is not idle|not ended|core failed"),
        (releases_are_forgotten, (), "holds .* pages|failed unprovoked"),
        (sequence_that_returns_to_the_queue_forgets_a_token, ("worker crash",), "must get|does not|core failed"),
        (repeated_reply_is_applied_twice, ("duplicate and reorder",), "must get|core failed"),
        (
            step_out_of_turn_fails_its_sequences,
            ("duplicate and reorder",),
            "failed unprovoked: .* must be above|left over",
        ),
        (draining_worker_fails_what_is_new, ("worker drains",), "failed unprovoked: .*draining"),
        (answer_changes_nothing, (), "was not sent"),
        (nobody_ends_a_wait, (), "overdue"),
        (client_that_leaves_is_not_reported, (), "ago and goes on"),
        (sequences_of_a_lost_session_go_on, ("gateway crash",), "sessions that are over"),
        (
            replies_are_kept_for_the_next_scheduler,
            ("scheduler crash",),
            "the ledger counts|must get|(failed|lost) unprovoked",
        ),
        (every_connection_has_the_same_epoch, ("reset",), "holds|lost unprovoked|was refused"),
        (core_does_not_hear_of_lost_workers, ("worker crash",), "which are lost"),
        (fenced_scheduler_goes_on, ("two schedulers",), "fenced off and goes on|which are lost"),
        (lost_workers_blame_nobody, ("poison",), "has killed .* workers"),
        (others_go_beside_a_suspect, ("poison",), "failed unprovoked: .*was lost"),
        (unreadable_replies_are_taken_for_messages, FAULTS, "NoneType"),
        (hang_leaves_no_mark, (HANGING,), "has killed .* workers"),
        (mark_is_lost_when_a_worker_comes_back, (HANGING,), "has killed .* workers"),
        (damaged_kv_is_taken, ("kv damaged",), "must get"),
        (kv_that_did_not_arrive_keeps_its_room, ("kv damaged", "lost kv"), "holds .* pages|failed unprovoked"),
        (output_is_not_charged, (), "was served .* its counter is"),
        (priority_is_ignored, (), "comes first"),
        (key_that_was_served_most_is_next, (), "comes first"),
        (limit_of_running_sequences_is_forgotten, (), "the limit is|comes first|competes though"),
        (grammar_state_is_not_compared_with_the_output, (), "proposed .* forbids"),
        (grammar_state_outlives_its_scheduler, ("scheduler crash",), "must get|the grammar failed"),
        (grammar_is_lost_where_another_scheduler_goes_on, ("scheduler crash",), "must get"),
        (grammar_does_not_move_with_the_kv, ("worker leaves",), "must get"),
        (scored_positions_are_taken_over, (), "others came"),
        (scores_are_kept_for_the_second_delivery, ("worker crash",), "of its prompt, must get"),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: Patch, plant: Callable[[Patch], None], faults: tuple[str, ...], broken_rule: str
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(world, "AUDIT_EVERY", 0)
    begin = BEGIN_AT.get(plant.__name__, 0)
    seeds = (*range(begin, MOST_SCHEDULES), *range(begin))
    failures = ((seed, failure_of(seed, faults)) for seed in seeds)
    seed, failure = next((seed, failure) for seed, failure in failures if failure is not None)
    rule, _, details = failure.partition("\n")
    assert re.search(broken_rule, rule)
    assert f"seed {seed} " in rule
    assert "last events:" in details
    assert failure_of(seed, faults) == failure


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
    ("plant", "faults", "broken_rule"),
    [
        (fencing_is_skipped, ("two schedulers",), "is answered with status 1, epoch .* has spoken"),
        (fenced_scheduler_goes_on, ("two schedulers",), "although it has been fenced off"),
        (every_connection_has_the_same_epoch, ("reset",), "a connection to .* has epoch"),
        (resubmission_lacks_the_last_delivered_token, ("scheduler crash",), "is submitted with .* received was"),
        (grammar_is_lost_where_another_scheduler_goes_on, ("scheduler crash",), "asks for other things"),
        (releases_are_forgotten, (), "was not told to release"),
        (sequences_of_a_lost_session_go_on, ("gateway crash",), "nobody waits for the sequence"),
        (sessions_without_a_lease, ("partition",), "after the gateway was last heard"),
        (damaged_kv_is_taken, ("kv damaged",), "with a page that is damaged"),
        (tokens_that_a_draft_assumed_count_as_committed, (), "counts on .* positions of KV"),
        (first_prepared_proposal_is_taken, (), "has draft_tokens .* proposed were"),
    ],
)
def test_messages_alone_show_a_planted_bug(
    monkeypatch: Patch, plant: Callable[[Patch], None], faults: tuple[str, ...], broken_rule: str
) -> None:
    plant(monkeypatch)
    only_the_auditor_judges(monkeypatch)
    failures = (failure_of(seed, faults) for seed in range(MOST_SCHEDULES))
    failure = next(failure for failure in failures if failure is not None)
    assert re.search(f"audit: .*{broken_rule}", failure.partition("\n")[0])
