"""What bench.chaos.drafts starts in place of a draft worker: `python -m bench.chaos.draft_process KIND NAME`.

`behind-relay` is a draft worker that is reached through a relay. `stranger` is no draft: the same engine proposes for
nobody, for `SHARE_VARIABLE` of a core.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path

from spool.deploy.processes.task import Surroundings, Up, run_process
from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.drafting.model_drafting import DraftAsk, ModelDrafting
from spool.engine.settings import EngineSettings
from spool.scheduler.messages import Role
from spool.scheduler.sampling import SamplingParameters
from spool.services.worker.base_server import step_thread
from spool.services.worker.process import WorkerArguments, load_draft, load_worker
from spool.services.worker.registration import WorkerRegistration

BEHIND_RELAY, STRANGER = "behind-relay", "stranger"
SHARE_VARIABLE = "SPOOL_STRANGER_SHARE"

_SEQUENCES = 32
_PROMPT = tuple(range(100, 164))
_DRAFT_LENGTH = 4


async def start_behind_relay(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    """Ready once the scheduler uses the worker."""
    from bench.chaos.relay import Relay

    task, security, thread = surroundings.task, surroundings.security, step_thread()
    arguments = WorkerArguments(Role.DRAFT, task.engine, surroundings.host, security=security)
    serve = await asyncio.wrap_future(thread.submit(load_worker, arguments, surroundings.events.loading))
    server = serve(arguments, thread)
    address = await server.start()
    running.push_async_callback(server.stop, 0.0)
    relay = Relay(Path(task.folder) / f"{task.name}.way", server.describe().vocabulary_size)
    address = await relay.start(address)
    registration = WorkerRegistration(task.name, address, server, surroundings.find_scheduler, security=security)
    await running.enter_async_context(registration)
    await registration.wait_in_use()
    return Up(address, registration.check_health)


async def start_stranger(surroundings: Surroundings, running: AsyncExitStack) -> Up:
    share, loaded = float(os.environ[SHARE_VARIABLE]), Future[None]()

    def run() -> None:
        try:
            draft = load_draft(EngineSettings.from_plain(surroundings.task.engine), surroundings.events.loading)
        except BaseException as error:
            loaded.set_exception(error)
            raise
        loaded.set_result(None)
        _propose_for_nobody(ModelDrafting(draft, prefix_cache=False), share)

    # The engine must be loaded on the thread that computes, which the process does not wait for.
    threading.Thread(target=run, name="step", daemon=True).start()
    await asyncio.wrap_future(loaded)
    return Up("", lambda: None)


def _propose_for_nobody(drafting: ModelDrafting, share: float) -> None:
    sequences = [DraftKv() for _ in range(_SEQUENCES)]
    began, used = time.monotonic(), time.process_time()
    while True:
        asked = [DraftAsk(kv, _PROMPT, (7,), len(_PROMPT), SamplingParameters(), _DRAFT_LENGTH) for kv in sequences]
        drafting.propose(asked)
        # A process that was stopped does not make up for it.
        ahead = (time.process_time() - used) / max(share, 0.001) - (time.monotonic() - began)
        if ahead > 0:
            time.sleep(ahead)
        else:
            began, used = time.monotonic(), time.process_time()


_STARTS = {BEHIND_RELAY: start_behind_relay, STRANGER: start_stranger}

if __name__ == "__main__":
    sys.exit(run_process(_STARTS[sys.argv[1]]))
