"""A scheduler core that is checked while it works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler.core import SchedulerCore
from scheduler.messages import (
    Command,
    EmitTokens,
    Event,
    SendStep,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    WorkerLost,
)
from scheduler.state.workers import Sequence, TargetWorker, Worker
from scheduler.transitions.table import Cause

if TYPE_CHECKING:
    from tests.sim.cell.scheduler import SimulatedScheduler
    from tests.sim.cell.world import World

_SLACK = 1e-3

# The core's records are compared every so many events, since that visits all of them.
_CHECK_EVERY = 61


class WatchedCore(SchedulerCore):
    """Checks after each event and each plan what must always hold."""

    def __init__(self, world: World, scheduler: SimulatedScheduler) -> None:
        super().__init__(world.plan.config)
        self._world = world
        self._scheduler = scheduler
        self._events = 0
        self._all_planned = True
        self._first = self._live.waiting.first
        self._live.waiting.first = self._watch_first  # type: ignore[method-assign]
        self._running = 0
        self._change = self._lifecycle._change
        self._lifecycle._change = self._watch_change  # type: ignore[method-assign]
        self._requests: dict[int, SequenceRequest] = {}
        self._begun: set[int] = set()
        self._emitted: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter()

    def apply(self, event: Event, now: float) -> list[Command]:
        self._check_waits(now)
        self._all_planned = False
        if isinstance(event, WorkerLost) and not self._world.may_lose_workers:
            self._world.fail(f"{self._scheduler.process.name} lost {event.worker_id} unprovoked")
        if isinstance(event, SequenceSubmitted):
            self._requests[event.request.sequence_id] = event.request
            self._world.faults.poisons.submitted(event.request)
        with self._failing_on(type(event).__name__):
            commands = super().apply(event, now)
        if self._world.detailed:
            self._tell("hears", [event])
            self._tell("says", commands)
        self._check_served(commands)
        self._events += 1
        if self._events % _CHECK_EVERY == 0:
            self._check_workers()
        return commands

    def plan(self, now: float) -> list[Command]:
        self._check_waits(now)
        with self._failing_on("planning"):
            commands = super().plan(now)
        self._all_planned = True
        deadline = self.next_deadline()
        if deadline is not None and deadline <= now:
            self._world.fail(f"a plan is due since {now - deadline:.4f} s, although everything was planned just now")
        running, targets = len(self._live.running), self._fleet.targets.values()
        limit = self._config.max_running * sum(not target.draining for target in targets)
        # Those that run go on when a target begins to drain, but nobody comes to them.
        if running > max(limit, self._running):
            self._world.fail(f"{running} sequences run, the limit is {limit}")
        self._running = running
        for step in commands:
            if isinstance(step, SendStep):
                self._check_step(step, now)
        self._check_limits()
        self._check_all_is_sent(now)
        return commands

    def _check_step(self, step: SendStep, now: float) -> None:
        config, worker = self._config, self._fleet.find(step.worker_id)
        assert worker is not None
        steady = 1 if isinstance(worker, TargetWorker) else 2
        sequences = [self._live.sequences[row.sequence_id] for row in step.rows]
        fed = [len(row.tokens) for row in step.rows]
        tokens = sum(fed) + sum(len(row.draft_tokens) for row in step.rows)
        broken = {
            "has neither rows nor releases": not (step.rows or step.released),
            "has a sequence twice": len(set(sequences)) < len(sequences),
            "has more tokens than the worker takes": tokens > worker.spec.max_num_batched_tokens,
            "has more prefill than a chunk": sum(count for count in fed if count > steady) > config.prefill_chunk,
            "has too many proposals": sum(row.draft_length > 0 for row in step.rows) > config.proposals_per_step,
            "verifies more than a batch": step.group is not None and step.group.rows > config.batch_size,
            "is one too many in flight": len(worker.outstanding) > config.steps_in_flight,
            "drafts beyond max_tokens": any(
                sequence.length + len(row.draft_tokens) + row.draft_length
                >= len(sequence.request.prompt) + sequence.request.max_tokens
                for sequence, row in zip(sequences, step.rows, strict=True)
                if row.draft_tokens or row.draft_length
            ),
            "has another row than that of a suspect": len(step.rows) > 1
            and any(sequence.suspected for sequence in sequences),
        }
        for rule, is_broken in broken.items():
            if is_broken:
                self._world.fail(f"step {step.step_id} for {step.worker_id} {rule}")
        if isinstance(worker, TargetWorker) and step.group is not None and self._world.plan.pages_are_ample:
            self._check_order(worker, step, sequences[: step.group.rows], now)

    def _check_order(self, target: TargetWorker, step: SendStep, group: list[Sequence], now: float) -> None:
        """A drafted sequence that waits too long is left out only for older ones, or where it has no room."""
        left = target.drafted.oldest()
        if left is None or left.due > now or any(sequence.suspected for sequence in group):
            return
        used = sum(1 + len(row.draft_tokens) for row in step.rows[: len(group)])
        most = target.spec.max_num_batched_tokens
        room = most - min(self._config.prefill_chunk, most // 2) - used
        has_room = len(group) < self._config.batch_size and 1 + len(left.draft_tokens) <= room
        if has_room or any(sequence.drafted_at > left.drafted_at for sequence in group):
            self._world.fail(f"step {step.step_id} for {step.worker_id} leaves out overdue {left.sequence_id}")

    def _check_all_is_sent(self, now: float) -> None:
        """Nor had those a step to take that were not asked, since nothing there had changed."""
        for worker in self._fleet.workers():
            worker.changed = True
        missed = super().plan(now)
        if missed:
            self._world.fail(f"{missed[0]} was not sent, although everything was planned just now")

    def _tell(self, how: str, messages: Iterable[Event | Command]) -> None:
        for message in messages:
            if not isinstance(message, (SendStep, StepCompleted)):  # the workers tell of steps
                self._world.note(how, self._scheduler.process.name, message)

    def _watch_first(self) -> Sequence | None:
        """Nobody comes before the sequence that is next: searched for among all that wait, without any heap."""
        sequence = self._first()
        waiting = [one for one in self._live.sequences.values() if one.sequence_id not in self._live.running]
        rivals = [one for one in waiting if one.account.may_run_more]
        if sequence is None:
            if rivals:
                self._world.fail(f"nobody is next, although {len(rivals)} sequences wait")
            return None
        claim, rank = sequence.account.claimed, (sequence.request.priority, sequence.order)
        for one in rivals:
            same = one.account is sequence.account
            if (same and (one.request.priority, one.order) < rank) or (not same and one.account.claimed < claim):
                self._world.fail(f"sequence {sequence.sequence_id} is next, sequence {one.sequence_id} comes first")
        return sequence

    def _watch_change(self, sequence: Sequence, cause: Cause) -> None:
        before = sequence.state
        self._change(sequence, cause)
        self._world.changes[f"{before.value}: {cause.value}"] += 1

    def _check_limits(self) -> None:
        for account in self._live.accounts:
            limit = account.key.max_running
            running = sum(one.account is account for one in self._live.running.values())
            if limit is not None and running > limit:
                self._world.fail(f"{running} sequences of key {account.key.name} run, the limit is {limit}")

    def _check_served(self, commands: list[Command]) -> None:
        """A key's counter holds at least the output that it was given and the prompts before it, each token once."""
        for command in commands:
            if isinstance(command, EmitTokens):
                request = self._requests[command.sequence_id]
                name = self._live.accounts.of(request.key).key.name
                self._emitted[name] += len(command.tokens)
                if command.sequence_id not in self._begun:
                    self._begun.add(command.sequence_id)
                    self._prompts[name] += len(request.prompt)
        for account in self._live.accounts if commands else ():
            name, weight = account.key.name, account.key.weight
            served = self._prompts[name] + self._emitted[name]
            if account.output_tokens != self._emitted[name] or account.served + _SLACK < served / weight:
                self._world.fail(
                    f"key {name!r} was served {served} tokens at weight {weight:g}, {self._emitted[name]} of output; "
                    f"its counter is {account.served:.3f}, with {account.output_tokens} of output"
                )

    @contextmanager
    def _failing_on(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._world.fail(f"the core failed on {what}: {error!r}")
            raise

    def _check_workers(self) -> None:
        try:
            self.check_integrity()
        except RuntimeError as error:
            self._world.fail(f"{self._scheduler.process.name}: {error}")
        links = self._scheduler.service.workers
        down = [
            worker.worker_id
            for worker in self._fleet.workers()
            if worker.worker_id in links.links.keys() - links.up
            # A link that ended for good closes the scheduler, in the next turn of the event loop.
            and (run := links.links[worker.worker_id].task) is not None
            and not run.task.done()
        ]
        if down:
            self._world.fail(f"{self._scheduler.process.name} counts on {down}, which are lost")
        orphans = self._scheduler.orphans()
        if orphans:
            self._world.fail(f"{self._scheduler.process.name}: sequences {orphans} of sessions that are over")

    def _check_waits(self, now: float) -> None:
        """The last plan left nothing waiting on an idle target for longer than its bound."""
        if not self._all_planned:
            return
        for target in self._fleet.targets.values():
            oldest = target.drafted.oldest()
            if oldest is not None and oldest.due + _SLACK < now and not target.busy and target.can_take_step:
                late = now - oldest.due
                self._world.fail(
                    f"sequence {oldest.sequence_id} waits on idle {target.worker_id}, {late:.4f} s overdue"
                )

    def _complete(self, event: StepCompleted, now: float) -> None:
        super()._complete(event, now)
        # Before anything new is sent: what the ledger says of a sequence is then what its workers have.
        for result in event.results:
            sequence = self._live.sequences.get(result.sequence_id)
            if sequence is not None:
                for holder in (sequence.target, sequence.draft):
                    if holder is not None and result.sequence_id not in holder.in_flight:
                        self._check_ledger(sequence, holder)

    def _check_ledger(self, sequence: Sequence, holder: Worker) -> None:
        """What counts as valid KV is there, and of the committed tokens."""
        sequence_id, valid = sequence.sequence_id, holder.kv[sequence.sequence_id].valid
        worker = self._world.workers[holder.worker_id]
        if not valid or not self._scheduler.speaks_to(worker) or worker.watch.lost(sequence_id):
            return
        held = worker.executor._sequences._sequences.get(sequence_id)
        tokens = sequence.tokens
        if (
            held is None
            or min(len(held.tokens), len(tokens)) < valid
            or held.tokens.digest(valid) != tokens.digest(valid)
        ):
            has = list(held.history) if held is not None else None
            self._world.fail(
                f"the ledger counts {valid} positions of sequence {sequence_id} on {holder.worker_id} as valid, "
                f"which has {has}, of {tokens.tokens}"
            )
