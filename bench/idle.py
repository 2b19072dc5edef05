"""What a server takes when nobody asks for anything: share of a core and resident memory, by process.

    python -m bench.idle --output bench/results/idle.json

The demo without Ray, the demo on Ray, and as many deployments that do nothing on a Ray with the same settings, one
after the other. CPU time of processes that end meanwhile is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.record import write_result
from bench.served import serving
from spool.deploy.cluster.client import connected
from spool.deploy.cluster.local_ray import LocalRay
from spool.deploy.cluster.served_state import STATE_VARIABLE, StateFolder
from spool.deploy.progress import say

_SETTLE_SECONDS = 20.0
"""After the start, during which caches fill and first checks are made."""
_DEPLOYMENTS = 3
"""As many as Spool has without draft workers: scheduler, target and gateway."""


@contextmanager
def empty_application(folder: Path) -> Iterator[psutil.Process]:
    """Deployments that do nothing, on a Ray as Spool starts one."""
    os.environ[STATE_VARIABLE] = str(folder)
    state = StateFolder()
    ray = LocalRay("empty", state)
    try:
        ray.wait_until_up()
        with connected(ray.address, state):
            from ray import serve

            empty = serve.deployment(type("Empty", (), {}), ray_actor_options={"num_cpus": 0})
            for number in range(_DEPLOYMENTS):
                serve.run(empty.bind(), name=f"empty-{number}", route_prefix=None)
            yield psutil.Process(ray.process_id)
    finally:
        ray.stop()


def watched(root: psutil.Process, seconds: float) -> dict[str, Any]:
    """Of a process and all that it has started."""
    time.sleep(_SETTLE_SECONDS)
    before, began = _seconds(root), time.monotonic()
    time.sleep(seconds)
    after, elapsed = _seconds(root), time.monotonic() - began
    shares: defaultdict[str, float] = defaultdict(float)
    resident: defaultdict[str, float] = defaultdict(float)
    for process, used in after.items():
        name = _name(process)
        shares[name] += (used - before.get(process, used)) / elapsed
        resident[name] += process.memory_info().rss / 1e6
    return {
        "share_of_a_core": sum(shares.values()),
        "resident_megabytes": sum(resident.values()),
        "by_process": {
            name: {"share_of_a_core": share, "resident_megabytes": resident[name]}
            for name, share in sorted(shares.items(), key=lambda pair: -pair[1])
        },
    }


def _seconds(root: psutil.Process) -> dict[psutil.Process, float]:
    found = {}
    for process in [root, *root.children(recursive=True)]:
        times = process.cpu_times()
        found[process] = times.user + times.system
    return found


def _name(process: psutil.Process) -> str:
    """Short, and without numbers that change from one start to another."""
    words = process.cmdline()
    if words[0].startswith("ray::"):
        return words[0].split("#")[0].strip()
    if "-m" in words:
        return " ".join(word for word in words[words.index("-m") + 1 :] if not re.search(r"[/\[{]", word))
    scripts = [Path(word).name for word in words[:4] if word.endswith(".py")]
    return (scripts or [Path(words[0]).name])[0]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--output", type=Path, default=Path("idle.json"))
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {}
    for name, without_ray in (("without Ray", True), ("on Ray", False)):
        with serving({}, without_ray, say) as served:
            result[name] = watched(served.process, arguments.seconds)
        say(f"{name}: {json.dumps(result[name], indent=2)}")
    with tempfile.TemporaryDirectory(prefix="idle-") as folder, empty_application(Path(folder)) as process:
        result["empty Serve application"] = watched(process, arguments.seconds)
    say(f"empty: {json.dumps(result['empty Serve application'], indent=2)}")
    write_result(arguments.output, shlex.join(["python", "-m", "bench.idle", *argv]), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
