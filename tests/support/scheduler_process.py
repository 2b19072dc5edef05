"""A scheduler that says its address in a line of JSON and serves until its standard input ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from spool.scheduler.config import Policy, SchedulerConfig
from spool.services.scheduler.server import SchedulerServer, SchedulerServerOptions
from spool.services.scheduler.service import SchedulerService
from tests.support.cells import LINKS, REGISTRY


async def main() -> None:
    config = SchedulerConfig(policy=Policy.RAGGED)
    async with SchedulerService(config, scheduler_epoch=time.time_ns(), link_options=LINKS) as service:
        server = SchedulerServer(service, options=SchedulerServerOptions(registry=REGISTRY))
        print(json.dumps({"address": await server.start()}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0.5)


if __name__ == "__main__":
    asyncio.run(main())
