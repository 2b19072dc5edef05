"""A scheduler that says its address in a line of JSON and serves until its standard input ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from scheduler.config import Policy, SchedulerConfig
from services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity
from services.scheduler.server import SchedulerServer, SchedulerServerOptions
from services.scheduler.service import SchedulerService
from tests.support.cells import LINKS, REGISTRY


async def main() -> None:
    security = ChannelSecurity.from_json(os.environ.get(SECURITY_VARIABLE, "{}"))
    async with SchedulerService(
        SchedulerConfig(policy=Policy.RAGGED), scheduler_epoch=time.time_ns(), link_options=LINKS, security=security
    ) as service:
        server = SchedulerServer(service, security=security, options=SchedulerServerOptions(registry=REGISTRY))
        print(json.dumps({"address": await server.start()}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0.5)


if __name__ == "__main__":
    asyncio.run(main())
