"""The Ray Serve deployments: thin shells around services that also run without Ray. Here are the deployments' names."""

from __future__ import annotations

from collections.abc import Mapping

from spool.scheduler.messages import Role

PROXIES = "Disabled"
"""Where Serve's own HTTP proxies run: gateways listen themselves."""

GATEWAY = "Gateway"
_SCHEDULER = "Scheduler"
_WORKERS: Mapping[Role, str] = {Role.TARGET: "TargetWorker", Role.DRAFT: "DraftWorker"}


def scheduler_name(cell: int = 1) -> str:
    """Of the cell with this number, from 1 on."""
    return _of_cell(_SCHEDULER, cell)


def workers_name(role: Role, cell: int = 1) -> str:
    """Of a group of the cell with this number, from 1 on."""
    return _of_cell(_WORKERS[role], cell)


def _of_cell(name: str, cell: int) -> str:
    return name if cell == 1 else f"{name}-{cell}"
