"""A cell of the previous release becomes one of this release, process by process, while streams go on.

Whichever way fingerprints are, no stream fails or changes its text. With universal numerics both releases have the same
fingerprint, and streams move to the new targets; else they end on the old ones.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.chaos.application import Application
from bench.chaos.streams import Case, Protocol, StreamClient, StreamRecord, cases, streaming
from spool.protos import scheduler_pb2
from spool.services.receipts.fingerprint import fingerprint_name
from tests.support.changed_workers import paced_by
from tests.support.command_line import spool
from tests.support.no_ray import served_without_ray
from tests.support.ports import free_ports
from tests.support.releases import NEXT_VERSION, MixedCell, Release, previous_release, this_release
from tests.support.serving import PlainDecoder, stream_all
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

MODEL = "tiny"
STREAMS = 16
SLOWLY = 1.0
"""Seconds of a step while processes are replaced. A step gives a stream two tokens at most (`draft_length`), so one of
`TOKENS` takes minutes. Once all is replaced, steps take no longer than they must."""
TOKENS = 380


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return previous_release(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return this_release(tmp_path_factory.mktemp("this"))


@pytest.fixture(scope="module")
def plain(tiny_pair: tuple[Path, Path]) -> PlainDecoder:
    """In float32 all kernels of both releases compute the same bits, whatever fingerprints say."""
    return PlainDecoder(tiny_pair[0])


class Upgrade:
    """A cell under load. Everything that is done to it is waited for."""

    def __init__(self, cell: MixedCell, client: StreamClient, pace: Path) -> None:
        self.cell = cell
        self.client = client
        self._pace = pace
        self.records: list[StreamRecord] = []
        self._runs: list[asyncio.Task[None]] = []

    def set_pace(self, seconds: float) -> None:
        unfinished = self._pace.with_suffix(".unfinished")
        unfinished.write_text(str(seconds), encoding="ascii")
        unfinished.replace(self._pace)

    async def open_streams(self, asked: Sequence[Case]) -> list[StreamRecord]:
        """Half over each protocol; all have begun then."""
        records = [
            StreamRecord(case, list(Protocol)[number % 2], time.monotonic()) for number, case in enumerate(asked)
        ]
        self.records += records
        self._runs += [asyncio.create_task(self.client.fill(record)) for record in records]
        await until(lambda: all(record.arrivals or record.error for record in records))
        return records

    async def streams_go_on(self) -> None:
        """None has ended, so what was done before was done to all; and each gets something after this."""
        since = time.monotonic()
        ended = [record.error or record.text for record in self.records if record.ended]
        assert not ended, f"streams ended before the cell was upgraded: {ended}"
        await until(lambda: all(one.ended or one.arrivals[-1] > since for one in self.records))

    async def let_streams_end(self) -> None:
        self.set_pace(0.0)
        await asyncio.gather(*self._runs)

    async def replace_target(self, old: str, release: Release, new: str) -> None:
        """The new one joins, the old one drains and leaves."""
        await self.cell.start(release, "target", new)
        await self.cell.drain(old)
        assert await self.cell.end(old) == "exit code 0"

    async def replace_draft(self, release: Release) -> None:
        await self.cell.start(release, "draft", "draft-new")
        await self.cell.drain("draft-old")
        assert await self.cell.end("draft-old") == "exit code 0"

    async def replace_scheduler(self, release: Release) -> None:
        """The new one takes over as it starts; the old one finds that out, and ends."""
        workers = in_use(await self.cell.status())
        await self.cell.start(release, "scheduler", "scheduler-new")
        await self.until_status(
            lambda status: in_use(status) == workers and status.live_set.live == len(self._unfinished)
        )
        assert await self.cell.ended("scheduler-old") == "exit code 1"

    async def replace_gateway(self, release: Release) -> asyncio.Task[str]:
        """New requests go to the new one; how the old one ended is known once its streams have."""
        await self.cell.start(release, "gateway", "gateway-new")
        await self.until_status(lambda status: status.sessions == 2)
        return asyncio.create_task(self.cell.end("gateway-old"))

    @property
    def _unfinished(self) -> list[StreamRecord]:
        return [record for record in self.records if not record.ended]

    async def until_status(self, holds: Callable[[scheduler_pb2.StatusReply], bool]) -> None:
        async with asyncio.timeout(LONG):
            while not holds(await self.cell.status()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def in_use(status: scheduler_pb2.StatusReply) -> set[str]:
    return {one.worker_id for one in status.workers if one.state == scheduler_pb2.WORKER_STATE_IN_USE}


def versions(status: scheduler_pb2.StatusReply) -> dict[str, str]:
    """Of the workers and gateways, and of the scheduler."""
    workers = {one.worker_id: one.version for one in status.workers if one.state == scheduler_pb2.WORKER_STATE_IN_USE}
    gateways = {one.gateway_id: one.version for one in status.gateways}
    return {**workers, **gateways, "scheduler": status.version}


@asynccontextmanager
async def upgrading(
    old: Release, pair: tuple[Path, Path], folder: Path, asked: Sequence[Case], **engine: Any
) -> AsyncIterator[Upgrade]:
    """A cell of the old release whose streams have begun, slow by now."""
    port, grpc_port = free_ports(2)
    configuration = {
        "models": {
            **{"target": str(pair[0]), "draft": str(pair[1]), "draft_in": "workers"},
            **{"dtype": "float32", "served_model_name": MODEL},
        },
        "engine": {"kv_memory": 64 << 20, "max_num_batched_tokens": 512, **engine},
        "scheduling": {"policy": "ragged", "draft_length": 1, "batch_size": STREAMS, "max_running": STREAMS},
        "groups": {"target": {"replicas": 2, "threads": 1}, "draft": {"replicas": 1, "threads": 1}},
        # Two gateways at a time share the ports.
        "gateway": {"port": port, "grpc_port": grpc_port, "replicas": 2, "drain_seconds": 600},
        "metrics": {"scheduler_address": None},
    }
    pace = folder / "pace"
    cell = MixedCell(folder, configuration, paced_by(pace))
    application = Application(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", MODEL, 0, {})
    try:
        async with streaming(application) as client:
            upgrade = Upgrade(cell, client, pace)
            upgrade.set_pace(0.0)
            await cell.start(old, "scheduler", "scheduler-old")
            await asyncio.gather(
                cell.start(old, "target", "old-0"),
                cell.start(old, "target", "old-1"),
                cell.start(old, "draft", "draft-old"),
                cell.start(old, "gateway", "gateway-old"),
            )
            upgrade.set_pace(SLOWLY)
            await upgrade.open_streams(asked)
            yield upgrade
    finally:
        await cell.close()


def check_answers(plain: PlainDecoder, records: Sequence[StreamRecord]) -> None:
    """None failed, and all texts are those of plain decoding, one sequence at a time, undisturbed."""
    assert [record.error for record in records if not record.answered] == []
    assert [record.text for record in records] == plain([record.case for record in records])


async def test_streams_of_equal_fingerprints_move_to_the_new_release(
    old: Release, new: Release, tiny_pair: tuple[Path, Path], tmp_path: Path, plain: PlainDecoder
) -> None:
    """A new target works with the old scheduler, and an old one with the new scheduler."""
    asked = cases(STREAMS, TOKENS)
    async with upgrading(old, tiny_pair, tmp_path, asked, numerics="universal") as upgrade:
        cell, before = upgrade.cell, await upgrade.cell.status()
        assert set(versions(before).values()) == {""}
        await upgrade.replace_target("old-0", new, "new-0")
        assert in_use(await cell.status()) == {"new-0", "old-1", "draft-old"}
        await upgrade.streams_go_on()
        await upgrade.replace_scheduler(new)
        await upgrade.streams_go_on()
        assert versions(await cell.status()) == {
            **{"new-0": NEXT_VERSION, "old-1": "", "draft-old": ""},
            **{"gateway-old": "", "scheduler": NEXT_VERSION},
        }
        await upgrade.replace_target("old-1", new, "new-1")
        await upgrade.streams_go_on()
        await upgrade.replace_draft(new)
        await upgrade.streams_go_on()
        gateway = await upgrade.replace_gateway(new)
        later = await upgrade.open_streams([Case("What is new?", 3, 0.8, 40)])
        await upgrade.let_streams_end()
        assert await gateway == "exit code 0"
        after = await cell.status()
    assert set(versions(after).values()) == {NEXT_VERSION}
    assert versions(after).keys() == {"new-0", "new-1", "draft-new", "gateway-new", "scheduler"}
    check_answers(plain, upgrade.records)
    assert {record.fingerprint for record in upgrade.records} == {fingerprint_name(before.model.fingerprint)}
    assert {Protocol.HTTP} == {record.protocol for record in later}


async def test_streams_of_other_fingerprints_end_on_the_old_release(
    old: Release, new: Release, tiny_pair: tuple[Path, Path], tmp_path: Path, plain: PlainDecoder
) -> None:
    """The scheduler comes first: it is the new one that keeps them there."""
    asked = cases(STREAMS, TOKENS)
    async with upgrading(old, tiny_pair, tmp_path, asked) as upgrade:
        cell, before = upgrade.cell, await upgrade.cell.status()
        await upgrade.replace_scheduler(new)
        await upgrade.streams_go_on()
        gateway = await upgrade.replace_gateway(new)
        await upgrade.streams_go_on()
        await upgrade.replace_target("old-0", new, "new-0")
        assert in_use(await cell.status()) == {"new-0", "old-1", "draft-old"}
        await upgrade.streams_go_on()
        await upgrade.replace_draft(new)
        await cell.start(new, "target", "new-1")
        draining = asyncio.create_task(cell.drain("old-1"))
        await upgrade.until_status(lambda status: "old-1" not in in_use(status))
        later = await upgrade.open_streams(cases(4, 60))
        await upgrade.streams_go_on()
        assert not draining.done()
        await upgrade.let_streams_end()
        await draining
        assert await cell.end("old-1") == "exit code 0"
        assert await gateway == "exit code 0"
        after = await cell.status()
    assert versions(after) == dict.fromkeys(("new-0", "new-1", "draft-new", "gateway-new", "scheduler"), NEXT_VERSION)
    check_answers(plain, upgrade.records)
    first, second = (fingerprint_name(status.model.fingerprint) for status in (before, after))
    assert first != second
    assert [record.fingerprint for record in upgrade.records] == [first] * STREAMS + [second] * len(later)


IN_PLACE = ("scheduler", "target-0", "target-1", "draft-0", "gateway-0", "gateway-1")
"""The order of docs/serving.md, which asks for two targets and two gateways."""


def test_what_spool_serve_started_is_upgraded_in_place(
    old: Release, new: Release, tiny_pair: tuple[Path, Path], tmp_path: Path, plain: PlainDecoder
) -> None:
    """The new release takes the place of the old one, and each process is asked to end, so that it is started again."""
    installed, pace = tmp_path / "installed", tmp_path / "pace"
    pace.write_text(str(SLOWLY), encoding="ascii")
    environment = paced_by(pace)
    installed.symlink_to(old.names)
    environment["PYTHONPATH"] = f"{installed}:{environment['PYTHONPATH']}"
    models = (tiny_pair[0], "--draft", tiny_pair[1], "--draft-in", "workers", "--dtype", "float32")
    asked = cases(6, TOKENS)

    def upgrade() -> None:
        """Every stream still runs when the last worker has been replaced; a gateway ends once its streams have."""
        (tmp_path / "next").symlink_to(new.names)
        (tmp_path / "next").replace(installed)
        for name in IN_PLACE:
            if name == "gateway-0":
                assert httpx.get(f"{served.url}/load", timeout=LONG).json()["running"] == len(asked)
                pace.write_text("0", encoding="ascii")
            served.kill(name, by=signal.SIGTERM)
            served.wait_until_up()

    settings = {
        "models": {"served_model_name": MODEL},
        "engine": {"kv_memory": 64 << 20, "max_num_batched_tokens": 512, "numerics": "universal"},
        "scheduling": {"policy": "ragged", "draft_length": 1},
        "groups": {"target": {"replicas": 2}},
        "gateway": {"replicas": 2, "drain_seconds": 600},
    }
    environment["SPOOL_STATE"] = str(tmp_path / "state")
    with served_without_ray(tmp_path, *models, environment=environment, **settings) as served:
        served.wait_until_up()
        assert asyncio.run(stream_all(served.url, MODEL, asked, on_start=upgrade)) == plain(asked)
        shown = spool("status", environment=served.environment | new.environment())
    assert shown.code == 0, shown.err
    told = dict(re.findall(r"^  ([-a-z0-9]+): .*version ([-.0-9]+)", shown.out, re.MULTILINE))
    assert told == dict.fromkeys(IN_PLACE, NEXT_VERSION)
