"""The process that a Ray started by Spool lives in: `python -m spool.deploy.cluster.ray_process '{...}'`.

It reports on standard output in JSON lines, as worker processes do (`ready` with `address`, or `failed` with `error`),
and stops Ray, with all that runs on it, at SIGTERM or SIGINT, or when standard input ends before the
line `detach` has come: then whoever started it is gone. Ray's own processes end with it even if it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from filelock import FileLock, Timeout

from spool.deploy.ray_app import PROXIES
from spool.engine.errors import one_line
from spool.services.worker.process import EventPipe

DETACH = "detach"

# Spool keeps nothing in Ray's object store; this is about the least that Ray takes.
_OBJECT_STORE_BYTES = 100 << 20


def main() -> int:
    """`lock` is held as long as Ray lives, which writes to `folder`."""
    lock, folder = json.loads(sys.argv[1])
    events = EventPipe()
    stop = threading.Event()
    _stop_at_signals(stop)
    threading.Thread(target=_watch_stdin, args=(stop,), name="stdin-watch", daemon=True).start()
    try:
        with FileLock(lock, timeout=0):
            _run(folder, events, stop)
    except Timeout:
        events.send("failed", error="another Ray was started for this application meanwhile")
        return 1
    except Exception as error:
        events.send("failed", error=one_line(error))
        raise
    return 0


def _run(folder: str, events: EventPipe, stop: threading.Event) -> None:
    import ray
    from ray import serve

    context = ray.init(
        address="local",
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        include_dashboard=False,
        _temp_dir=folder,
    )
    # Ray has taken them for itself.
    _stop_at_signals(stop)
    try:
        # Here, so that Serve's controller starts while whoever waits is still busy with models.
        serve.start(proxy_location=PROXIES)
        events.send("ready", address=context.address_info["gcs_address"], process_id=os.getpid())
        stop.wait()
        serve.shutdown()
    finally:
        ray.shutdown()


def _stop_at_signals(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _watch_stdin(stop: threading.Event) -> None:
    content = b""
    while chunk := os.read(0, 4096):
        content += chunk
    if DETACH.encode() not in content.split():
        stop.set()


if __name__ == "__main__":
    sys.exit(main())
