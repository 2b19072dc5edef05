"""`spool k8s`: manifests, and the commands that pods run in addition to Ray."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from spool.deploy.errors import UsageError

k8s_app = typer.Typer(help="Kubernetes: manifests from a configuration, and what their pods run.")


@k8s_app.command("render")
def render_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Overlays, each with a spool.yaml.", show_default=False)
    ],
) -> None:
    """Writes what follows from each FOLDER/spool.yaml to FOLDER/rendered, for its kustomization.yaml to take in."""
    from spool.deploy.kubernetes.rendering import write

    for folder in folders:
        print(f"{write(folder)} is written. Next: kubectl apply -k {shlex.quote(str(folder))}")


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

    from spool.deploy.kubernetes.draining import drain_node

    found = canonicalize_bootstrap_address(address)
    if found is None:
        raise UsageError("--address is unset, and no Ray runs here")
    drain_node(found, node, seconds, lambda line: print(line, file=sys.stderr, flush=True))
    return 0
