"""What this machine's processor is called."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Two machines of one name compute alike, with the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    identity = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    return " ".join(sorted({line for line in lines if line.split("\t")[0].strip() in identity}))
