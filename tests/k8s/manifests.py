"""The manifests as `kubectl kustomize` gives them, and the schemas that hold for them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
CELLS = ("cpu-demo", "one-gpu", "gpu", "gpu-autoscale")
"""Overlays with a cell; the others add to one."""
KUBERNETES = "1.32"
GROUPS = ("gateway", "target", "draft")

Manifest = dict[str, Any]


def overlay(name: str) -> Path:
    return K8S / "overlays" / name


@cache
def built(folder: Path) -> list[Manifest]:
    """All objects of an overlay."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here to run kustomize")
    ended = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.load_all(ended.stdout, Loader=yaml.CSafeLoader))


def only(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    (found,) = [one for one in manifests if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    return found


def cluster(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = only(manifests, "RayService")["spec"]["rayClusterConfig"]
    return spec


def worker_group(manifests: list[Manifest], name: str) -> Manifest:
    (found,) = [one for one in cluster(manifests)["workerGroupSpecs"] if one["groupName"] == name]
    return found


def pod_specs(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pods of a cell by group."""
    spec = cluster(manifests)
    groups = {one["groupName"]: one["template"]["spec"] for one in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **groups}


def labels_of_pods(manifests: list[Manifest]) -> Iterator[dict[str, str]]:
    """With those that KubeRay adds."""
    spec = cluster(manifests)
    head = spec["headGroupSpec"]["template"]["metadata"]["labels"]
    yield {**head, "ray.io/node-type": "head", "ray.io/group": "headgroup"}
    for one in spec["workerGroupSpecs"]:
        labels = one["template"]["metadata"]["labels"]
        yield {**labels, "ray.io/node-type": "worker", "ray.io/group": one["groupName"]}
    for one in manifests:
        if one["kind"] == "StatefulSet":
            yield one["spec"]["template"]["metadata"]["labels"]


def validate(manifest: Manifest) -> None:
    """Raises jsonschema.ValidationError for what the schema of its kind does not allow, unknown fields above all."""
    assert set(manifest["metadata"]) <= {"name", "namespace", "labels", "annotations"}
    if manifest["apiVersion"] == "ray.io/v1":
        _ray_service_schema().validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@cache
def _ray_service_schema() -> jsonschema.Draft202012Validator:
    text = (Path(__file__).parent / "schemas" / "rayservice_v1.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    _close(schema)
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return jsonschema.Draft202012Validator(schema)


def _close(schema: Any) -> None:
    """A Kubernetes server drops fields that a schema does not name; here they are refused."""
    if isinstance(schema, list):
        for one in schema:
            _close(one)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = schema.get("x-kubernetes-preserve-unknown-fields", False)
    for below in schema.values():
        _close(below)
