"""Commands of measurement: `spool bench offline`, `spool bench serve` and `spool bench profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.offline.options import BenchOfflineSettings
from bench.serving.options import BenchServeSettings
from deploy.cli.command_options import takes_settings
from deploy.cli.field_options import takes_fields
from deploy.cli.shared_options import ConfigFile, Overrides, chosen_file
from deploy.config.loading import GivenValue, load_configuration

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


@bench_app.command("profile")
@takes_fields
def profile_command(
    given: list[GivenValue],
    config: ConfigFile = None,
    overrides: Overrides = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines as for `spool generate`.", show_default="a few built-in ones"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompts.")] = 512,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Measures what steps of a target and a draft cost on this machine, and prints it for a plan file.

    The options are those of `spool serve`. One target worker and one draft worker are started, and a scheduler brings
    them through loads of different sizes.
    """
    from bench.profiling.command import bench_profile

    configuration = load_configuration(chosen_file(config), overrides or [], given)
    return bench_profile(configuration, prompts, prompt_tokens, json_output)
