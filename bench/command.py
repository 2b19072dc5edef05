"""Commands of measurement: `spool bench offline` and `spool bench serve`."""

from __future__ import annotations

import typer

from bench.offline.options import BenchOfflineSettings
from bench.serving.options import BenchServeSettings
from deploy.cli.command_options import takes_settings

bench_app = typer.Typer(help="Measures speed.")


@bench_app.command("offline")
@takes_settings(BenchOfflineSettings)
def offline_command(settings: BenchOfflineSettings) -> int:
    """Decodes prompts with several policies, batch sizes and drafts in turns, and compares with plain decoding."""
    from bench.offline.run import bench_offline

    return bench_offline(settings)


@bench_app.command("serve")
@takes_settings(BenchServeSettings)
def serve_command(settings: BenchServeSettings) -> int:
    """Puts a running server under load: requests arrive at random, whether or not it keeps up with them."""
    from bench.serving.run import bench_serve

    return bench_serve(settings)
