"""Strangers at the doors of scheduler and workers, and bytes that are no message."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spool.protos import draft_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import Role
from spool.services.launch.launcher import WorkerLauncher
from spool.services.rpc.channel_security import ChannelSecurity, random_token
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.worker_link import WorkerEndpoint, WorkerUnreachableError
from spool.services.worker.server import WorkerServer
from tests.integration.workers.test_processes import stand_in
from tests.support.cells import LINKS, Cell, check, client, running_cell, running_worker
from tests.support.certificates import issue, issue_by
from tests.support.stand_in_worker import StandInEngine, continuation, target_executor
from tests.support.waiting import LONG, until

TOKEN = ChannelSecurity(token=random_token())

METHODS = [
    (service.full_name, method)
    for file in (worker_pb2, scheduler_pb2, draft_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def address_of(cell: Cell, service: str) -> str:
    if service.endswith("Scheduler"):
        return cell.resolve.address
    role = Role.DRAFT if service.endswith("Drafter") else Role.TARGET
    return next(worker.address for worker in cell.workers if worker.role is role)


async def answer_to(security: ChannelSecurity, address: str) -> grpc.StatusCode | None:
    """What a scheduler answers to one call of someone with this security; None where it answers the call itself."""
    channel = security.open_channel(address)
    try:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        await stub.Status(scheduler_pb2.StatusRequest(), metadata=security.metadata, timeout=LONG)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await channel.close(None)
    return None


async def call(channel: grpc.aio.Channel, path: str, method: Any, raw: bytes, metadata: Sequence[Any]) -> bytes | None:
    """One message as it is, and the first of the answer."""
    if not method.client_streaming:
        return await channel.unary_unary(path)(raw, metadata=metadata, timeout=LONG)
    while True:
        stream = channel.stream_stream(path)(iter([raw]), metadata=metadata, timeout=LONG)
        try:
            async for answer in stream:
                return answer
        except grpc.aio.AioRpcError as error:
            # The client's own word where the server ended the call while it sent; what the server said is lost then.
            if error.details() == "Internal error from Core":
                continue
            raise
        return None


BEARER = TOKEN.metadata[0][1]
STRANGERS: list[list[tuple[str, Any]]] = [
    [],
    *([("authorization", shown)] for shown in ("", "Bearer", f"Bearer {random_token()}", BEARER[:-1], BEARER + "x")),
    [("authorization", BEARER), ("authorization", BEARER)],
    [("authorization-bin", BEARER.encode())],
    [("authorization", BEARER.upper())],
]


async def test_every_method_refuses_strangers_and_bytes_that_are_no_message() -> None:
    async with running_cell(security=TOKEN) as cell:

        async def refusal(service: str, method: Any, raw: bytes, metadata: Sequence[Any]) -> tuple[Any, str]:
            async with grpc.aio.insecure_channel(address_of(cell, service)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, f"/{service}/{method.name}", method, raw, metadata)
            return caught.value.code(), caught.value.details() or ""

        for service, method in METHODS:
            for metadata in STRANGERS:
                for raw in (b"", b"\xff\xff\xff"):
                    code, details = await refusal(service, method, raw, metadata)
                    assert code is grpc.StatusCode.UNAUTHENTICATED, (method.name, metadata)
                    assert TOKEN.token not in details
            for raw in (b"\xff\xff\xff\xff", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\x0f"):
                code, details = await refusal(service, method, raw, TOKEN.metadata)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, (method.name, raw)
                assert "the message cannot be read" in details
        assert cell.live_sequences == 0
        assert cell.service.workers.up == {"draft-0", "target-0"}
        async with client(cell.resolve, security=TOKEN) as backend:
            await check(backend, 1, 10)


async def test_health_is_open_and_there_is_no_reflection() -> None:
    async with running_cell(drafts=0, security=TOKEN) as cell:
        for address, name in (
            (cell.resolve.address, "spool.scheduler.v1.Scheduler"),
            (cell.workers[0].address, "spool.worker.v1.Worker"),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                request = health_pb2.HealthCheckRequest(service=name)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=LONG)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
                for metadata, code in (
                    ([], grpc.StatusCode.UNAUTHENTICATED),
                    (TOKEN.metadata, grpc.StatusCode.UNIMPLEMENTED),
                ):
                    # Nothing is sent: what a server says while its client still sends may be lost.
                    assert await channel.stream_stream(reflection)(metadata=metadata, timeout=LONG).code() is code


async def test_mutual_tls(tmp_path: Path) -> None:
    security = issue(tmp_path / "ours", "127.0.0.1", token=random_token())
    async with running_cell(security=security) as cell, client(cell.resolve, security=security) as backend:
        await check(backend, 1, 30)
        stranger = issue(tmp_path / "theirs", "127.0.0.1", token=security.token)
        wrong_authority = ChannelSecurity("", security.ca_file, stranger.certificate_file, stranger.key_file)
        no_token = ChannelSecurity("", security.ca_file, security.certificate_file, security.key_file)
        for other, code in (
            (security, None),
            (stranger, grpc.StatusCode.UNAVAILABLE),
            (ChannelSecurity(token=security.token), grpc.StatusCode.UNAVAILABLE),
            (wrong_authority, grpc.StatusCode.UNAVAILABLE),
            (no_token, grpc.StatusCode.UNAUTHENTICATED),
        ):
            assert await answer_to(other, cell.resolve.address) is code
        # A worker that does not belong here fails to register, so the scheduler never hears of it.
        async with running_worker("target-9", Role.TARGET, cell.resolve, stranger) as worker:
            await until(lambda: "handshake failed" in worker.registration.reason)
            assert not worker.registration.in_use
            assert worker.server.highest_epoch == 0
        assert {status.worker_id for status in cell.server.status().workers} == {"draft-0", "target-0"}
        assert cell.service.workers.up == {"draft-0", "target-0"}
        await check(backend, 2, 10)


async def test_certificates_that_are_renewed_while_a_cell_runs(tmp_path: Path) -> None:
    """By another authority, so that nothing fits with what was read before."""
    expires = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
    security = issue(tmp_path / "cell", "127.0.0.1")
    shutil.copytree(tmp_path / "cell", tmp_path / "before")
    before = ChannelSecurity("", *(str(tmp_path / "before" / Path(name).name) for name in files_of(security)))
    async with running_cell(security=security) as cell, client(cell.resolve, security=security) as backend:
        await check(backend, 1, 10)
        (target,) = [worker for worker in cell.workers if worker.role is Role.TARGET]
        issue_by(trustme.CA(), tmp_path / "cell", "127.0.0.1", expires=expires)
        assert await answer_to(security, cell.resolve.address) is None
        assert await answer_to(before, cell.resolve.address) is grpc.StatusCode.UNAVAILABLE
        samples = [sample for family in cell.server.metric_families() for sample in family.samples]
        (shown,) = [one for one in samples if one.name == "spool_certificate_expiry_timestamp_seconds"]
        assert (shown.labels, shown.value) == ({"server": "scheduler"}, expires.timestamp())
        # What is connected stays so; a worker that comes back where it was is found.
        await check(backend, 2, 10)
        await target.server.stop(0)
        await until(lambda: cell.service.workers.up == {"draft-0"})
        engine = StandInEngine()
        executor = target_executor(engine)
        again = WorkerServer(executor, port=int(target.address.rpartition(":")[2]), security=security)
        await again.start()
        try:
            await until(lambda: cell.service.workers.up == {"draft-0", "target-0"})
            await check(backend, 3, 10)
        finally:
            await again.stop(0)


def files_of(security: ChannelSecurity) -> tuple[str, str, str]:
    return security.ca_file, security.certificate_file, security.key_file


async def test_worker_processes_get_the_token_out_of_sight() -> None:
    security = ChannelSecurity(token=random_token())
    async with (
        WorkerLauncher([stand_in(Role.TARGET)], security=security) as launcher,
        SchedulerService(SchedulerConfig(), scheduler_epoch=1, link_options=LINKS, security=security) as service,
        SchedulerService(SchedulerConfig(), scheduler_epoch=9, link_options=LINKS) as stranger,
    ):
        (worker,) = launcher.workers
        endpoint = WorkerEndpoint(worker.worker_id, worker.role, worker.address)
        with pytest.raises(WorkerUnreachableError, match="UNAUTHENTICATED"):
            await stranger.workers.add([endpoint])
        await service.workers.add([endpoint])
        assert await service.submit([1, 2, 3], 10).collect() == continuation([1, 2, 3], 10)
        assert not any(security.token in argument for argument in psutil.Process(worker.process_id).cmdline())
        assert worker.process_id != os.getpid()
