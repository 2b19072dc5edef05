"""What a scheduler says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spool.engine.models.source import public_name
from spool.protos import scheduler_pb2, worker_pb2
from spool.scheduler.messages import ProposalSource, Role
from spool.scheduler.statistics import DraftingSnapshot, Snapshot, WorkerSnapshot
from spool.services.rpc.conversion import WireEnum, to_wire
from spool.services.rpc.protocol_version import SOFTWARE_VERSION
from spool.services.rpc.worker_codec import ROLES, SOURCES
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.session import GatewaySession
from spool.services.scheduler.workers.worker_link import WorkerLink, WorkerState

WORKER_STATES = WireEnum(WorkerState, scheduler_pb2.WorkerState, "WORKER_STATE_")


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """How many workers of each role there are to be, and why, in a sentence for people."""

    explanation: str
    wanted: Mapping[Role, int]


def workers_in(core: Snapshot, service: SchedulerService) -> dict[str, WorkerSnapshot]:
    """The workers that the core uses, by id. Of a draft's pages the core knows nothing: they are as it registered."""
    found = {worker.worker_id: worker for worker in core.workers}
    for link in service.workers.known():
        worker_id, description = link.endpoint.worker_id, link.registered or link.description
        if link.endpoint.role is Role.DRAFT and worker_id in found and description is not None:
            free, total = description.free_pages, description.total_pages
            found[worker_id] = replace(found[worker_id], free_pages=free, total_pages=total)
    return found


def status_of(
    service: SchedulerService,
    sessions: Sequence[GatewaySession],
    uptime_seconds: float,
    replicas: ReplicaFigures | None = None,
) -> scheduler_pb2.StatusReply:
    core, totals, config = service.core.snapshot(), service.statistics(), service.config
    snapshots = workers_in(core, service)
    reply = scheduler_pb2.StatusReply(
        scheduler_epoch=service.workers.epoch,
        uptime_seconds=uptime_seconds,
        state=_scheduler_state(service),
        reason=service.closed_because or "",
        version=SOFTWARE_VERSION,
        sessions=len(sessions),
        gateways=[
            scheduler_pb2.GatewayStatus(gateway_id=one.gateway_id, version=one.gateway_version) for one in sessions
        ],
        workers=[_worker(link, snapshots.get(link.endpoint.worker_id)) for link in service.workers.known()],
        live_set=to_wire(scheduler_pb2.LiveSetFigures, core, queue_limit=config.max_queued_sequences),
        groups=to_wire(
            scheduler_pb2.GroupFigures,
            totals,
            mean_size=totals.mean_group_size,
            forced=totals.forced_groups,
            batch_size=min(config.batch_size, core.max_running or config.batch_size),
        ),
        throughput=to_wire(scheduler_pb2.ThroughputFigures, totals, core),
        prefix_cache=[
            scheduler_pb2.PrefixCacheFigures(
                role=ROLES.to_wire(Role.TARGET), queries=totals.prefix_queries, hits=totals.prefix_hits
            )
        ],
        kv_moves=to_wire(scheduler_pb2.KvMoveFigures, core.moves),
        speculation=to_wire(
            scheduler_pb2.SpeculationFigures,
            totals,
            drafts=totals.drafted_rounds,
            draft_tokens=totals.drafted,
            accepted_tokens=totals.accepted,
            accepted_per_position=totals.accepted_per_position,
            sources=[
                scheduler_pb2.SourceFigures(
                    source=SOURCES.to_wire(source),
                    draft_tokens=drafted,
                    accepted_tokens=totals.accepted_by[source.value],
                )
                for source in ProposalSource
                if (drafted := totals.drafted_by[source.value])
            ],
        ),
        drafting=[drafting_to_wire(one) for one in core.drafting_now],
    )
    targets = [d for d in service.workers.descriptions.values() if d.role == worker_pb2.ROLE_TARGET]
    if targets:
        # Targets of one scheduler hold the same model; their page pools may differ.
        longest = max(target.max_sequence_length for target in targets)
        reply.model.CopyFrom(to_wire(scheduler_pb2.ServedModel, targets[0], max_sequence_length=longest))
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


def _worker(link: WorkerLink, snapshot: WorkerSnapshot | None) -> scheduler_pb2.WorkerStatus:
    description = link.registered or link.description or worker_pb2.WorkerDescription()
    return to_wire(
        scheduler_pb2.WorkerStatus,
        *([] if snapshot is None else [snapshot]),
        description,
        worker_id=link.endpoint.worker_id,
        role=ROLES.to_wire(link.endpoint.role),
        address=link.endpoint.address,
        state=WORKER_STATES.to_wire(link.state),
        reason=link.reason,
        busy_share=link.load.busy_share,
        queued=link.load.queued,
    )


def drafting_to_wire(now: DraftingSnapshot) -> scheduler_pb2.DraftingFigures:
    draft = "its own draft" if now.draft_id == now.target_id else public_name(now.draft_id)
    if now.length:
        what = f"drafts up to {now.length} tokens with {draft}, which is to give {now.gain:.2f} times"
    else:
        what = f"does not draft with {draft}: nothing beats, by enough to change,"
    chances = f"acceptance by place {_listed(now.chances)}"
    if now.lookup_chances:
        chances += (
            f"; lookup finds up to {now.lookup_length} tokens in {now.lookup_share:.0%} of the rounds, acceptance "
            f"{_listed(now.lookup_chances)}"
        )
    return to_wire(
        scheduler_pb2.DraftingFigures,
        now,
        draft_length=now.length,
        acceptance=now.chances,
        lookup_acceptance=now.lookup_chances,
        explanation=f"{now.target_id} {what} the tokens a second of plain decoding; {chances}",
    )


def _listed(chances: Sequence[float]) -> str:
    return ", ".join(f"{chance:.2f}" for chance in chances) or "unknown"
