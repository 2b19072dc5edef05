"""What holds for a whole test run."""

import signal

import hypothesis


def pytest_configure() -> None:
    # Shells let background programs ignore SIGINT, and then every process that a test starts to interrupt does too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time, however slow the machine is; `make sim` looks for new ones.
    slow_is_no_error = list(hypothesis.HealthCheck)
    hypothesis.settings.register_profile(
        "tests", derandomize=True, deadline=None, suppress_health_check=slow_is_no_error, database=None
    )
    hypothesis.settings.load_profile("tests")
