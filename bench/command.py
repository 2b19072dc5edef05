"""`spool bench offline`."""

from __future__ import annotations

import typer

from bench.offline.options import BenchOfflineSettings
from deploy.cli.command_options import takes_settings

bench_app = typer.Typer(help="Measures speed.")


@bench_app.command("offline")
@takes_settings(BenchOfflineSettings)
def offline_command(settings: BenchOfflineSettings) -> int:
    """Decodes prompts with several policies, batch sizes and drafts in turn, and compares with plain decoding."""
    from bench.offline.run import bench_offline

    return bench_offline(settings)
