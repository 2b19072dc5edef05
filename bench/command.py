"""`spool bench offline`."""

from __future__ import annotations

import typer

from bench.offline.grid import BenchSettings
from deploy.cli.command_options import DECODING, takes_options
from deploy.config.loading import GivenValue
from deploy.offline.settings import SamplingSettings, configured

bench_app = typer.Typer(help="Measures speed.")

_OWN = ("batch_size", "draft_length", "max_running")
_SHARED = {name: paths for name, paths in DECODING.items() if name not in _OWN}
"""Options that mean the same as with `spool generate`."""


@bench_app.command("offline")
@takes_options(_SHARED)
def offline_command(given: list[GivenValue], settings: BenchSettings, sampling: SamplingSettings) -> int:
    """Decodes prompts with several policies, batch sizes and draft lengths in turn, and compares with plain decoding.

    Batches and memory are those of `spool generate`; every measurement computes everything.
    """
    from bench.offline.run import bench_offline

    return bench_offline(configured(given, compares=True), settings, sampling)
