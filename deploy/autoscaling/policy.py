"""The policy as Ray Serve calls it, in its controller about ten times a second.

The scheduler's replica decides on workers; what it reports with its autoscaling statistics is followed here. Gateways
report their open requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext

from spool.deploy.autoscaling.reporter import at_least_name, at_most_name
from spool.deploy.ray_app import GATEWAY, scheduler_name, workers_name
from spool.scheduler.messages import Role

OPEN_REQUESTS = "open_requests"
"""Name of what each gateway reports."""


class FollowScheduler:
    """Keeps each group of workers within what its scheduler wants, and lets the gateways follow their open requests.

    What has no report keeps its number, so no worker comes or goes while there is no scheduler.
    """

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, float], dict[Any, Any]]:
        """By deployment id: the replicas wanted. Serve applies bounds and delays of each deployment on top."""
        by_name = {context.deployment_name: (deployment, context) for deployment, context in contexts.items()}
        wanted: dict[Any, float] = {}
        if GATEWAY in by_name:
            deployment, context = by_name[GATEWAY]
            # Means over the last half minute, as Serve has it by default.
            open_requests = (context.aggregated_metrics or {}).get(OPEN_REQUESTS)
            if open_requests:
                wanted[deployment] = sum(open_requests.values()) / context.config.get_target_ongoing_requests()
        for cell in itertools.takewhile(lambda number: scheduler_name(number) in by_name, itertools.count(1)):
            reported = by_name[scheduler_name(cell)][1].raw_metrics
            for role in Role:
                name = workers_name(role, cell)
                at_least = _latest(reported, at_least_name(role))
                at_most = _latest(reported, at_most_name(role))
                if name in by_name and at_least is not None and at_most is not None:
                    deployment, context = by_name[name]
                    wanted[deployment] = min(max(context.target_num_replicas, at_least), at_most)
        return wanted, {}


def _latest(reported: Mapping[str, Mapping[Any, Any]] | None, name: str) -> float | None:
    """The last value of any replica: for seconds there can be two of the scheduler."""
    values = [series[-1] for series in (reported or {}).get(name, {}).values() if series]
    return float(max(values, key=lambda value: value.timestamp).value) if values else None
