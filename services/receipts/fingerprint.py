"""Names for what must be alike on two targets for equal bits; engine/exactness/fingerprint.py has the parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

_DIGITS = 16


def fingerprint_name(parts: Mapping[str, str]) -> str:
    """As answers have it in `system_fingerprint`: equal names, equal parts."""
    text = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The parts that differ, each with what it is in both."""
    names = sorted(one.keys() | other.keys())
    return [
        f"{name} {one.get(name, 'any')} and {other.get(name, 'any')}"
        for name in names
        if one.get(name) != other.get(name)
    ]
