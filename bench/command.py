"""`spool bench offline`."""

from __future__ import annotations

import typer

from bench.offline.options import SHARED, BenchSettings
from deploy.cli.command_options import takes_options
from deploy.config.loading import GivenValue
from deploy.offline.settings import SamplingSettings, configured

bench_app = typer.Typer(help="Measures speed.")


@bench_app.command("offline")
@takes_options(SHARED)
def offline_command(given: list[GivenValue], settings: BenchSettings, sampling: SamplingSettings) -> int:
    """Decodes prompts with several policies, batch sizes and draft lengths in turn, and compares with plain decoding.

    Batches and memory are those of `spool generate`; every measurement computes everything.
    """
    from bench.offline.run import bench_offline

    return bench_offline(configured(given, compares=True), settings, sampling)
