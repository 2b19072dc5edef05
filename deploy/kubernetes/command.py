"""`spool k8s`: manifests, and the commands that pods run in addition to Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import RunError, UsageError

k8s_app = typer.Typer(help="Kubernetes: manifests from a configuration, and what their pods run.")


@k8s_app.command("render")
def render_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Overlays, each with a spool.yaml.", show_default=False)
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 where a file is not what it should be.")
    ] = False,
) -> int:
    """Writes what follows from each FOLDER/spool.yaml to FOLDER/rendered, for its kustomization.yaml to take in."""
    from deploy.kubernetes.rendering import FOLDER, differences, write

    if not check:
        for folder in folders:
            write(folder)
            print(f"{folder / FOLDER}: written")
        return 0
    different = [name for folder in folders for name in differences(folder)]
    for name in different:
        print(f"{name}: differs from what its spool.yaml gives (`spool k8s render` writes it)")
    return 1 if different else 0


@k8s_app.command("fetch")
def fetch_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="As in models.target.", show_default=False)
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(min=1, help="Give up after this many seconds without progress.")
    ] = 300.0,
) -> int:
    """Makes models ready before Ray starts, saying how far it is. Exit code 1 where one cannot be had or is stuck."""
    from huggingface_hub.constants import HF_HOME

    from deploy.kubernetes.fetching import Watch, fetch_watched
    from deploy.models import fetch_models
    from engine.models.source import cache_folder

    watch = Watch([Path(HF_HOME), cache_folder()], stall_seconds)
    try:
        fetch_watched(names or [], fetch_models, watch, _tell)
    except RunError as error:
        _tell(str(error))
        # A download that hangs in a thread would hold up the end of the process.
        os._exit(1)
    return 0


@k8s_app.command("drain")
def drain_command(
    seconds: Annotated[float, typer.Option(min=1, help="Time until the node is lost.")],
    node: Annotated[str | None, typer.Option(help="Ray's id of a node.", show_default="the one this runs on")] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray's, as host:port.", show_default="$RAY_ADDRESS, else this machine's")
    ] = None,
) -> int:
    """Tells Ray that a node is about to go, and waits until no replica is left on it."""
    from ray._private.services import canonicalize_bootstrap_address

    from deploy.kubernetes.draining import drain_node

    found = canonicalize_bootstrap_address(address)
    if found is None:
        raise UsageError("--address is unset, and no Ray runs here")
    drain_node(found, node, seconds, _tell)
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
