"""The environment of processes that compute: numeric libraries read it once, so it stands before they start."""

from __future__ import annotations

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# A few microseconds: about what the threads of one operation on a small pass wait for each other.
_SPINS = "2000"


def compute_environment(threads: int) -> dict[str, str]:
    """Variables for a process that computes with this many threads; 0 leaves the number to the libraries.

    Threads that wait for others spin only briefly before they sleep: a worker shares its cores, and spinning for a
    thread that another process keeps from running made passes ten times slower. Not spinning at all would cost more
    than a second thread brings.
    """
    variables = {
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": _SPINS,
    }
    if threads:
        variables |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return variables
