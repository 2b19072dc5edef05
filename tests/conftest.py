"""What holds for a whole test run."""

import signal


def pytest_configure() -> None:
    # Shells let background programs ignore SIGINT, and then every process that a test starts to interrupt does too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
