"""What `kubectl apply -k` would send, against the schemas of Kubernetes and KubeRay, and against itself."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spool.deploy.cluster.local_ray import own_ray_environment
from spool.deploy.cluster.served_state import STATE_VARIABLE, StateFolder
from tests.k8s.manifests import (
    CELLS,
    GROUPS,
    K8S,
    ROOT,
    Manifest,
    built,
    cluster,
    labels_of_pods,
    only,
    overlay,
    pod_specs,
    validate,
    worker_group,
)

# Made by hand before anything else, as k8s/README.md says; the values say which keys are used.
SECRETS = {
    "spool-keys": {"internal-token", "api-keys", "metrics-key", "hub-token"},
    "spool-redis": {"password"},
    "spool-tls": set(),
    "spool-internal-tls": set(),
}


@pytest.fixture(params=CELLS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return built(overlay(request.param))


def test_every_object_is_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        validate(manifest)
    assert {"RayService", "Service", "NetworkPolicy", "ConfigMap", "ServiceAccount"} <= {
        one["kind"] for one in manifests
    }


def test_nothing_names_what_is_not_there(manifests: list[Manifest]) -> None:
    """ConfigMaps, accounts, Secrets and their keys, ports, volumes, and the pods that others select."""
    maps = {one["metadata"]["name"] for one in manifests if one["kind"] == "ConfigMap"}
    accounts = {one["metadata"]["name"] for one in manifests if one["kind"] == "ServiceAccount"}
    assert {one["metadata"]["namespace"] for one in manifests} == {"spool"}
    for group, spec in pod_specs(manifests).items():
        assert spec.get("serviceAccountName", "spool") in accounts
        volumes = {one["name"]: one for one in spec["volumes"]}
        for volume in volumes.values():
            assert volume.get("configMap", {"name": "spool-configuration"})["name"] in maps
            assert volume.get("secret", {"secretName": "spool-tls"})["secretName"] in SECRETS
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {one["configMapRef"]["name"] for one in container["envFrom"]} <= maps
            assert {one["name"] for one in container["volumeMounts"]} <= set(volumes)
            for variable in container["env"]:
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                assert reference is None or reference["key"] in SECRETS[reference["name"]]
        ports = {one["name"] for one in spec["containers"][0].get("ports", [])}
        probe = spec["containers"][0]["readinessProbe"]["httpGet"]["port"]
        assert probe in {*ports, 52365}, group
    names = {one["name"] for one in pod_specs(manifests)["gateway"]["containers"][0]["ports"]}
    assert {one["targetPort"] for one in only(manifests, "Service", "spool")["spec"]["ports"]} == names
    for manifest in manifests:
        for labels in selectors(manifest):
            assert any(labels.items() <= one.items() for one in labels_of_pods(manifests)), (manifest, labels)


def selectors(manifest: Manifest) -> Iterator[dict[str, str]]:
    """Labels of pods of this cell that an object looks for."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        yield spec["selector"]
    elif manifest["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
    elif manifest["kind"] == "PodDisruptionBudget":
        yield spec["selector"]["matchLabels"]


def test_pods_have_what_their_replicas_reserve(manifests: list[Manifest]) -> None:
    """Serve's configuration against the groups: each replica fits a pod of its group, and no other group's."""
    application = yaml.safe_load(only(manifests, "RayService")["spec"]["serveConfigV2"])["applications"][0]
    settings = application["args"]["settings"]
    groups = settings["groups"]
    placed = {"gateway": [settings["gateway"], settings["scheduler"]], **{name: [one] for name, one in groups.items()}}
    without = [name for name in GROUPS if name not in placed]
    assert [worker_group(manifests, name)["maxReplicas"] for name in without] == [0] * len(without)
    for group in placed:
        pods = worker_group(manifests, group)
        resources = pods["template"]["spec"]["containers"][0]["resources"]
        assert sum(one["num_cpus"] for one in placed[group]) <= int(resources["limits"]["cpu"])
        assert resources["requests"]["cpu"] == resources["limits"]["cpu"]
        gpus = sum(one.get("num_gpus", 0) for one in placed[group])
        assert gpus == int(resources["limits"].get("nvidia.com/gpu", 0))
        reserved = {name: str(int(count)) for one in placed[group] for name, count in one["resources"].items()}
        assert pods["resources"] == reserved
        others = [one["resources"] for one in cluster(manifests)["workerGroupSpecs"] if one is not pods]
        assert all(set(reserved).isdisjoint(other) for other in others)
    # Nothing is placed on the head.
    assert cluster(manifests)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_pods_have_longer_than_their_replicas_to_end(manifests: list[Manifest]) -> None:
    application = yaml.safe_load(only(manifests, "RayService")["spec"]["serveConfigV2"])["applications"][0]
    settings = application["args"]["settings"]
    drain = {name: settings["groups"].get(name, {}).get("drain_seconds", 60) for name in ("target", "draft")}
    drain["gateway"] = settings["gateway"].get("drain_seconds", 30)
    for group in GROUPS:
        spec = worker_group(manifests, group)["template"]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        notice = int(command.split("--seconds ")[1].split(";")[0])
        assert drain[group] < notice < spec["terminationGracePeriodSeconds"]
    head = pod_specs(manifests)["head"]["terminationGracePeriodSeconds"]
    assert head == max(pod_specs(manifests)[group]["terminationGracePeriodSeconds"] for group in GROUPS)


def test_only_the_cell_reaches_workers_and_scheduler(manifests: list[Manifest]) -> None:
    policies = [one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"]
    pods = {"app.kubernetes.io/part-of": "spool"}

    def open_to(labels: dict[str, str]) -> list[dict[str, Any]]:
        chosen = [one for one in policies if one["podSelector"]["matchLabels"].items() <= labels.items()]
        return [rule for one in chosen if "Ingress" in one["policyTypes"] for rule in one["ingress"]]

    cell = {"from": [{"podSelector": {"matchLabels": pods}}]}
    for group in ("target", "draft"):
        assert open_to({**pods, "ray.io/group": group, "ray.io/node-type": "worker"}) == [cell]
    gateway = open_to({**pods, "ray.io/group": "gateway", "ray.io/node-type": "worker"})
    assert gateway == [cell, {"ports": [{"port": "http"}, {"port": "grpc"}]}]
    head = open_to({**pods, "ray.io/group": "headgroup", "ray.io/node-type": "head"})
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    assert head == [cell, {"from": [operator], "ports": [{"port": "dashboard"}]}]


def test_pods_reach_the_cell_names_and_https_alone(manifests: list[Manifest]) -> None:
    """Ray's head also its Redis, and Kubernetes where it scales."""
    policies = [one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"]
    dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    common = [
        {"to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "spool"}}}]},
        {"ports": [*dns, {"port": 443, "protocol": "TCP"}]},
    ]
    redis = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "spool-redis"}}}
    of_head = [{"to": [redis], "ports": [{"port": "redis"}]}, {"ports": [{"port": 6443}]}]
    scales = cluster(manifests)["enableInTreeAutoscaling"]
    for labels in labels_of_pods(manifests):
        chosen = [one for one in policies if one["podSelector"]["matchLabels"].items() <= labels.items()]
        rules = [one["egress"] for one in chosen if "Egress" in one["policyTypes"]]
        assert rules, labels
        if labels.get("ray.io/node-type") == "head" and scales:
            assert sorted(rules, key=str) == sorted([common, of_head], key=str)
        elif labels.get("app.kubernetes.io/name") == "spool-redis":
            assert rules == [[]]
        else:
            assert rules == [common]


def test_only_gateways_have_the_keys_of_clients(manifests: list[Manifest]) -> None:
    for group, spec in pod_specs(manifests).items():
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            references = [one.get("valueFrom", {}).get("secretKeyRef", {}).get("key") for one in container["env"]]
            known = {"api-keys", "metrics-key"} & set(references)
            assert known == ({"api-keys", "metrics-key"} if group == "gateway" else set()), group


def test_pods_run_ray_as_spool_serve_does(
    manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    wanted = own_ray_environment(StateFolder())
    # Of a Ray on one machine alone; KubeRay makes the token.
    for own in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        del wanted[own]
    environment = only(manifests, "ConfigMap", "spool-environment")["data"]
    assert wanted.items() <= environment.items()
    assert cluster(manifests)["authOptions"] == {"mode": "token"}
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]=={cluster(manifests)['rayVersion']}" in dependencies


def test_pods_meet_the_restricted_profile(manifests: list[Manifest]) -> None:
    """Kubernetes' Pod Security Standard `restricted`, and a root file system that nobody writes to."""
    for spec in every_pod(manifests):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert all("hostPort" not in port for port in container.get("ports", []))


def test_pods_say_what_they_need_and_whether_they_are_well(manifests: list[Manifest]) -> None:
    for spec in every_pod(manifests):
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            resources = container["resources"]
            assert set(resources["requests"]) >= {"cpu", "memory"}
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
        for container in spec["containers"]:
            assert "readinessProbe" in container
    for spec in pod_specs(manifests).values():
        assert "livenessProbe" in spec["containers"][0]


def every_pod(manifests: list[Manifest]) -> list[Manifest]:
    """Of the cell, and of what stands beside it."""
    others = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "StatefulSet"]
    return [*pod_specs(manifests).values(), *({"volumes": [], **spec} for spec in others)]


def test_the_autoscaler_has_an_account_of_its_own() -> None:
    """That of the other pods may not speak to Kubernetes, which the autoscaler beside the head must."""
    manifests = built(overlay("gpu-autoscale"))
    assert cluster(manifests)["enableInTreeAutoscaling"] is True
    assert "serviceAccountName" not in pod_specs(manifests)["head"]


def test_an_overlay_of_ones_own_says_which_nodes_have_the_gpus(tmp_path: Path) -> None:
    """As k8s/README.md has users make one: a copy, in which alone they change the labels."""
    shutil.copytree(K8S, tmp_path / "k8s")
    folder = shutil.copytree(overlay("gpu"), tmp_path / "k8s" / "overlays" / "mine")
    nodes = folder / "nodes" / "kustomization.yaml"
    nodes.write_text(nodes.read_text(encoding="utf-8").replace("NVIDIA-H100-PCIe", "NVIDIA-B200"), encoding="utf-8")
    nodes_of = {group: str(spec.get("affinity")) for group, spec in pod_specs(built(folder)).items()}
    assert "NVIDIA-B200" in nodes_of["target"]
    assert "NVIDIA-L4" in nodes_of["draft"]
    assert nodes_of["head"] == nodes_of["gateway"] == "None"


@pytest.mark.parametrize("component", ["weights-on-volume", "weights-from-object-store"])
@pytest.mark.parametrize("name", CELLS)
def test_weights_can_come_from_elsewhere(name: str, component: str, tmp_path: Path) -> None:
    """As k8s/README.md has users add them: a folder beside the overlays."""
    folder = tmp_path / "k8s" / "overlays" / "mine"
    shutil.copytree(K8S, tmp_path / "k8s")
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(
        f"resources: [../{name}]\ncomponents: [../../components/{component}]\n", encoding="utf-8"
    )
    manifests = built(folder)
    for manifest in manifests:
        validate(manifest)
    for group in GROUPS:
        spec = pod_specs(manifests)[group]
        (models,) = [one for one in spec["volumes"] if one["name"] == "models"]
        copies = [one["name"] for one in spec.get("initContainers", []) if "rclone" in one["image"]]
        if component == "weights-on-volume":
            assert models["persistentVolumeClaim"] == {"claimName": "spool-models", "readOnly": True}
        else:
            assert copies == ["tokenizer" if group == "gateway" else "copy"]
            # Before `spool models fetch` looks whether they are there.
            assert spec["initContainers"][0]["name"] == copies[0]
