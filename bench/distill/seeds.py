"""Independent seeds for the parts of a run, so that each part can be made again without those before it."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """A number below 2**63 that depends on all parts and on nothing else."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
