"""What holds for a whole test run."""

import signal


def pytest_configure() -> None:
    # In the background of a shell SIGINT is ignored, and so it would be by every process that a test starts to interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
