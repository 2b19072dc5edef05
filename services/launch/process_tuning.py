"""What makes a process of Spool compute without stalls: its environment, and what its garbage collector may skip."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from spool.engine.cpu.isa import AUTO, library_limits

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# A few microseconds: about as long as the threads of one operation on a small pass wait for each other.
_SPINS = "2000"

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def compute_environment(threads: int, cpu_isa: str = AUTO) -> dict[str, str]:
    """Variables for a process that computes with this many threads, 0 leaves the number to the libraries, and with no
    more than an instruction set (engine/cpu/isa.py).

    Numeric libraries read these variables once, when they are loaded, so the variables must be set before the process
    starts. A thread that waits for others spins only briefly before it sleeps: a worker shares its cores, and passes
    were ten times slower when threads spun while another process kept their partners from running. Without any
    spinning, waiting would cost more than a second thread gains.
    """
    variables = {
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": _SPINS,
    }
    if threads:
        variables |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return variables | library_limits(cpu_isa)


@contextmanager
def importing() -> Iterator[None]:
    """Collects no garbage in the block.

    Libraries make objects that stay, and looking through these time and again takes a tenth of their import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_loaded_objects() -> None:
    """Exempts every object that exists now from garbage collection; to be called once everything is loaded.

    Libraries leave so many objects behind that a full collection takes longer than a step, and interrupts one.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Memory that is freed from now on stays with the process, where its C library is glibc.

    Otherwise the system takes and clears what the logits of many tokens need, pass after pass.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
