"""The image, built from a base made here and run as the manifests say: no root, nothing to write to but the volumes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from spool.client.v1 import generation_pb2, generation_pb2_grpc
from tests.k8s.manifests import K8S, ROOT
from tests.support.ports import free_ports
from tests.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(1800)]

BASE, IMAGE = "localhost/spool-base", "localhost/spool-under-test"
PROGRAMS = ("podman", "runc", "debootstrap")
# runc refuses a container whose limits are above those of a machine like this.
FILES, PROCESSES = "--ulimit=nofile=1024:4096", "--ulimit=nproc=4096:4096"
MODEL = "tiny"


def podman(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *map(str, arguments)], capture_output=True, text=True, check=False)


def pod() -> dict[str, Any]:
    """Of a target, in the base that all overlays share."""
    service = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    (template,) = [one["template"] for one in service["workerGroupSpecs"] if one["groupName"] == "target"]
    spec: dict[str, Any] = template["spec"]
    return spec


def environment() -> dict[str, str]:
    data: dict[str, str] = yaml.safe_load((K8S / "base" / "environment.yaml").read_text())["data"]
    return data


def make_base(folder: Path) -> None:
    """Debian with a C compiler and, as in the published image, the user `ray` with a Python of its own on the path."""
    root = folder / "root"
    packages = "python3,python3-venv,ca-certificates,gcc,libc6-dev"
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root], check=True)
    for command in (
        ["useradd", "--uid", "1000", "--gid", "100", "--create-home", "ray"],
        ["su", "ray", "-c", "python3 -m venv /home/ray/python"],
    ):
        subprocess.run(["chroot", root, *command], check=True)
    archive = folder / "root.tar"
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    path = "PATH=/home/ray/python/bin:/usr/local/bin:/usr/bin:/bin"
    made = podman("import", "--change", f"ENV {path}", "--change", "USER ray", archive, BASE)
    assert made.returncode == 0, made.stderr


def as_pip_here(folder: Path) -> list[str]:
    """Options that give pip in the build this machine's settings, and the files that they name."""
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    settings = dict(line.split("=", 1) for line in listed.splitlines())
    values = {name.rpartition(".")[2]: value.strip("'") for name, value in settings.items()} | {"retries": "1"}
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {one}\n" for name, one in values.items()))
    words = [word for value in values.values() for word in value.split()]
    # The pages of an index on disk name files beside it.
    indexes = {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
    files = sorted(indexes | {Path(word) for word in words if word.startswith("/") and Path(word).exists()})
    mounts = {f"{folder}/pip.conf": "/etc/pip.conf"} | {str(path): str(path) for path in files}
    return [f"--volume={there}:{here}:ro" for there, here in mounts.items()]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"no podman to build an image with: {', '.join(lacking) or 'not root'}")
    folder = tmp_path_factory.mktemp("image")
    if podman("image", "exists", BASE).returncode != 0:
        make_base(folder)
    began = time.monotonic()
    built = podman(
        "build", "--isolation", "chroot", FILES, "--network=host", *as_pip_here(folder),
        "--build-arg", f"BASE={BASE}", "--file", K8S / "Dockerfile", "--ignorefile", K8S / "Dockerfile.dockerignore",
        "--tag", IMAGE, ROOT,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    size = podman("image", "inspect", "--format", "{{.Size}}", IMAGE).stdout
    print(f"\nbuilt in {time.monotonic() - began:.0f} s: {int(size) / 1e9:.2f} GB")
    return IMAGE


def as_the_manifest_says() -> list[str]:
    """Of podman's options, those that stand for a pod's limits, rights, variables and volumes."""
    spec = pod()
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not context["allowPrivilegeEscalation"]
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['fsGroup']}"
    memory = container["resources"]["limits"]["memory"].replace("Gi", "g")
    empty = {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume} - {"models"}
    writable = [one["mountPath"] for one in container["volumeMounts"] if one["name"] in empty]
    return [
        "--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        f"--user={user}", f"--memory={memory}", "--cpus=2",
        *(f"--env={name}={value}" for name, value in environment().items()),
        *(f"--tmpfs={path}:rw,exec,mode=1777" for path in writable),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def served(image: str, tiny_pair: tuple[Path, Path]) -> Iterator[tuple[int, int]]:
    """Ports of HTTP and gRPC of a container that serves; at its end it has stopped by itself at SIGTERM."""
    http_port, grpc_port = free_ports(2)
    # They were written for their owner alone, and the user in the image is another one.
    for file in tiny_pair[0].parent.rglob("*.safetensors"):
        file.chmod(0o644)
    target, draft = (f"/models/{folder.name}" for folder in tiny_pair)
    name = f"spool-{http_port}"
    began = time.monotonic()
    started = podman(
        "--runtime", "runc", "run", "--detach", "--name", name, "--network=host", FILES, PROCESSES,
        *as_the_manifest_says(), f"--volume={tiny_pair[0].parent}:/models:ro", image,
        "spool", "serve", target, "--draft", draft, "--dtype", "float32", "--served-model-name", MODEL,
        "--port", http_port, "--grpc-port", grpc_port,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    try:
        wait_until(lambda: healthy(name, http_port), "a container that serves", 3 * LONG, pause=1.0)
        print(f"\nserves after {time.monotonic() - began:.0f} s")
        wait_until(lambda: "Ctrl-C stops it." in podman("logs", name).stderr, "all replicas are up", pause=1.0)
        yield http_port, grpc_port
        grace = pod().get("terminationGracePeriodSeconds", 30)
        stopped = podman("stop", "--time", grace, name)
        assert stopped.returncode == 0, stopped.stderr
        # 137 would be a SIGKILL after the grace period.
        assert podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0", podman("logs", name)
    finally:
        podman("rm", "--force", name)


def healthy(name: str, port: int) -> bool:
    assert podman("container", "inspect", "--format", "{{.State.Running}}", name).stdout == "true\n", podman(
        "logs", name
    )
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=LONG).is_success
    except httpx.TransportError:
        return False


def test_a_container_answers_over_http_and_grpc(served: tuple[int, int]) -> None:
    http_port, grpc_port = served
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{http_port}/v1/completions", json=body, timeout=LONG).json()
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        request = generation_pb2.GenerateRequest(model=MODEL, text="Once upon a time", max_tokens=20, temperature=0)
        other = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=LONG)
    assert answer["choices"][0]["text"] == other.choices[0].text
    assert other.usage.completion_tokens == 20
