"""A gateway as a process: `python -m deploy.processes.gateway`."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

from deploy.assembly.gateway import start_gateway
from deploy.processes.task import Surroundings, Up, run_process
from services.gateway.http.server import HttpServer
from services.launch.process_tuning import keep_loaded_objects

# Everything stops together, so there is nobody who could finish what is under way.
_DRAIN_SECONDS = 1.0


async def start(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Its address is the HTTP server's."""
    shares = surroundings.config.gateway.replicas > 1
    gateway = await start_gateway(
        surroundings.config,
        [surroundings.find_scheduler],
        gateway_id=surroundings.task.name,
        security=surroundings.security,
        drain_seconds=_DRAIN_SECONDS,
        share_port=shares,
        running=running,
    )
    http = HttpServer(gateway.app, gateway.settings.http, _DRAIN_SECONDS, share_port=shares)
    await running.enter_async_context(http)
    keep_loaded_objects()
    return Up(http.url, gateway.backend.check_health)


if __name__ == "__main__":
    sys.exit(run_process(start))
