"""Strangers at the doors of scheduler and workers, and bytes that are no message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import scheduler_pb2, worker_pb2
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.backend import BackendUnavailableError
from services.channel_security import ChannelSecurity, random_token
from services.launcher import WorkerLauncher
from services.scheduler_client import ClientOptions
from services.scheduler_service import SchedulerService
from services.worker_link import WorkerEndpoint, WorkerUnreachableError
from tests.integration.test_workers_processes import stand_in
from tests.stand_in_worker import continuation
from tests.support.cells import LINKS, Cell, check, client, running_cell, running_worker
from tests.support.certificates import issue
from tests.support.waiting import LONG

TOKEN = ChannelSecurity(token=random_token())
IMPATIENT = ClientOptions(give_up=0.5, connect_timeout=0.4, first_backoff=0.05)

METHODS = [
    (service.full_name, method)
    for file in (worker_pb2, scheduler_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def address_of(cell: Cell, service: str) -> str:
    return cell.workers[0].address if service.endswith("Worker") else cell.resolve.address


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


@pytest.mark.parametrize(("service", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
def test_strangers_are_refused_by_every_method(service: str, method: Any) -> None:
    async def run() -> None:
        async with running_cell(drafts=0, security=TOKEN) as cell:
            async with grpc.aio.insecure_channel(address_of(cell, service)) as channel:
                bearer = TOKEN.metadata[0][1]
                for metadata in (
                    [],
                    [("authorization", "")],
                    [("authorization", "Bearer")],
                    [("authorization", f"Bearer {random_token()}")],
                    [("authorization", bearer[:-1])],
                    [("authorization", bearer + "x")],
                    [("authorization", bearer), ("authorization", bearer)],
                    [("authorization-bin", bearer.encode())],
                    [("Authorization".lower(), bearer.upper())],
                ):
                    for raw in (b"", b"\xff\xff\xff"):
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await call(channel, f"/{service}/{method.name}", method, raw, metadata)
                        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                        assert TOKEN.token not in (caught.value.details() or "")
            assert cell.live_sequences == 0
            assert cell.service.workers_up == {"target-0"}
            async with client(cell.resolve, TOKEN) as backend:
                await check(backend, 1, 10)

    asyncio.run(run())


@pytest.mark.parametrize(("service", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
def test_bytes_that_are_no_message_get_a_clear_answer(service: str, method: Any) -> None:
    async def run() -> None:
        async with running_cell(drafts=0, security=TOKEN) as cell:
            async with grpc.aio.insecure_channel(address_of(cell, service)) as channel:
                for raw in (b"\xff\xff\xff\xff", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\x0f"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(channel, f"/{service}/{method.name}", method, raw, TOKEN.metadata)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert "the message cannot be read" in (caught.value.details() or "")
            async with client(cell.resolve, TOKEN) as backend:
                await check(backend, 1, 10)

    asyncio.run(run())


def test_health_is_open_and_there_is_no_reflection() -> None:
    async def run() -> None:
        async with running_cell(drafts=0, security=TOKEN) as cell:
            for address, name in (
                (cell.resolve.address, "spool.v1.Scheduler"),
                (cell.workers[0].address, "spool.v1.Worker"),
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
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            async for _ in channel.stream_stream(reflection)(iter([b""]), metadata=metadata):
                                pass
                        assert caught.value.code() is code

    asyncio.run(run())


def test_mutual_tls(tmp_path: Path) -> None:
    async def run() -> None:
        security = issue(tmp_path / "ours", "127.0.0.1", token=random_token())
        async with running_cell(security=security) as cell, client(cell.resolve, security) as backend:
            await check(backend, 1, 30)
            stranger = issue(tmp_path / "theirs", "127.0.0.1", token=security.token)
            for other in (
                stranger,
                ChannelSecurity(token=security.token),
                ChannelSecurity("", security.ca_file, stranger.certificate_file, stranger.key_file),
                ChannelSecurity("", security.ca_file, security.certificate_file, security.key_file),
            ):
                async with client(cell.resolve, other, IMPATIENT) as intruder:
                    with pytest.raises(BackendUnavailableError):
                        await check(intruder, 1, 5)
            # A worker that has no place here is not connected to.
            async with running_worker("target-9", Role.TARGET, cell.resolve, stranger) as worker:
                await asyncio.sleep(0.3)
                assert not worker.registration.in_use
            assert cell.service.workers_up == {"draft-0", "target-0"}
            await check(backend, 2, 10)

    asyncio.run(run())


def test_certificates_that_carry_one_name_instead_of_addresses(tmp_path: Path) -> None:
    async def run() -> None:
        security = issue(tmp_path, "spool.internal", server_name="spool.internal")
        async with running_cell(drafts=0, security=security) as cell, client(cell.resolve, security) as backend:
            await check(backend, 1, 10)
            nameless = ChannelSecurity("", security.ca_file, security.certificate_file, security.key_file)
            async with client(cell.resolve, nameless, IMPATIENT) as other:
                with pytest.raises(BackendUnavailableError):
                    await check(other, 1, 5)

    asyncio.run(run())


def test_worker_processes_get_the_token_out_of_sight() -> None:
    async def run() -> None:
        security = ChannelSecurity(token=random_token())
        async with (
            WorkerLauncher([stand_in(Role.TARGET)], security=security) as launcher,
            SchedulerService(SchedulerConfig(), scheduler_epoch=1, link_options=LINKS, security=security) as service,
            SchedulerService(SchedulerConfig(), scheduler_epoch=9, link_options=LINKS) as stranger,
        ):
            (worker,) = launcher.workers
            endpoint = WorkerEndpoint(worker.worker_id, worker.role, worker.address)
            with pytest.raises(WorkerUnreachableError, match="UNAUTHENTICATED"):
                await stranger.add_workers([endpoint])
            await service.add_workers([endpoint])
            assert await service.submit([1, 2, 3], 10).collect() == continuation([1, 2, 3], 10)
            assert not any(security.token in argument for argument in psutil.Process(worker.process_id).cmdline())
            assert worker.process_id != os.getpid()

    asyncio.run(run())
