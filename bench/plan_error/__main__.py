"""What `spool plan` predicts, beside what is measured. JSON on the last line.

    python -m bench.record plan_error -- python -m bench.plan_error
    python -m bench.record plan_error_demo -- python -m bench.plan_error --workers demo --prompts questions.jsonl

Requests arrive at random at a real scheduler, over gRPC to worker processes; and the same requests in virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from bench.plan_error.demo import compared_demo
from bench.plan_error.paced import compared_paced
from deploy.progress import error_console, reporting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", choices=("paced", "demo"), default="paced", help="what computes")
    parser.add_argument("--requests", type=int, default=100, help="of each load; of the demo at least")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the demo's loads, where that is more requests")
    parser.add_argument("--prompts", type=Path, help="of the demo: JSON lines as for `spool generate`")
    asked = parser.parse_args()
    with reporting(error_console()) as reporter:
        if asked.workers == "paced":
            found = asyncio.run(compared_paced(asked.requests, reporter))
        else:
            found = asyncio.run(compared_demo(asked.prompts, asked.requests, asked.seconds, reporter))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
