"""One process of a cell without Ray: `python -m spool.deploy.processes KIND NAME`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from spool.deploy.processes.task import FileEpochs, Surroundings, Up, run_process
from spool.scheduler.messages import Role
from spool.services.launch.process_tuning import keep_loaded_objects

# Where everything stops together, nobody is there to finish what is under way.
_GATEWAY_STOP_SECONDS = 1.0
_SCHEDULER_STOP_SECONDS = 0.5
_WORKER_STOP_SECONDS = 2.0

# Each kind imports what it needs itself: a gateway does without the engine, a worker without FastAPI.


async def start_gateway(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Its address is the HTTP server's."""
    from spool.deploy.assembly.gateway import start_gateway

    def drain_seconds() -> float:
        return _GATEWAY_STOP_SECONDS if surroundings.all_stop else surroundings.config.gateway.drain_seconds

    engine, url = await start_gateway(
        surroundings.config,
        [surroundings.find_scheduler],
        gateway_id=surroundings.task.name,
        security=surroundings.security,
        drain_seconds=drain_seconds,
        share_port=surroundings.config.gateway.replicas > 1,
        running=running,
    )
    return Up(url, engine.backend.check_health)


async def start_scheduler(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Its address is the gRPC server's."""
    from spool.deploy.assembly.scheduler import start_scheduler

    _, server, address = await start_scheduler(
        surroundings.config,
        FileEpochs(Path(surroundings.task.folder) / "epochs"),
        surroundings.security,
        running,
        surroundings.host,
        port=surroundings.task.port,
        stop_seconds=_SCHEDULER_STOP_SECONDS,
    )
    surroundings.publish_address(address)
    return Up(address, server.check_health)


async def start_worker(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Ready once the scheduler uses the worker. Before it ends alone, its sequences go on elsewhere or end."""
    from spool.services.worker.base_server import step_thread
    from spool.services.worker.process import WorkerArguments, load_worker
    from spool.services.worker.registration import WorkerRegistration

    task, security = surroundings.task, surroundings.security
    thread = step_thread()
    arguments = WorkerArguments(Role(task.role), task.engine, surroundings.host, security=security)
    serve = await asyncio.wrap_future(thread.submit(load_worker, arguments, surroundings.events.loading))
    server = serve(arguments, thread)
    address = await server.start()
    running.push_async_callback(server.stop, _WORKER_STOP_SECONDS)
    registration = WorkerRegistration(task.name, address, server, surroundings.find_scheduler, security=security)
    await running.enter_async_context(registration)
    surroundings.events.loading("registering")
    await registration.wait_in_use()

    def check_health() -> None:
        server.check_health()
        registration.check_health()

    drain_seconds = surroundings.config.group(arguments.role).drain_seconds
    return Up(address, check_health, lambda: registration.leave(max(drain_seconds - _WORKER_STOP_SECONDS, 0.0)))


_STARTS = {"gateway": start_gateway, "scheduler": start_scheduler, "worker": start_worker}


async def start(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    up = await _STARTS[sys.argv[1]](surroundings, running)
    keep_loaded_objects()
    return up


if __name__ == "__main__":
    sys.exit(run_process(start))
