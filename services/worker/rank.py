"""The process of one of the other ranks of a worker: `python -m spool.services.worker.rank --rank 1 --folder ...`.

Rank 0 starts it (services/worker/gang.py). Once the model is loaded, the process sends a byte on its standard output
every second, and the reason if it ends by itself. It ends with rank 0, and ends rank 0 where that is silent on its
standard input. What it logs goes to rank 0's standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from spool.engine.errors import one_line
from spool.engine.settings import EngineSettings
from spool.services.launch.process_tuning import importing, keep_loaded_objects
from spool.services.worker.gang import LONGEST_SILENCE_SECONDS, keep_beating, watched

_SET_PARENT_DEATH_SIGNAL = 1

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a rank of a worker of several.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="settings of the engine, a JSON object")
    parser.add_argument("--folder", type=Path, required=True, help="where the ranks find each other")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    arguments = parser.parse_args()
    _end_with(arguments.parent)
    pipe = os.dup(1)
    os.dup2(2, 1)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s rank {arguments.rank}: %(name)s: %(message)s",
    )

    def loaded() -> None:
        keep_loaded_objects()
        threading.Thread(target=keep_beating, args=(pipe,), name="beat", daemon=True).start()
        threading.Thread(target=_watch, args=(arguments.parent,), name="watch", daemon=True).start()

    try:
        with importing():
            from spool.engine.models.loading import run_rank
        run_rank(EngineSettings.from_plain(arguments.settings), arguments.rank, arguments.folder, loaded)
    except Exception as error:
        logger.exception("the rank ends")
        logging.shutdown()
        os.write(pipe, f"failed: {one_line(error)}".encode())
    # What other threads wait for never comes.
    os._exit(1)


def _end_with(parent: int) -> None:
    """The system kills this process, even one that is stopped, once rank 0 is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    """Ends rank 0, and so all ranks, if it is silent for long: it was stopped, and nobody can use what all hold."""
    silent = watched(sys.stdin.fileno(), LONGEST_SILENCE_SECONDS)
    if silent and os.getppid() == parent:
        logger.error("rank 0 %s, and is ended", silent)
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
