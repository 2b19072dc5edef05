"""What holds for a whole test run."""

import os
import signal
from pathlib import Path

import hypothesis


def pytest_configure() -> None:
    # Triton looks when it is first imported; without a GPU its kernels run in no other way.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Shells let background programs ignore SIGINT, and then every process that a test starts to interrupt does too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time, however slow the machine is; `make sim` looks for new ones.
    slow_is_no_error = list(hypothesis.HealthCheck)
    hypothesis.settings.register_profile(
        "tests", derandomize=True, deadline=None, suppress_health_check=slow_is_no_error, database=None
    )
    hypothesis.settings.load_profile("tests")
