"""Options of Serve itself: how many replicas there are, and the file for `serve deploy`."""

from __future__ import annotations

from typing import Any

import yaml

from spool.deploy.autoscaling.reporter import autoscaling_rules
from spool.deploy.config.placement import GatewayAutoscaling, Scaled
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.ray_app import GATEWAY, PROXIES, scheduler_name, workers_name

IMPORT_PATH = "spool.deploy.ray_app.application:build"
POLICY_PATH = "spool.deploy.autoscaling.policy:FollowScheduler"

# Serve collects what a deployment reports only where its number may change, if only from one to one.
_REPORTING = {"min_replicas": 1, "max_replicas": 1, "metrics_interval_s": 0.5, "look_back_period_s": 5.0}


def replica_options(settings: Scaled) -> dict[str, Any]:
    """How many replicas a deployment has. A fixed number is a range of one: which deployments have a range is part of
    an application's version for Serve, which replaces every replica when that changes."""
    scaling = settings.autoscaling
    options: dict[str, Any] = {
        "min_replicas": settings.fewest,
        "initial_replicas": settings.replicas,
        "max_replicas": settings.most,
    }
    if isinstance(scaling, GatewayAutoscaling):
        options["target_ongoing_requests"] = scaling.target_ongoing_requests
        options["upscale_delay_s"] = scaling.upscale_delay_seconds
        options["downscale_delay_s"] = scaling.downscale_delay_seconds
    elif scaling is not None:
        # The policy has waited already when it asks for another number.
        options |= {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    return {"autoscaling_config": options}


def serve_file(config: SpoolConfig) -> str:
    """The file for `serve deploy`, or a RayService's serveConfigV2, secrets and all."""
    text: str = yaml.safe_dump(serve_content(config), sort_keys=False)
    return text


def serve_content(config: SpoolConfig) -> dict[str, Any]:
    """What stands in that file.

    Numbers of replicas, and the rules that they follow, are not among the arguments: Serve changes the former in place,
    and replaces every replica when one of the latter changes. The policy is one of the latter, so it is there even if
    every number is fixed.
    """
    settings: dict[str, Scaled] = {GATEWAY: config.gateway}
    cells = config.groups.cell_numbers
    settings |= {workers_name(role, cell): config.group(role) for cell in cells for role in config.roles}
    rules = autoscaling_rules(config)
    deployments: list[dict[str, Any]] = [{"name": name, **replica_options(one)} for name, one in settings.items()]
    deployments += [
        {"name": scheduler_name(cell), "autoscaling_config": dict(_REPORTING), "user_config": rules} for cell in cells
    ]
    application: dict[str, Any] = {
        "name": config.ray.app_name,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"settings": config.without_replicas().plain()},
        "autoscaling_policy": {"policy_function": POLICY_PATH},
        "deployments": deployments,
    }
    return {"proxy_location": PROXIES, "applications": [application]}
