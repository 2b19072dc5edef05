"""Targets ask the draft workers that the scheduler grants them; drafts that leave or are busy are known for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from spool.protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from spool.scheduler.messages import Role
from spool.services.scheduler_client.remote import SchedulerClient
from tests.support.cells import Cell, Worker, client, prompt_of, read, read_some, request_of, running_cell
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until

TOKENS = 400


@dataclass
class Granted:
    """The grants that came with the steps of a target."""

    grants: list[worker_pb2.DraftGrant | None] = field(default_factory=list)

    def watch(self, target: Worker) -> None:
        execute = target.executor.execute

        def watched(request: worker_pb2.StepRequest, *more: Any) -> worker_pb2.StepReply:
            if request.step_id:
                self.grants.append(request.grant if request.HasField("grant") else None)
            return execute(request, *more)

        target.executor.execute = watched  # type: ignore[method-assign]

    @property
    def addresses(self) -> list[str]:
        """Of drafts, in the order in which they were granted; "" for none."""
        found = [grant.address if grant is not None else "" for grant in self.grants]
        return [one for place, one in enumerate(found) if place == 0 or found[place - 1] != one]


def workers_of(cell: Cell, role: Role) -> list[Worker]:
    return [worker for worker in cell.workers if worker.role is role]


def told(cell: Cell, name: str) -> dict[str, float]:
    """By the value of its label `role`, or "" without one."""
    samples = [sample for family in cell.server.metric_families() for sample in family.samples]
    return {one.labels.get("role", ""): one.value for one in samples if one.name == f"spool_{name}"}


async def begun(backend: SchedulerClient, index: int = 1) -> tuple[list[int], asyncio.Task[list[int]]]:
    """The first tokens of a sequence, and the others when they are there."""
    stream = await backend.submit(request_of(index, TOKENS))
    return await read_some(stream, 20), asyncio.create_task(read(stream))


async def test_a_target_is_granted_the_draft_worker_that_is_up_and_asks_it() -> None:
    async with running_cell(step_seconds=0.002) as cell, client(cell.resolve) as backend:
        (draft,), (target,) = (workers_of(cell, role) for role in (Role.DRAFT, Role.TARGET))
        granted = Granted()
        granted.watch(target)
        first, rest = await begun(backend)
        assert first + await rest == continuation(prompt_of(1), TOKENS)
        # A first step may have left before the draft was there for it.
        grant = granted.grants[-1]
        assert grant is not None
        assert (grant.address, grant.draft_epoch) == (draft.address, draft.server.describe().worker_epoch)
        assert (grant.target_id, grant.number > 0, grant.scheduler_epoch > 0) == ("target-0", True, True)
        found = cell.service.statistics()
        assert 0 < found.accepted < found.drafted
        assert 0 < found.proposals_in_time <= found.proposals_asked
        assert told(cell, "draft_proposals_in_time_total") == {"": found.proposals_in_time}
        assert told(cell, "draft_proposals_asked_total") == {"": found.proposals_asked}
        assert found.drafting_seconds > 0
        await until(lambda: told(cell, "worker_busy_seconds_total")["draft"] > 0)
        busy, whole = (told(cell, f"worker_{what}_total")["draft"] for what in ("busy_seconds", "seconds"))
        assert 0 < busy <= whole


async def test_proposals_that_were_there_before_they_were_asked_for_are_counted() -> None:
    async with running_cell(ahead=True, step_seconds=0.002) as cell, client(cell.resolve) as backend:
        first, rest = await begun(backend)
        assert first + await rest == continuation(prompt_of(1), TOKENS)
        found = cell.service.statistics()
        assert 0 < found.proposals_ahead <= found.proposals_in_time
        assert found.hidden_seconds > 0
        assert told(cell, "draft_proposals_ahead_total") == {"": found.proposals_ahead}
        assert told(cell, "draft_hidden_seconds_total") == {"": found.hidden_seconds}
        async with grpc.aio.insecure_channel(await cell.resolve()) as channel:
            status = await scheduler_pb2_grpc.SchedulerStub(channel).Status(scheduler_pb2.StatusRequest())
        assert status.speculation.proposals_ahead == found.proposals_ahead
        assert status.speculation.hidden_seconds == found.hidden_seconds
        (source,) = status.speculation.sources
        assert source.source == worker_pb2.PROPOSAL_SOURCE_DRAFT
        assert (source.draft_tokens, source.accepted_tokens) == (found.drafted, found.accepted)


async def test_a_draft_worker_that_leaves_hands_its_targets_over_first() -> None:
    async with running_cell(drafts=2, step_seconds=0.002) as cell, client(cell.resolve) as backend:
        (target,), drafts = workers_of(cell, Role.TARGET), workers_of(cell, Role.DRAFT)
        granted = Granted()
        granted.watch(target)
        first, rest = await begun(backend)
        (leaving,) = [draft for draft in drafts if draft.address == granted.addresses[-1]]
        (other,) = [draft for draft in drafts if draft is not leaving]
        assert await leaving.registration.leave(LONG) == 0
        assert cell.service.workers.up == {other.worker_id, "target-0"}
        assert first + await rest == continuation(prompt_of(1), TOKENS)
        assert granted.addresses[-2:] == [leaving.address, other.address]
        assert granted.grants[-1] is not None
        # The last one that leaves is not waited for either, and what is decoded after that is decoded plainly.
        await other.registration.leave(LONG)
        first, rest = await begun(backend, 2)
        assert first + await rest == continuation(prompt_of(2), TOKENS)
        assert granted.addresses[-1] == ""


async def test_status_says_how_busy_a_draft_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cell() as cell:
        (draft,), clock = workers_of(cell, Role.DRAFT), asyncio.get_running_loop().time
        began = clock()
        monkeypatch.setattr(draft.server, "load", lambda: ((clock() - began) / 4, 7))

        def said() -> scheduler_pb2.WorkerStatus:
            (status,) = [one for one in cell.server.status().workers if one.worker_id == "draft-0"]
            return status

        await until(lambda: said().queued == 7)
        await until(lambda: 0.2 < said().busy_share < 0.3)
        assert 0.2 < cell.service.workers.draft_busy[0] < 0.3
        assert told(cell, "draft_queue") == {"": 7}
        description = draft.server.describe()
        assert (said().free_pages, said().total_pages) == (description.free_pages, description.total_pages)
        assert told(cell, "kv_pages")["draft"] == description.total_pages


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_a_load_that_cannot_be_is_refused(seconds: float) -> None:
    async with running_cell() as cell, grpc.aio.insecure_channel(cell.resolve.address) as channel:
        (draft,) = workers_of(cell, Role.DRAFT)
        request = scheduler_pb2.RegisterRequest(
            worker_id="draft-9", address=draft.address, description=draft.server.describe(), busy_seconds=seconds
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await scheduler_pb2_grpc.SchedulerStub(channel).Register(request, timeout=LONG)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"busy_seconds is {seconds}" in (refused.value.details() or "")
