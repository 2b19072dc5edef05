"""Versions of the protocol between gateways, schedulers and workers, and their check when two processes first talk.

A worker and its scheduler exchange their versions in `Describe`, a gateway and its scheduler when a session opens, a
target and a draft worker when a stream opens. Processes that have no version in common refuse each other with a message
that names the versions of both. Beside them each tells the version of its software, which nothing depends on but where
new sequences begin: operators see by it how far an upgrade is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Versions:
    """From the oldest to the newest that a process speaks."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"


SPOKEN = Versions(20, 22)
"""`newest` is raised by one with every change of protos/ or of its meaning. Where processes of the version before still
understand what is sent, as they do if fields are only added, `oldest` stays; else it becomes `newest`.

Releases without a version count as version 0.
"""

DISTRIBUTION = "spool-serve"


def _software_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


SOFTWARE_VERSION = _software_version()
"""Of the distribution that these processes were installed from; empty where they were not."""


def release_numbers(software_version: str) -> tuple[int, ...]:
    """The numbers with which a version begins, to compare releases by; none of one that is not known."""
    found = re.match(r"\d+(\.\d+)*", software_version)
    return () if found is None else tuple(map(int, found[0].split(".")))


class Announced(Protocol):
    """A message that says what its sender speaks; `oldest_protocol_version` 0 is the same as `protocol_version`."""

    @property
    def protocol_version(self) -> int: ...

    @property
    def oldest_protocol_version(self) -> int: ...


def version_conflict(peer: str, announced: Announced, own: str, ours: Versions) -> str | None:
    """Why two processes cannot work together, in words; None where they have a version in common."""
    newest = announced.protocol_version
    theirs = Versions(announced.oldest_protocol_version or newest, newest)
    if theirs.oldest <= ours.newest and ours.oldest <= theirs.newest:
        return None
    return f"{peer} speaks protocol {theirs}, {own} speaks {ours}: their releases must be neighbours"
