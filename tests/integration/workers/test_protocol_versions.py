"""Processes of different releases work together where they have a version of the protocol in common. Else they refuse
each other, and both say which versions they speak."""

from __future__ import annotations

import asyncio
import logging
import re
from importlib.metadata import version as installed_version

import grpc
import grpc.aio
import pytest

from spool.protos import scheduler_pb2, worker_pb2, worker_pb2_grpc
from spool.scheduler.messages import Role
from spool.services.backend.interface import BackendUnavailableError
from spool.services.rpc.protocol_version import SPOKEN, Versions
from spool.services.scheduler_client.cell_link import ClientOptions
from spool.services.scheduler_client.remote import SchedulerClient
from tests.support.cells import Whereabouts, all_in_use, check, client, running_cell, running_scheduler, running_worker
from tests.support.waiting import LONG, until

OTHERS = [0, SPOKEN.newest + 1]
NEIGHBOURS = [Versions(SPOKEN.newest, SPOKEN.newest + 1), Versions(SPOKEN.oldest - 1, SPOKEN.oldest)]
IMPATIENT = ClientOptions(give_up=LONG, first_backoff=0.02, longest_backoff=0.05)


SPEAKERS = {
    "worker": ("spool.services.worker.server",),
    "scheduler": ("spool.services.scheduler.session", "spool.services.scheduler.workers.worker_link"),
    "gateway": ("spool.services.scheduler_client.session",),
}


def speak(monkeypatch: pytest.MonkeyPatch, who: str, versions: Versions) -> None:
    """Version 0 stands for releases that check no version either."""
    for module in SPEAKERS[who]:
        monkeypatch.setattr(f"{module}.SPOKEN", versions)
        if not versions.newest:
            for name in ("version_conflict", "check_version"):
                monkeypatch.setattr(f"{module}.{name}", lambda *_: None, raising=False)


def both_named(text: str, version: int) -> bool:
    """One that speaks this version alone, and one of this release."""
    return all(re.search(rf"\b{spoken}(?!\d)", text) for spoken in (Versions(version, version), SPOKEN))


async def until_told(backend: SchedulerClient, version: int) -> None:
    """Asks until the answer names both versions; gRPC may put a broken stream in its own words in between."""
    async with asyncio.timeout(LONG):
        while True:
            with pytest.raises(BackendUnavailableError) as caught:
                await backend.statuses()
            if both_named(str(caught.value), version):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("versions", NEIGHBOURS, ids=str)
@pytest.mark.parametrize("neighbour", SPEAKERS)
async def test_releases_with_a_version_in_common_work_together(
    neighbour: str, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is of the next release or of the one before, the others are of this one."""
    speak(monkeypatch, neighbour, versions)
    resolve = Whereabouts()
    async with running_scheduler(resolve), running_worker("target-0", Role.TARGET, resolve), client(resolve) as backend:
        await asyncio.wait_for(check(backend, 1, 10), LONG)


async def test_workers_and_gateways_tell_the_version_of_their_software() -> None:
    installed = installed_version("spool-serve")
    async with running_cell() as cell, client(cell.resolve) as backend:
        await check(backend, 1, 10)
        status = cell.server.status()
        assert {one.worker_id: one.version for one in status.workers} == dict.fromkeys(
            ("draft-0", "target-0"), installed
        )
        assert [(one.gateway_id, one.version) for one in status.gateways] == [("gateway", installed)]
        assert status.version == installed


@pytest.mark.parametrize("version", OTHERS)
async def test_worker_of_another_release_is_refused(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(monkeypatch, "worker", Versions(version, version))
    async with (
        running_cell(drafts=0, targets=0) as cell,
        running_worker("target-0", Role.TARGET, cell.resolve) as worker,
    ):
        await until(lambda: both_named(worker.registration.reason, version))
        assert not worker.registration.in_use
        (status,) = cell.server.status().workers
        assert status.state == scheduler_pb2.WORKER_STATE_REFUSED
        assert both_named(status.reason, version)
        assert not cell.service.workers.up
        # A release of the scheduler that fits takes the worker.
        speak(monkeypatch, "worker", SPOKEN)
        await all_in_use([worker])


async def test_whoever_names_no_version_gets_no_description() -> None:
    async with (
        running_worker("target-0", Role.TARGET, Whereabouts()) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(worker_pb2.DescribeRequest(), timeout=LONG)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert both_named(caught.value.details() or "", 0)
        described = await stub.Describe(worker_pb2.DescribeRequest(protocol_version=SPOKEN.newest), timeout=LONG)
        assert described.protocol_version == SPOKEN.newest


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("other", ["gateway", "scheduler"])
async def test_gateway_says_why_it_has_no_session_and_goes_on_with_a_scheduler_that_fits(
    other: str, version: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def named(record: logging.LogRecord) -> bool:
        return record.name == "spool.services.scheduler_client.cell_link" and both_named(record.getMessage(), version)

    resolve = Whereabouts()
    async with client(resolve, options=IMPATIENT) as backend:
        with monkeypatch.context() as patch:
            speak(patch, other, Versions(version, version))
            async with running_scheduler(resolve):
                submitted = asyncio.create_task(check(backend, 1, 10))
                await until(lambda: any(named(record) for record in caplog.records))
                await until_told(backend, version)
                assert not backend.connected
                assert not submitted.done()
        async with running_scheduler(resolve), running_worker("target-0", Role.TARGET, resolve):
            await asyncio.wait_for(submitted, LONG)
