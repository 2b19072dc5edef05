"""What a scheduler says about itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from protos import scheduler_pb2, worker_pb2
from scheduler.messages import Role
from scheduler.statistics import DraftingSnapshot, WorkerSnapshot
from services.rpc.worker_codec import ROLES
from services.scheduler.service import SchedulerService
from services.scheduler.workers.registry import WorkerRecord, WorkerState
from services.scheduler.workers.worker_link import WorkerEndpoint


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """How many workers of each role there are to be, and why, in a sentence for people."""

    explanation: str
    wanted: Mapping[Role, int]


_STATES = {
    WorkerState.CONNECTING: scheduler_pb2.WORKER_STATE_CONNECTING,
    WorkerState.IN_USE: scheduler_pb2.WORKER_STATE_IN_USE,
    WorkerState.REFUSED: scheduler_pb2.WORKER_STATE_REFUSED,
    WorkerState.UNREACHABLE: scheduler_pb2.WORKER_STATE_UNREACHABLE,
    WorkerState.LEAVING: scheduler_pb2.WORKER_STATE_LEAVING,
}


def worker_state_to_wire(state: WorkerState) -> scheduler_pb2.WorkerState:
    return _STATES[state]


def status_of(
    service: SchedulerService,
    records: Iterable[WorkerRecord],
    sessions: int,
    uptime_seconds: float,
    replicas: ReplicaFigures | None = None,
) -> scheduler_pb2.StatusReply:
    """`records` are the workers that registered; those that the service was given otherwise are told as well."""
    core, totals = service.core.snapshot(), service.statistics()
    snapshots = {worker.worker_id: worker for worker in core.workers}
    reply = scheduler_pb2.StatusReply(
        scheduler_epoch=service.epoch,
        uptime_seconds=uptime_seconds,
        state=_scheduler_state(service),
        reason=service.closed_because or "",
        sessions=sessions,
        workers=[_worker(record, snapshots.get(record.endpoint.worker_id)) for record in _all(service, records)],
        live_set=scheduler_pb2.LiveSetFigures(
            live=core.live,
            waiting=core.waiting,
            running=core.running,
            prefilling=core.prefilling,
            drafting=core.drafting,
            drafted=core.drafted,
            verifying=core.verifying,
            max_running=core.max_running,
            queue_limit=service.config.max_queued_sequences,
            moving=core.moving,
        ),
        groups=scheduler_pb2.GroupFigures(
            groups=totals.groups,
            mean_size=totals.mean_group_size,
            equal_length_share=totals.equal_length_share,
            forced=totals.forced_groups,
            batch_size=service.config.batch_size,
        ),
        throughput=scheduler_pb2.ThroughputFigures(
            tokens=totals.tokens,
            tokens_per_second=totals.tokens_per_second,
            finished=totals.finished,
            failed=totals.failed,
            refused=totals.refused,
            rounds=totals.rounds,
            acceptance_rate=totals.acceptance_rate,
            committed_per_round=totals.committed_per_round,
            target_busy_share=totals.target_busy_share,
            draft_busy_share=totals.draft_busy_share,
            preemptions=core.preemptions,
            workers_lost=totals.workers_lost,
        ),
        prefix_cache=[
            scheduler_pb2.PrefixCacheFigures(
                role=ROLES.to_wire(role),
                queries=totals.prefix_queries[role.value],
                hits=totals.prefix_hits[role.value],
            )
            for role in Role
        ],
        kv_moves=scheduler_pb2.KvMoveFigures(
            moves=core.moves.moves,
            positions=core.moves.positions,
            bytes=core.moves.bytes,
            seconds=core.moves.seconds,
            failed=core.moves.failed,
            rehomed=core.moves.rehomed,
        ),
        speculation=scheduler_pb2.SpeculationFigures(
            drafts=totals.drafted_rounds,
            draft_tokens=totals.drafted,
            accepted_tokens=totals.accepted,
            accepted_per_position=totals.accepted_per_position,
        ),
    )
    reply.drafting.extend(map(drafting_to_wire, core.drafting_now))
    targets = [d for d in service.descriptions.values() if d.role == worker_pb2.ROLE_TARGET]
    if targets:
        # Targets of one scheduler hold the same model; their page pools may differ.
        reply.model.model_id = targets[0].model_id
        reply.model.vocabulary_size = targets[0].vocabulary_size
        reply.model.max_sequence_length = max(target.max_sequence_length for target in targets)
        reply.model.tokenizer_digest = targets[0].tokenizer_digest
    if replicas is not None:
        reply.replicas.explanation = replicas.explanation
        for role, wanted in replicas.wanted.items():
            reply.replicas.wanted.add(role=ROLES.to_wire(role), replicas=wanted)
    return reply


def _scheduler_state(service: SchedulerService) -> scheduler_pb2.SchedulerState:
    if service.fenced:
        return scheduler_pb2.SCHEDULER_STATE_FENCED
    if service.closed_because is not None:
        return scheduler_pb2.SCHEDULER_STATE_CLOSED
    return scheduler_pb2.SCHEDULER_STATE_SERVING


def _all(service: SchedulerService, records: Iterable[WorkerRecord]) -> Iterator[WorkerRecord]:
    registered = set()
    for record in records:
        registered.add(record.endpoint.worker_id)
        yield record
    for worker_id, endpoint in service.workers.endpoints.items():
        if worker_id not in registered:
            yield _unregistered(service, endpoint)


def _unregistered(service: SchedulerService, endpoint: WorkerEndpoint) -> WorkerRecord:
    worker_id = endpoint.worker_id
    description = service.descriptions.get(worker_id) or worker_pb2.WorkerDescription()
    if worker_id in service.workers_up:
        return WorkerRecord(endpoint, description, WorkerState.IN_USE, "")
    return WorkerRecord(endpoint, description, WorkerState.UNREACHABLE, service.workers.trouble_of(worker_id))


def _worker(record: WorkerRecord, snapshot: WorkerSnapshot | None) -> scheduler_pb2.WorkerStatus:
    endpoint, description = record.endpoint, record.description
    status = scheduler_pb2.WorkerStatus(
        worker_id=endpoint.worker_id,
        role=ROLES.to_wire(endpoint.role),
        address=endpoint.address,
        state=worker_state_to_wire(record.state),
        reason=record.reason,
        model_id=description.model_id,
        device=description.device,
        dtype=description.dtype,
        worker_epoch=description.worker_epoch,
        process_id=description.process_id,
        page_size=description.page_size,
        total_pages=description.total_pages,
        free_pages=description.free_pages,
    )
    if snapshot is not None:
        status.sequences = snapshot.sequences
        status.free_pages = snapshot.free_pages
        status.total_pages = snapshot.total_pages
        status.steps_in_flight = snapshot.steps_in_flight
    return status


def drafting_to_wire(now: DraftingSnapshot) -> scheduler_pb2.DraftingFigures:
    if now.length:
        what = f"drafts up to {now.length} tokens with {now.draft_id}, which is to give {now.gain:.2f} times"
    else:
        what = f"does not draft with {now.draft_id}: nothing beats, by enough to change,"
    chances = ", ".join(f"{chance:.2f}" for chance in now.chances) or "unknown"
    chances = f"acceptance by place {chances}"
    if now.outcomes:
        chances += f"; prepares for up to {now.outcomes} outcomes, lately for {now.found:.0%} of those that came"
    return scheduler_pb2.DraftingFigures(
        target_id=now.target_id,
        draft_id=now.draft_id,
        draft_length=now.length,
        gain=now.gain,
        tokens_per_second=now.tokens_per_second,
        acceptance=now.chances,
        explanation=f"{now.target_id} {what} the tokens a second of plain decoding; {chances}",
    )
