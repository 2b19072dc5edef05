"""`python -m bench.offline`."""

from __future__ import annotations

import sys

import typer

from bench.offline.grid import BenchSettings
from bench.offline.run import bench_offline
from spool.deploy.cli.command_line import run
from spool.deploy.cli.command_options import DECODING, takes_options
from spool.deploy.config.loading import GivenValue
from spool.deploy.offline.settings import SamplingSettings, configured

app = typer.Typer(rich_markup_mode=None)

_OWN = ("batch_size", "draft_length", "max_running")
_SHARED = {name: paths for name, paths in DECODING.items() if name not in _OWN}
"""Options that mean the same as with `spool generate`."""


@app.command()
@takes_options(_SHARED)
def offline(given: list[GivenValue], settings: BenchSettings, sampling: SamplingSettings) -> int:
    """Decodes prompts with several policies, batch sizes and draft lengths in turn, and compares with plain decoding.

    Batches and memory are those of `spool generate`; every measurement computes everything, unless its prompts are to
    have been seen before.
    """
    return bench_offline(configured(given, compares=not settings.seen_before), settings, sampling)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], app, "python -m bench.offline"))
