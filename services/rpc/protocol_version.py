"""The version of the protocol between gateways, schedulers and workers, and its check when two processes first talk.

A worker and its scheduler exchange their versions in `Describe`, a gateway and its scheduler when a session opens.
Processes of different versions do not work together: each refuses the other with a message that names both versions.
"""

from __future__ import annotations

PROTOCOL_VERSION = 19
"""To be raised by one with every change of protos/ or of its meaning that the other side must know of.

Releases without a version count as version 0.
"""


def version_conflict(peer: str, theirs: int, own: str, ours: int) -> str | None:
    """Why two processes cannot work together, in words; None where their versions are equal."""
    if theirs == ours:
        return None
    return f"{peer} speaks protocol version {theirs}, {own} speaks version {ours}: both must be of the same release"
