"""What a process does with memory that it frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from spool.services.launch.process_tuning import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(3):
    bytearray(48 << 20)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[2] - faults[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_freed_memory_stays_with_the_process() -> None:
    # Pages that the system gives once more would be 12,288.
    assert int(subprocess.check_output([sys.executable, "-c", PROGRAM])) < 100
