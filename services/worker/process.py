"""The process of one worker: `python -m spool.services.worker.process --role target --settings '{"model": "..."}'`.

The process reports to the launcher in JSON lines on its standard output:

    {"event": "loading", "message": "loading weights", "fraction": 0.4}     (fraction null where it is not known)
    {"event": "ready", "address": "127.0.0.1:40123", "process_id": 4711}
    {"event": "failed", "error": "one line"}

The environment variable SPOOL_CHANNEL_SECURITY says who may call the worker (services/rpc/channel_security.py).
Everything else that is printed goes to standard error. With `--watch-stdin`, the worker stops when its standard input
ends, because the process that started it is gone then. SIGTERM and SIGINT stop it too; a running step may end first.

A module of its own makes another engine a worker: it calls `run_worker(parse_arguments(), load)` with a `load` that
returns, for a target, `serving(executor)`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from spool.engine.cpu.threads import keep_threads_apart
from spool.engine.drafting.lookup.text_store import TextStore
from spool.engine.drafting.model_drafting import Draft
from spool.engine.drafting.proposer import Lookup, Proposer, Proposers
from spool.engine.errors import one_line
from spool.engine.settings import EngineSettings
from spool.protos import worker_pb2
from spool.scheduler.messages import Role
from spool.services.launch.process_tuning import importing, keep_loaded_objects
from spool.services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity
from spool.services.rpc.conversion import to_wire
from spool.services.rpc.worker_codec import ROLES
from spool.services.scheduler.workers.pairing import check_pairing
from spool.services.worker.base_server import BaseWorkerServer, step_thread
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.server import DraftServer
from spool.services.worker.ending import end_process
from spool.services.worker.executor import StepExecutor
from spool.services.worker.gang import Gang
from spool.services.worker.server import WorkerServer

if TYPE_CHECKING:
    from spool.engine.drafting.model_draft import DraftEngine
    from spool.engine.target import TargetEngine

logger = logging.getLogger(__name__)

NGRAM_MODEL = "ngram"
"""The own draft of a target that has prompt lookup alone."""

Progress = Callable[[str, float | None], None]

Serve = Callable[["WorkerArguments", ThreadPoolExecutor], BaseWorkerServer]
"""Makes the server of a worker that is loaded; called on the event loop, with the thread that has loaded it."""


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """The command line of a worker, and who may call it and is called. `settings` is handed to the engine unchanged."""

    role: Role
    settings: dict[str, Any]
    host: str = "127.0.0.1"
    port: int = 0
    watch_stdin: bool = False
    grace_seconds: float = 5.0
    security: ChannelSecurity = field(default_factory=ChannelSecurity)


def parse_arguments(argv: Sequence[str] | None = None) -> WorkerArguments:
    parser = argparse.ArgumentParser(description="Runs one draft or target worker.")
    parser.add_argument("--role", required=True, choices=[role.value for role in Role])
    parser.add_argument("--settings", default="{}", help="settings of the engine, a JSON object")
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--watch-stdin", action="store_true", help="stop when standard input ends")
    parser.add_argument("--grace-seconds", type=float, default=5.0, help="time for a running step at a stop")
    parser.add_argument("--log-level", default="INFO")
    parsed = parser.parse_args(argv)
    logging.basicConfig(
        level=parsed.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        settings = json.loads(parsed.settings)
    except ValueError as error:
        parser.error(f"--settings is not JSON: {error}")
    if not isinstance(settings, dict):
        parser.error(f"--settings is a JSON {type(settings).__name__}, must be an object")
    return WorkerArguments(
        Role(parsed.role), settings, parsed.host, parsed.port, parsed.watch_stdin, parsed.grace_seconds
    )


class EventPipe:
    """Writes JSON lines to the launcher on the standard output; everything else printed goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._pipe: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, event: str, **fields: object) -> None:
        with self._lock:
            self._pipe.write(json.dumps({"event": event, **fields}) + "\n")
            self._pipe.flush()

    def loading(self, message: str, fraction: float | None = None) -> None:
        self.send("loading", message=message, fraction=fraction)


def run_worker(arguments: WorkerArguments, load: Callable[[WorkerArguments, Progress], Serve]) -> int:
    """Loads a worker, serves it until the process is to stop, and returns the exit code of the process.

    If `load` or the start of the server fails, the launcher gets the reason as one line.
    """
    events = EventPipe()
    try:
        # Removed from the environment, so that processes started by libraries do not inherit it.
        security = ChannelSecurity.from_json(os.environ.pop(SECURITY_VARIABLE, "{}"))
        arguments = replace(arguments, security=security)
        if arguments.watch_stdin:
            stop_when_stdin_ends()
        thread = step_thread()
        serve = thread.submit(load, arguments, events.loading).result()
        keep_loaded_objects()
        return asyncio.run(serve_worker(serve, thread, events, arguments))
    except Exception as error:
        logger.exception("the %s worker did not start", arguments.role.value)
        events.send("failed", error=one_line(error))
        return 1


async def serve_worker(serve: Serve, thread: ThreadPoolExecutor, events: EventPipe, arguments: WorkerArguments) -> int:
    """Serves until SIGTERM or SIGINT. Exit code 0, or 1 if a step was still running after the grace."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = serve(arguments, thread)
    address = await server.start()
    events.send("ready", address=address, process_id=os.getpid())
    await stop.wait()
    await server.stop(arguments.grace_seconds)
    if server.busy:
        # A thread cannot be stopped, and the interpreter would wait for it.
        end_process(f"a step still runs {arguments.grace_seconds:.1f} s after the stop was asked for")
    return 0


def serving(executor: StepExecutor) -> Serve:
    """Of a target with this executor."""
    return lambda arguments, thread: WorkerServer(
        executor, arguments.host, arguments.port, thread=thread, security=arguments.security
    )


def serving_draft(draft: Draft, prefix_cache: bool, ahead: bool) -> Serve:
    """Of a draft worker, see `DraftServer`."""
    return lambda arguments, thread: DraftServer(
        draft,
        prefix_cache,
        arguments.host,
        arguments.port,
        thread=thread,
        security=arguments.security,
        ahead=ahead,
    )


def load_worker(arguments: WorkerArguments, progress: Progress) -> Serve:
    """A worker with a real engine for the role and the settings (see engine/settings.py).

    Engines are imported in the functions below and not above: only worker processes may import torch, and only once
    their environment is set up.
    """
    if arguments.role is Role.DRAFT:
        settings = EngineSettings.from_plain(arguments.settings)
        return serving_draft(load_draft(settings, progress), settings.prefix_cache, settings.goes_ahead)
    return serving(load_executor(arguments, progress))


def load_executor(arguments: WorkerArguments, progress: Progress) -> StepExecutor:
    """The executor of a target."""
    settings = EngineSettings.from_plain(arguments.settings)
    keep_threads_apart(settings)
    with importing():
        from spool.engine.models.loading import load_target_engine
    gang = Gang(settings) if settings.tensor_parallel_size > 1 else None
    engine = load_target_engine(settings, progress, None if gang is None else gang.start)
    if gang is not None:
        gang.loaded()
    texts = TextStore(settings.lookup_memory) if settings.lookup_memory else None
    lookup = None if settings.lookup_match is None else Lookup(settings.lookup_match, texts)
    own: Proposer | None = engine.head
    if settings.inside_draft is not None:
        own = _load_inside(engine, settings.inside_draft, progress)
    elif lookup is not None and own is None:
        engine.drafted_by(NGRAM_MODEL)
    remote = RemoteProposer(engine.description.vocabulary_size, arguments.security) if own is None else None
    return StepExecutor(
        engine,
        kv_store=engine.kv_store,
        prefix_cache=settings.prefix_cache,
        proposer=Proposers(lookup, own or remote),
        remote=remote,
    )


def _load_inside(engine: TargetEngine, settings: EngineSettings, progress: Progress) -> Proposer:
    """A draft that runs in the process of its target. Raises ValueError where it does not fit."""
    from spool.engine.drafting.inside_target import InsideDrafting
    from spool.engine.drafting.model_drafting import ModelDrafting

    draft = load_draft(settings, progress)
    found = [
        to_wire(worker_pb2.WorkerDescription, one.description, role=ROLES.to_wire(role))
        for one, role in ((draft, Role.DRAFT), (engine, Role.TARGET))
    ]
    check_pairing("inside", found[0], [("target", found[1])])
    engine.drafted_by(draft.description.model_id)
    return InsideDrafting(ModelDrafting(draft, settings.prefix_cache))


def load_draft(settings: EngineSettings, progress: Progress) -> DraftEngine:
    """Raises ValueError for settings that no draft can have, and what loading raises."""
    if settings.tensor_parallel_size > 1:
        raise ValueError(f"tensor_parallel_size is {settings.tensor_parallel_size}, must be 1 for a draft")
    keep_threads_apart(settings)
    with importing():
        from spool.engine.models.loading import load_draft_engine
    return load_draft_engine(settings, progress)


def stop_when_stdin_ends() -> None:
    """Sends SIGTERM to this process then: while it loads it ends at once, while it serves it ends gracefully."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


def main() -> int:
    return run_worker(parse_arguments(), load_worker)


if __name__ == "__main__":
    sys.exit(main())
