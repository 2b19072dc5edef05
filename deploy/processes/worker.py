"""A draft or target worker as a process: `python -m deploy.processes.worker`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from deploy.processes.task import Surroundings, Up, run_process
from scheduler.messages import Role
from services.launch.process_tuning import keep_loaded_objects
from services.worker.process import WorkerArguments, load_executor
from services.worker.registration import WorkerRegistration
from services.worker.server import WorkerServer, step_thread

_STOP_SECONDS = 2.0


async def start(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Ready once the scheduler uses the worker."""
    task = surroundings.task
    arguments = WorkerArguments(Role(task.role), task.engine)
    thread = step_thread()
    loading = thread.submit(load_executor, arguments, surroundings.events.loading)
    executor = await asyncio.wrap_future(loading)
    keep_loaded_objects()
    server = WorkerServer(executor, surroundings.host, thread=thread, security=surroundings.security)
    address = await server.start()
    running.push_async_callback(server.stop, _STOP_SECONDS)
    registration = WorkerRegistration(
        task.name, address, server, surroundings.find_scheduler, security=surroundings.security
    )
    await running.enter_async_context(registration)
    surroundings.events.loading("registering")
    await registration.wait_in_use()

    def check_health() -> None:
        server.check_health()
        registration.check_health()

    return Up(address, check_health)


if __name__ == "__main__":
    sys.exit(run_process(start))
