"""The commands of `spool` with their options; each calls a function in a module of its own.

Options that are fields of the configuration are declared there; the groups `spool config` and `spool k8s` are
in config.py and deploy/kubernetes/command.py. Function bodies import what they need, so that `--help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spool.deploy.cli.command_options import DECODING, SERVING, takes_options
from spool.deploy.cli.config import Overrides, config_app, loaded
from spool.deploy.config.loading import GivenValue
from spool.deploy.config.models import Dtype, KvCacheDtype, Quantization
from spool.deploy.errors import UsageError
from spool.deploy.offline.settings import InputSettings, ReplaySettings, SamplingSettings, configured
from spool.scheduler.config import Policy
from spool.scheduler.messages import MAX_PRIORITY, MIN_PRIORITY

App = Annotated[str, typer.Option("--app", help="Name of the application (ray.app_name).")]


def add_commands(app: typer.Typer) -> None:
    """Adds all commands to the command line."""
    for name, command in (
        ("serve", serve_command),
        ("generate", generate_command),
        ("verify", verify_command),
        ("replay", replay_command),
        ("chat", chat_command),
        ("status", status_command),
        ("logs", logs_command),
        ("down", down_command),
    ):
        app.command(name)(command)
    models = typer.Typer(help="Models on this machine.")
    models.command("fetch")(fetch_command)
    app.add_typer(models, name="models")
    app.add_typer(config_app, name="config")


@takes_options(DECODING | {"policy": SERVING["policy"]})
def generate_command(
    given: list[GivenValue],
    sampling: SamplingSettings,
    inputs: InputSettings,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON lines file; answers that it has already are kept.")
    ] = None,
) -> int:
    """Answers prompts, from a JSON lines file or built-in ones. Run again with the same --output to go on.

    Sampling follows the options alone, not what the model's generation_config.json proposes.
    """
    config = configured(given)
    from spool.deploy.offline.generate import generate

    return generate(config, sampling, inputs, output)


@takes_options(DECODING)
def verify_command(
    given: list[GivenValue],
    sampling: SamplingSettings,
    inputs: InputSettings,
    policy: Annotated[
        list[Policy] | None,
        typer.Option(help="How verify batches are formed; repeat for several.", show_default="ragged"),
    ] = None,
) -> int:
    """Checks that speculation gives what plain decoding gives, token for token and logit for logit.

    Exit code 1 if it does not, or if nothing was drafted: the policy auto may find that drafts do not pay. Every run
    computes everything: it finds no prefixes of the runs before it.
    """
    config = configured(given, compares=True)
    from spool.deploy.offline.verify import verify

    return verify(config, sampling, inputs, policy or [Policy.RAGGED])


@takes_options()
def replay_command(settings: ReplaySettings) -> int:
    """Computes the output of receipts again, and compares it bit by bit.

    Exit code 1 if a receipt is damaged, or anything differs: the first place is named. The text of answers is compared
    with the tokens of their receipts.
    """
    from spool.deploy.offline.replay import replay_receipts

    return replay_receipts(settings)


def fetch_command(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="`demo`, folders, GGUF files, or hub ids of models.")
    ],
    dtype: Annotated[Dtype, typer.Option(help="dtype that the models are to have.")] = "auto",
    kv_cache_dtype: Annotated[KvCacheDtype, typer.Option(help="What their KV is to be kept in.")] = "auto",
    quantization: Annotated[Quantization, typer.Option(help="What is to become of their weights.")] = "auto",
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GIB", min=0, help="Memory of a GPU that all of them are to share.")
    ] = None,
) -> int:
    """Downloads and prepares models, so that later commands start at once, and says what memory they take."""
    from spool.deploy.models import fetch_models

    fetch_models(names, dtype, quantization, kv_cache_dtype, gpu_memory)
    return 0


@takes_options(SERVING)
def serve_command(
    given: list[GivenValue],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Configuration file.", show_default="./spool.yaml, if there is one"),
    ] = None,
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running and return.")] = False,
    no_ray: Annotated[
        bool, typer.Option("--no-ray", help="Serve with processes of this machine alone, without Ray.")
    ] = False,
) -> int:
    """Serves a model over OpenAI's HTTP API and gRPC, on a Ray of its own or on one that is running already.

    Options override the configuration file, which sets everything else. Without a model, the demo is served.
    """
    configuration = loaded(config, overrides, given)
    from spool.deploy.cli.serve import serve, serve_without_ray

    if not no_ray:
        return serve(configuration, detach)
    if detach:
        raise UsageError("--detach is given, must be left out with --no-ray: a service manager can do that")
    return serve_without_ray(configuration)


def status_command(
    app: App = "spool",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Shows replicas, workers, sequences and groups of the served application."""
    from spool.deploy.cli.status import status

    return status(app, json_output)


def chat_command(
    app: App = "spool",
    url: Annotated[str | None, typer.Option(help="Address of the server, as http://127.0.0.1:8000.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to talk to.", show_default="the server's")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key to send.", show_default="$SPOOL_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="System message, sent before the first question.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the server's")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens in an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    priority: Annotated[int | None, typer.Option(help="Lower goes first.", min=MIN_PRIORITY, max=MAX_PRIORITY)] = None,
    stats: Annotated[bool, typer.Option("--stats", help="After each answer, show speed and drafted tokens.")] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="Certificates (PEM) of the authority of the server's.", show_default="$SSL_CERT_FILE, or the system's"
        ),
    ] = None,
) -> int:
    """Talks to a running server in the terminal."""
    from spool.deploy.cli.chat import FALLBACK_URL, chat
    from spool.deploy.cli.status import find_served
    from spool.deploy.cluster.served_state import StateFolder

    if url is None:
        state = StateFolder()
        # A server of the default name may have been started elsewhere; one of another name must be known here.
        served = state.read(app) if app == "spool" else find_served(app, state)
        url = FALLBACK_URL if served is None else served.http_url
    options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "priority": priority}
    chosen = {name: value for name, value in options.items() if value is not None}
    return chat(url, model, api_key, system, chosen, stats=stats, ca_file=ca_file)


def logs_command(
    process: Annotated[
        str | None,
        typer.Argument(help="Beginning of a process's name: gateway, scheduler, target or draft.", show_default="all"),
    ] = None,
    app: App = "spool",
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Last lines of each log.", show_default="all")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as long as the application is served.")] = False,
) -> int:
    """Prints the logs of gateways, scheduler and workers on this machine."""
    from spool.deploy.cli.logs import logs

    return logs(app, process, tail, follow)


def down_command(app: App = "spool") -> int:
    """Stops what `spool serve` started, and nothing else."""
    from spool.deploy.cli.status import down

    return down(app)
