"""What drafting ahead brings, beside plain decoding and ordinary speculation. JSON on the last line.

    python -m bench.record ahead_laws -- python -m bench.draft_ahead laws
    python -m bench.record ahead_break_even -- python -m bench.draft_ahead break-even
    python -m bench.record ahead_paced -- python -m bench.draft_ahead paced
    python -m bench.record ahead_pair -- python -m bench.draft_ahead pair --prompts questions.jsonl
    python -m bench.record ahead_turnaround -- python -m bench.draft_ahead turnaround
    python -m bench.record ahead_ranks -- python -m bench.draft_ahead ranks --prompts questions.jsonl

`laws` and `break-even` take virtual time, of pairs whose steps cost what bench/draft_ahead/laws.py says. `paced` lets
worker processes sleep for as long, behind a real scheduler and gRPC. `pair` measures the demo pair, a core each.
`turnaround` takes apart what lies between a verdict and the next verification, in the scheduler's process.
`ranks` counts how often the demo target's token is the draft's second choice, its third, and so on: the laws use it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.draft_ahead.break_even import break_even
from bench.draft_ahead.laws import in_virtual_time
from bench.draft_ahead.paced import in_real_time
from bench.draft_ahead.pair import measured_pair
from bench.draft_ahead.ranks import counted_ranks
from bench.draft_ahead.turnaround import turnarounds

_CONSOLE = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    for name in ("laws", "break-even"):
        what.add_parser(name)
    paced = what.add_parser("paced")
    paced.add_argument("--tokens", type=int, default=1500, help="of each of a configuration's three streams")
    turnaround = what.add_parser("turnaround")
    turnaround.add_argument("--tokens", type=int, default=1500, help="of each of a way's two streams")
    pair, ranks = what.add_parser("pair"), what.add_parser("ranks")
    for one in (pair, ranks):
        one.add_argument("--prompts", type=Path, required=True, help="a JSON Lines file with `turns`, like SpecBench's")
        one.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    pair.add_argument("--count", type=int, default=9, help="prompts, the first one of which is for learning")
    pair.add_argument("--repeats", type=int, default=6, help="at least 2")
    ranks.add_argument("--count", type=int, default=40, help="prompts")
    arguments = parser.parse_args()
    say: Callable[[str], None] = _CONSOLE.print
    result: dict[str, Any] | Awaitable[dict[str, Any]]
    match arguments.what:
        case "laws":
            result = in_virtual_time(say)
        case "break-even":
            result = break_even(say)
        case "paced":
            result = asyncio.run(in_real_time(arguments.tokens, say))
        case "turnaround":
            result = asyncio.run(turnarounds(arguments.tokens, say))
        case "ranks":
            result = counted_ranks(arguments.prompts, arguments.count, arguments.tokens, say)
        case _:
            result = asyncio.run(
                measured_pair(arguments.prompts, arguments.count, arguments.tokens, arguments.repeats, say)
            )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
