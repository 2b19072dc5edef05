"""`spool plan`: which fleet a traffic needs."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.planning.fleets import Search, System
from deploy.planning.plan_file import read_plan_file
from deploy.planning.report import advice, table, to_json
from deploy.progress import error_console, reporting


def plan_fleets(file: Path, json_output: bool) -> int:
    """Prints the cheapest fleet of each system. Exit code 1 if none keeps the service level.

    Raises `UsageError` for a file or a trace that is not right.
    """
    plan = read_plan_file(file)
    requests = plan.traffic.read()
    found = {}
    with reporting(error_console()) as reporter:
        search = Search(plan, requests, lambda tried: reporter.stage("plan", tried, None))
        for system in System:
            found[system] = search.cheapest(system)
        if not json_output:
            reporter.show(table(found))
            reporter.show(advice(found, plan))
    if json_output:
        print(json.dumps(to_json(plan, found)), flush=True)
    return 0 if any(found.values()) else 1
