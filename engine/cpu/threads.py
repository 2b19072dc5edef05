"""Where the threads run that compute on a CPU. Free of torch: it counts before libraries start their threads."""

from __future__ import annotations

import os

from spool.engine.settings import EngineSettings

# Those of the process, as long as no library has bound its first thread to one of them.
_PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def keep_threads_apart(settings: EngineSettings) -> None:
    """If an engine computes with as many threads as there are processors, each stays on one of its own; the caller, who
    is to load the engine next and to compute with it, is the first of them.

    Otherwise the system runs two of them on one processor whenever another process has used the second for a moment,
    and they wait for each other in every part of a pass. Threads of several ranks, and of several workers on one
    machine, are fewer than the processors, and the system finds a free one.
    """
    if settings.device != "cpu" or settings.tensor_parallel_size > 1 or settings.threads < 2:
        return
    if hasattr(os, "sched_getaffinity") and settings.threads == len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_PROC_BIND", "true")


def run_on_any_processor() -> None:
    """For a thread that computes nothing of a pass: it starts bound to the processor of the thread that starts it."""
    if _PROCESSORS is not None:
        os.sched_setaffinity(0, _PROCESSORS)
