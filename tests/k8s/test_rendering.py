"""`spool k8s render`: what it writes, and what it does not take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spool.deploy.cli.command_line import run
from spool.deploy.config.loading import load_configuration
from spool.deploy.kubernetes.pods import pods_of
from tests.k8s.manifests import CELLS, K8S, built, cluster, only, overlay, validate, worker_group
from tests.support.command_line import spool_here as spool
from tests.support.tiny_models import save_tiny_pair

RIGHT = (K8S / "overlays" / "cpu-demo" / "spool.yaml").read_text(encoding="utf-8")


def rendered(folder: Path) -> dict[str, Any]:
    """Fields of the RayService that `rendered/` sets, by path."""
    operations = yaml.safe_load((folder / "rendered" / "rayservice.yaml").read_text())
    return {one["path"]: one["value"] for one in operations}


def with_configuration(folder: Path, *changes: tuple[str, Any]) -> Path:
    """A spool.yaml as the demo's with other values at dotted paths."""
    content = yaml.safe_load(RIGHT)
    for path, value in changes:
        *sections, field = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
    (folder / "spool.yaml").write_text(yaml.safe_dump(content))
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (folder / "rendered").iterdir()}


@pytest.mark.parametrize("name", CELLS)
def test_committed_manifests_are_what_is_rendered(name: str, tmp_path: Path) -> None:
    shutil.copytree(overlay(name), tmp_path / "mine")
    to = tmp_path / "mine" / "rendered"
    (to / "service.yaml").rename(to / "left.yaml")
    ended = spool("k8s", "render", tmp_path / "mine")
    assert (ended.code, ended.out.splitlines()[-1].endswith(f"kubectl apply -k {tmp_path / 'mine'}")) == (0, True)
    assert contents(tmp_path / "mine") == contents(overlay(name))


def test_every_configuration_is_tested() -> None:
    assert {file.parent.name for file in K8S.glob("overlays/*/spool.yaml")} == set(CELLS)


@pytest.mark.parametrize("name", CELLS)
def test_serve_is_told_what_the_same_file_gives_elsewhere(name: str) -> None:
    ended = spool("config", "render", overlay(name) / "spool.yaml")
    assert only(built(overlay(name)), "RayService")["spec"]["serveConfigV2"] == ended.out


def test_every_cell_has_pods_for_its_workers_and_room_for_its_scheduler(tmp_path: Path) -> None:
    changes = (("groups.target.replicas", 2), ("gateway.replicas", 2), ("scheduler.num_cpus", 3))
    one, three = (
        pods_of(load_configuration(with_configuration(tmp_path, *changes, ("groups.cells", cells)) / "spool.yaml", []))
        for cells in (1, 3)
    )
    assert [pods.replicas for pods in one] == [2, 2, 1]
    assert [(pods.replicas, pods.fewest, pods.most) for pods in three] == [(2, 2, 2), (6, 6, 6), (3, 3, 3)]
    # Two pods of gateways, three schedulers: one of the pods holds two.
    assert three[0].cpus - one[0].cpus == 3


def test_numbers_of_replicas_change_nothing_that_would_make_another_cluster(tmp_path: Path) -> None:
    """KubeRay leaves these fields out when it compares clusters; Serve changes its own in place."""
    fields = []
    for count in (1, 3):
        folder = tmp_path / str(count)
        folder.mkdir()
        changed = [(f"{name}.replicas", count) for name in ("groups.target", "groups.draft", "gateway")]
        assert run(["k8s", "render", str(with_configuration(folder, *changed))]) == 0
        fields.append(rendered(folder))
    one, three = fields
    different = {path for path in one if one[path] != three[path]}
    group = "/spec/rayClusterConfig/workerGroupSpecs"
    scaled = {f"{group}/{n}/{name}" for n in range(3) for name in ("replicas", "minReplicas", "maxReplicas")}
    assert different == {"/spec/serveConfigV2"} | scaled
    (before,) = yaml.safe_load(one["/spec/serveConfigV2"])["applications"]
    (after,) = yaml.safe_load(three["/spec/serveConfigV2"])["applications"]
    scales = [deployment["autoscaling_config"] for deployment in after.pop("deployments")]
    assert [(one["min_replicas"], one["max_replicas"]) for one in scales] == [(3, 3)] * 3 + [(1, 1)]
    del before["deployments"]
    assert before == after


def cell(tmp_path: Path, *changes: tuple[str, Any]) -> list[dict[str, Any]]:
    """The demo's overlay with another configuration, rendered and built."""
    shutil.copytree(K8S / "base", tmp_path / "base")
    folder = tmp_path / "overlays" / "cpu-demo"
    shutil.copytree(overlay("cpu-demo"), folder)
    with_configuration(folder, *changes)
    assert run(["k8s", "render", str(folder)]) == 0
    manifests = built(folder)
    for manifest in manifests:
        validate(manifest)
    return manifests


def test_tls_and_ports_reach_probe_and_service(tmp_path: Path) -> None:
    tls = {"certificate": "/etc/spool/tls/tls.crt", "key": "/etc/spool/tls/tls.key"}
    manifests = cell(tmp_path, ("auth.tls", tls), ("gateway.port", 8443), ("gateway.grpc_port", 9443))
    service = only(manifests, "Service", "spool")["spec"]["ports"]
    assert [(one["name"], one["port"]) for one in service] == [("http", 8443), ("grpc", 9443)]
    assert not any("appProtocol" in one for one in service)
    container = worker_group(manifests, "gateway")["template"]["spec"]["containers"][0]
    assert [one["containerPort"] for one in container["ports"]] == [8443, 9443]
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    head = cluster(manifests)["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": "serve", "containerPort": 8443} in head


def test_a_target_over_four_gpus_has_pods_with_four(tmp_path: Path) -> None:
    models = {"target": "meta-llama/Llama-3.3-70B-Instruct", "draft": "meta-llama/Llama-3.2-1B-Instruct"}
    gpus = [("groups.target.num_gpus", 4), ("groups.draft.num_gpus", 1)]
    manifests = cell(tmp_path, ("models", models), ("engine", {"tensor_parallel_size": 4}), *gpus)
    pods = [worker_group(manifests, name)["template"]["spec"] for name in ("target", "draft")]
    assert [one["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for one in pods] == ["4", "1"]
    assert [one["initContainers"][0]["args"] for one in pods] == [[models["target"]], [models["draft"]]]


@pytest.mark.parametrize(
    ("field", "value", "replicas"), [("draft", "none", 0), ("draft", "ngram", 0), ("draft_in", "targets", 0)]
)
def test_groups_without_a_draft_model_fetch_nothing(tmp_path: Path, field: str, value: str, replicas: int) -> None:
    manifests = cell(tmp_path, (f"models.{field}", value), ("gateway.grpc_port", None))
    group = worker_group(manifests, "draft")
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (replicas,) * 3
    assert group["template"]["spec"]["initContainers"][0]["command"] == ["true"]
    target = worker_group(manifests, "target")["template"]["spec"]["initContainers"][0]
    assert target["args"] == ["demo"]
    assert [one["name"] for one in only(manifests, "Service", "spool")["spec"]["ports"]] == ["http"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("gateway.host", "127.0.0.1")], "gateway.host is '127.0.0.1', must be 0.0.0.0 or :: to be reached from"),
        ([("ray.address", "auto")], "ray.address is 'auto', must be unset"),
        ([("auth.api_keys", ["k"])], "auth.api_keys is given, must be unset: whoever may read manifests would read it"),
        (
            [("internal", {"token": "a-token-of-some-length"})],
            "internal.token is given, must be unset: whoever may read manifests would read it",
        ),
        ([("internal", {})], "internal names neither a token nor TLS"),
        ([("scheduler.resources", {})], "scheduler.resources is empty, must reserve a resource of its own"),
        (
            [("groups.draft.resources", {"spool_target": 1})],
            "groups.draft.resources.spool_target is reserved by groups.target too, must be another",
        ),
        ([("groups.draft.resources", {"a": 0.5})], "groups.draft.resources.a is 0.5, must be whole"),
        ([("groups.target.num_cpus", 0.5)], "groups.target.num_cpus is 0.5, must be at least 1"),
        ([("models.device", "auto")], "groups.target.num_gpus is unset, must be said unless models.device is cpu"),
        ([("gateway.hots", "::")], "gateway.hots is no field of Spool; did you mean gateway.host?"),
    ],
)
def test_configurations_for_elsewhere_are_refused(tmp_path: Path, changes: list[tuple[str, Any]], message: str) -> None:
    ended = spool("k8s", "render", with_configuration(tmp_path, *changes))
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.startswith("spool: ")
    assert not (tmp_path / "rendered").exists()


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    ended = spool("k8s", "render", tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert f"{tmp_path}/spool.yaml is not there" in ended.err


def test_only_what_was_rendered_before_is_replaced(tmp_path: Path) -> None:
    folder, to = with_configuration(tmp_path), tmp_path / "rendered"
    (to / "mine").mkdir(parents=True)
    (to / "notes.yaml").write_text("{}")
    assert spool("k8s", "render", folder).code == 0
    assert {"mine", "notes.yaml", "service.yaml"} < {path.name for path in to.iterdir()}
    (tmp_path / "elsewhere").write_text("{}")
    service = to / "service.yaml"
    service.unlink()
    makes: list[Callable[[], object]] = [
        service.mkdir,
        lambda: service.symlink_to(tmp_path / "elsewhere"),
        lambda: service.write_text("{}"),
    ]
    for number, make in enumerate(makes):
        make()
        ended = spool("k8s", "render", folder)
        assert ended.code == 2
        assert ended.err == f"spool: {service} is not from `spool k8s render`, must be moved away\n"
        service.rename(to / f"moved-{number}")
    assert (tmp_path / "elsewhere").read_text() == "{}"


def test_files_behind_a_link_stay(tmp_path: Path) -> None:
    folder, other = with_configuration(tmp_path), tmp_path / "other"
    other.mkdir()
    (other / "notes.yaml").write_text("{}")
    (folder / "rendered").symlink_to(other)
    ended = spool("k8s", "render", folder)
    assert (ended.code, ended.err) == (2, f"spool: {folder}/rendered is a link, must be a folder\n")
    assert [path.name for path in other.iterdir()] == ["notes.yaml"]
    (folder / "rendered").unlink()
    (folder / "rendered").write_text("")
    ended = spool("k8s", "render", folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1)


def test_pods_find_models_that_are_there(tmp_path: Path) -> None:
    """The init container fetches them; without any named, the command says what it wants."""
    environment = {"SPOOL_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
    models = save_tiny_pair("llama", tmp_path)
    ended = spool("models", "fetch", "--", *models, environment=environment)
    assert (ended.code, all(str(model) in ended.err for model in models)) == (0, True), ended.err
    assert spool("models", "fetch", "--", tmp_path / "nothing", environment=environment).code == 2
