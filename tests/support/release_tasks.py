"""The processes of a cell, by whichever release Python finds under the name `spool`: `python release_tasks.py FOLDER`.

A configuration comes as JSON on standard input. The tasks of its processes go to standard output, as a JSON object by
the kind of process: each is what `python -m spool.deploy.processes` finds in its environment. FOLDER is the cell's.
"""

from __future__ import annotations

import json
import sys

from spool.deploy.config.loading import configuration_from
from spool.deploy.processes.task import Task
from spool.deploy.workers import cell_workers


def main() -> None:
    folder, config = sys.argv[1], configuration_from(json.load(sys.stdin))
    plain = config.plain()
    tasks = {"scheduler": Task("", folder, plain), "gateway": Task("", folder, plain)}
    for launch in cell_workers(config):
        role = launch.role.value
        tasks[role] = Task("", folder, plain, role=role, engine=dict(launch.settings))
    print(json.dumps({kind: json.loads(task.to_json()) for kind, task in tasks.items()}))


if __name__ == "__main__":
    main()
