"""A Ray driver that answers questions about a cluster, one a line: `python -m tests.support.ray_driver ADDRESS`.

The lines are `actors`, `cells`, `metrics`, `deploy FILE` and `clear`; each is answered by a line of JSON with the
question's first word as its only field.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray._private.state import actors, state
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from spool.deploy.cluster.client import application_state, scheduler_statuses


def list_actors(_: str) -> list[dict[str, Any]]:
    places = {found["NodeID"]: sorted(found["Resources"]) for found in state.node_table()}
    return [
        {
            "name": actor["Name"],
            "state": actor["State"],
            "process_id": actor["Pid"],
            "node": actor["Address"]["NodeID"],
            "resources": [name for name in places.get(actor["Address"]["NodeID"], ()) if name.endswith("_gpu")],
        }
        for actor in actors().values()
    ]


def list_metrics(_: str) -> list[str]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]


def deploy(file: str) -> str:
    """As the dashboard does that `serve deploy` speaks to."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(Path(file).read_text()))
    serve.start(proxy_location=config.proxy_location)
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(config)
    return "taken"


def clear(_: str) -> str:
    """Ends Serve with all that it runs, so that the next suite can start it with other ports."""
    if _get_global_client(raise_if_no_controller_running=False) is not None:
        serve.shutdown()
    return "done"


QUESTIONS: dict[str, Callable[[str], Any]] = {
    "actors": list_actors,
    "cells": lambda _: scheduler_statuses("spool", application_state("spool")),
    "metrics": list_metrics,
    "deploy": deploy,
    "clear": clear,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init(address=sys.argv[1], log_to_driver=False)
    for line in sys.stdin:
        question, _, argument = line.strip().partition(" ")
        print(json.dumps({question: QUESTIONS[question](argument)}), file=answers, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
