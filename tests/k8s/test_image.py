"""The image, as far as it can be proved without building it (test_built_image.py builds it)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from tests.k8s.manifests import K8S, ROOT
from tests.support.wheels import FOLDERS

DOCKERFILE = K8S / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = {Requirement(line).name: line for line in PROJECT["project"]["dependencies"]}


def instructions(name: str) -> list[str]:
    """Arguments of all instructions of a kind, in order; continued lines are one."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.removeprefix(f"{name} ").strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def copied() -> list[str]:
    """Sources of all COPY instructions."""
    return [word for line in instructions("COPY") for word in line.split()[:-1] if not word.startswith("--")]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_what_is_copied_is_there_and_is_sent_to_the_builder() -> None:
    sent = {
        line.removeprefix("!") for line in (K8S / "Dockerfile.dockerignore").read_text().splitlines() if "!" in line
    }
    assert len(copied()) > 8
    assert [name for name in copied() if not (ROOT / name).exists()] == []
    assert set(copied()) == sent


def test_every_package_is_in_the_image() -> None:
    assert {*FOLDERS, "spool_client"} <= set(copied())


def test_ray_and_python_are_those_of_the_project() -> None:
    ray = Requirement(DEPENDENCIES["ray"]).specifier
    arguments = dict(line.partition("=")[::2] for line in instructions("ARG"))
    assert instructions("FROM") == ["${BASE}"]
    tag = re.fullmatch(r"rayproject/ray:([\d.]+)-py(\d)(\d+)-\$\{PLATFORM\}", arguments["BASE"])
    assert tag is not None
    assert str(ray) == f"=={tag[1]}"
    assert f"{tag[2]}.{tag[3]}" in PROJECT["project"]["requires-python"]


def test_the_image_is_not_root() -> None:
    assert instructions("USER")[-1].split(":")[0] not in ("0", "root")
    pods = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    context = pods["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert instructions("USER")[-1] == f"{context['runAsUser']}:{context['fsGroup']}"
