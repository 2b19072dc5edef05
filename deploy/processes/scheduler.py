"""The scheduler as a process: `python -m deploy.processes.scheduler`."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

from deploy.assembly.scheduler import scheduler_service
from deploy.processes.file_epochs import FileEpochs
from deploy.processes.task import Surroundings, Up, run_process
from services.launch.process_tuning import keep_loaded_objects
from services.scheduler.metrics_endpoint import MetricsEndpoint
from services.scheduler.server import SchedulerServer, SchedulerServerOptions

_STOP_SECONDS = 0.5


async def start(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Its address is the gRPC server's."""
    config = surroundings.config
    service = await scheduler_service(
        config, FileEpochs(surroundings.folder / "epochs"), surroundings.security, running
    )
    running.push_async_callback(service.close)
    server = SchedulerServer(
        service,
        surroundings.host,
        surroundings.task.port,
        security=surroundings.security,
        options=SchedulerServerOptions(vllm_model_name=config.vllm_model_name),
    )
    address = await server.start()
    running.push_async_callback(server.stop, _STOP_SECONDS)
    listen = config.metrics.listen()
    if listen is not None:
        await running.enter_async_context(MetricsEndpoint(server.metric_families, *listen))
    keep_loaded_objects()
    return Up(address, server.check_health)


if __name__ == "__main__":
    sys.exit(run_process(start))
