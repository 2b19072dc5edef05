"""The scheduler of a cell as a Serve replica."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list, _internal_kv_put
from ray.util import get_node_ip_address

from spool.deploy.assembly.plain_message import plain_message
from spool.deploy.assembly.scheduler import start_scheduler
from spool.deploy.assembly.secrets import channel_security
from spool.deploy.autoscaling.reporter import Autoscaler
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.ray_app.ray_metrics import RayMirror
from spool.deploy.ray_app.replica import internal_host, keep_serve_on_node
from spool.services.launch.process_tuning import keep_loaded_objects

_NAMESPACE = b"spool"


class ClusterEpochs:
    """A register for `EpochAuthority`, one for cells of this number in all applications of the cluster.

    It lives as long as the GCS's state.
    """

    def __init__(self, cell: int) -> None:
        self._prefix = b"cell-%d/scheduler/" % cell

    async def taken(self) -> list[int]:
        keys = await asyncio.to_thread(_internal_kv_list, self._prefix, namespace=_NAMESPACE)
        return [int(key.removeprefix(self._prefix)) for key in keys]

    async def take(self, number: int) -> bool:
        key, owner = self._prefix + b"%d" % number, f"process {os.getpid()} on {get_node_ip_address()}"
        existed = await asyncio.to_thread(_internal_kv_put, key, owner, overwrite=False, namespace=_NAMESPACE)
        return not existed

    async def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            await asyncio.to_thread(_internal_kv_del, self._prefix + b"%d" % number, namespace=_NAMESPACE)


class Scheduler:
    """Runs the scheduler service on its node's address.

    Serve keeps one replica. A scheduler that hangs may live on for seconds next to its successor; the successor has a
    higher epoch, and workers refuse the old scheduler.
    """

    async def __init__(self, config: SpoolConfig, cell: int) -> None:  # type: ignore[misc]  # Serve awaits it
        config.logging.install()
        keep_serve_on_node()
        self._autoscaler = Autoscaler(config.scheduler_config())
        self._running = AsyncExitStack()
        self._service, self._server, self._address = await start_scheduler(
            config,
            ClusterEpochs(cell),
            channel_security(config.internal),
            self._running,
            internal_host(config.internal),
            cell=cell,
            replicas=lambda: self._autoscaler.decision,
            stop_seconds=1.0,
        )
        await self._running.enter_async_context(RayMirror(self._server.metric_families))
        keep_loaded_objects()

    async def locate(self) -> str:
        """The address of the gRPC server."""
        return self._address

    async def status(self) -> dict[str, Any]:
        """The status of scheduler and workers as plain data."""
        return plain_message(self._server.status())

    def reconfigure(self, rules: Mapping[str, Any]) -> None:
        """Serve calls this with the rules of autoscaling, at the start and whenever they change."""
        self._autoscaler.set_rules(rules)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this twice a second, and gives the answer to the policy (deploy/autoscaling/policy.py)."""
        drafts = self._service.workers.draft_busy
        return self._autoscaler.observe(self._service.core.snapshot(), drafts, time.monotonic())

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises: also one that another scheduler has taken over from."""
        self._server.check_health()

    async def __del__(self) -> None:
        await self._running.aclose()
