"""The Ray Serve deployments: thin shells around services that also run without Ray. Here are the deployments' names."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.messages import Role

GATEWAY = "Gateway"
SCHEDULER = "Scheduler"
WORKERS: Mapping[Role, str] = {Role.TARGET: "TargetWorker", Role.DRAFT: "DraftWorker"}
