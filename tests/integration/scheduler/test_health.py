"""/health while schedulers are stopped: probes get an answer before they give up."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from spool.scheduler.messages import Role
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.scheduler_client.cell_link import ClientOptions
from tests.support.cells import Heard, Whereabouts, all_in_use, client, running_worker, scheduler_process
from tests.support.gateway import listening, save_tokenizer
from tests.support.waiting import until


async def test_health_while_schedulers_are_stopped(tmp_path: Path) -> None:
    """A cell that answers is enough; 503 where none does, for they are not waited for. Balancers do not hear of that
    yet."""
    resolve, heard = [Whereabouts(), Whereabouts()], Heard()
    async with AsyncExitStack() as stack:
        schedulers = [await stack.enter_async_context(scheduler_process()) for _ in resolve]
        for place, scheduler in zip(resolve, schedulers, strict=True):
            place.address = scheduler.address
            await all_in_use([await stack.enter_async_context(running_worker("target-0", Role.TARGET, place))])
        backend = await stack.enter_async_context(client(*resolve, options=ClientOptions(), listener=heard))
        await until(lambda: heard.opened == 2)
        gateway = listening(backend, save_tokenizer(tmp_path), None, GatewayMetrics())
        served = await stack.enter_async_context(gateway)
        async with httpx.AsyncClient(base_url=served.url, timeout=10) as http:
            for status, scheduler in ((200, schedulers[0]), (503, schedulers[1])):
                assert (await http.get("/health")).status_code == 200
                scheduler.hang()
                seen = 0
                while seen != status:  # what was found holds for half a second
                    seen = (await http.get("/health")).status_code
                assert (await http.get("/-/healthz")).status_code == 200
