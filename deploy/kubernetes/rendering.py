"""What follows from a `spool.yaml` in the manifests: a kustomize component of patches to the base's RayService."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from spool.deploy.config.loading import load_configuration
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import UsageError
from spool.deploy.kubernetes.pods import END_SECONDS, GATEWAY_GROUP, Pods, pods_of
from spool.deploy.ray_app.serve_options import serve_file

CONFIGURATION = "spool.yaml"
FOLDER = "rendered"

_SERVICE = "spool"
_HEADER = f"# Written by `spool k8s render` from {CONFIGURATION}; changes belong there.\n"
_PART_OF = "app.kubernetes.io/part-of"


def rendered_files(folder: Path) -> dict[str, str]:
    """The files of `folder`/rendered by name. Raises UsageError for what is no configuration for Kubernetes."""
    file = folder / CONFIGURATION
    if not file.is_file():
        raise UsageError(f"{file} is not there, must be the configuration of what {folder} installs")
    config = load_configuration(file)
    pods = pods_of(config)
    budgets = list(_budgets(pods))
    component: dict[str, Any] = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    files = {"rayservice.yaml": _text([_add(path, value) for path, value in _fields(config, pods)])}
    files["service.yaml"] = _text([_add(path, value) for path, value in _ports(config)])
    if budgets:
        component["resources"] = ["poddisruptionbudgets.yaml"]
        files["poddisruptionbudgets.yaml"] = _text(*budgets)
    component["patches"] = [
        {"path": "rayservice.yaml", "target": {"kind": "RayService", "name": _SERVICE}},
        {"path": "service.yaml", "target": {"kind": "Service", "name": _SERVICE}},
    ]
    files["kustomization.yaml"] = _text(component)
    return files


def write(folder: Path) -> Path:
    """Makes `folder`/rendered, which is returned, hold the rendered files; of earlier ones, it removes what it does not
    write any more. Raises UsageError, before anything is changed, where that would replace what it has not written."""
    files = rendered_files(folder)
    to = folder / FOLDER
    try:
        if to.is_symlink():
            raise UsageError(f"{to} is a link, must be a folder")
        to.mkdir(exist_ok=True)
        written = {path.name for path in to.iterdir() if _is_ours(path)}
        for name in files.keys() - written:
            if os.path.lexists(to / name):
                raise UsageError(f"{to / name} is not from `spool k8s render`, must be moved away")
        for name in written - files.keys():
            (to / name).unlink()
        for name, text in files.items():
            (to / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{to} cannot be written: {error}") from error
    return to


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_HEADER)) == _HEADER.encode()


def _fields(config: SpoolConfig, pods: Sequence[Pods]) -> Iterator[tuple[str, Any]]:
    """Fields of the RayService by path."""
    probe_scheme = "HTTPS" if config.auth.tls is not None else "HTTP"
    cluster = "/spec/rayClusterConfig"
    yield "/spec/serveConfigV2", serve_file(config)
    yield f"{cluster}/enableInTreeAutoscaling", any(one.most > one.fewest for one in pods)
    # When the whole cell goes, the head stays for as long as others drain.
    longest = max(one.grace_seconds for one in pods)
    head = f"{cluster}/headGroupSpec/template/spec"
    yield f"{head}/terminationGracePeriodSeconds", longest
    yield f"{head}/containers/0/lifecycle", _drain(longest - END_SECONDS)
    yield f"{head}/containers/0/ports/0/containerPort", config.gateway.port
    for number, one in enumerate(pods):
        yield from _group_fields(f"{cluster}/workerGroupSpecs/{number}", one)
    container = f"{cluster}/workerGroupSpecs/0/template/spec/containers/0"
    yield f"{container}/ports", _gateway_ports(config)
    yield f"{container}/readinessProbe/httpGet/scheme", probe_scheme


def _group_fields(group: str, pods: Pods) -> Iterator[tuple[str, Any]]:
    yield f"{group}/replicas", pods.replicas
    yield f"{group}/minReplicas", pods.fewest
    yield f"{group}/maxReplicas", pods.most
    # An autoscaler reads what a pod will offer from here while there is none.
    yield f"{group}/resources", {name: str(amount) for name, amount in pods.resources.items()}
    spec = f"{group}/template/spec"
    yield f"{spec}/terminationGracePeriodSeconds", pods.grace_seconds
    container = f"{spec}/containers/0"
    yield f"{container}/lifecycle", _drain(pods.notice_seconds)
    for kind in ("requests", "limits"):
        yield f"{container}/resources/{kind}/cpu", str(pods.cpus)
    if pods.gpus:
        yield f"{container}/resources/limits/nvidia.com~1gpu", str(pods.gpus)
    if pods.group != GATEWAY_GROUP:
        field, value = ("args", list(pods.weights)) if pods.weights else ("command", ["true"])
        yield f"{spec}/initContainers/0/{field}", value


def _drain(seconds: int) -> dict[str, Any]:
    """`ray start --block` in a shell does not hear SIGTERM, so this ends it as well."""
    command = ["/bin/bash", "-c", f"spool k8s drain --seconds {seconds}; ray stop"]
    return {"preStop": {"exec": {"command": command}}}


def _gateway_ports(config: SpoolConfig) -> list[dict[str, Any]]:
    ports = [{"name": "http", "containerPort": config.gateway.port}]
    if config.gateway.grpc_port is not None:
        ports.append({"name": "grpc", "containerPort": config.gateway.grpc_port})
    return ports


def _ports(config: SpoolConfig) -> Iterator[tuple[str, Any]]:
    """Of the Service in front of the gateways; proxies must know that gRPC without TLS is HTTP/2 in clear."""
    encrypted = config.auth.tls is not None
    ports: list[dict[str, Any]] = [{"name": "http", "port": config.gateway.port, "targetPort": "http"}]
    if config.gateway.grpc_port is not None:
        grpc: dict[str, Any] = {"name": "grpc", "port": config.gateway.grpc_port, "targetPort": "grpc"}
        ports.append(grpc if encrypted else grpc | {"appProtocol": "kubernetes.io/h2c"})
    yield "/spec/ports", ports


def _budgets(pods: Sequence[Pods]) -> Iterator[dict[str, Any]]:
    """Of a group with several pods all but one stay; one alone must go when its node does.

    A whole number, because Kubernetes knows no scale of a RayCluster of which it could take a part.
    """
    for one in pods:
        if one.fewest < 2:
            continue
        yield {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"spool-{one.group}"},
            "spec": {
                "minAvailable": one.fewest - 1,
                "selector": {"matchLabels": {_PART_OF: "spool", "ray.io/group": one.group}},
            },
        }


def _add(path: str, value: Any) -> dict[str, Any]:
    """JSON patch: sets the field, whether the base has it or not."""
    return {"op": "add", "path": path, "value": value}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def _text(*documents: Any) -> str:
    return _HEADER + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
