"""The wheel, built, installed in a clean virtual environment and run there, beside nothing but what serving needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.support.command_line import Ended
from tests.support.dependencies import PYPROJECT, ROOT, requirements
from tests.support.wheels import FOLDERS, built_from, clean_environment, copied_sources, install, linked_environment

pytestmark = pytest.mark.slow

DATA = ("engine/cpu/csrc", "engine/demo/assets", "services/gateway/dashboard/page")
# They need triton, which serving on a CPU does without.
NOT_FOR_SERVING = r"spool\.engine\.cuda\.(triton_.*|fused_decoder|launches|library_products)"
IMPORT_ALL = f"""
import importlib, pkgutil, re, sys
for module in pkgutil.walk_packages([f"{{sys.argv[1]}}/spool"], "spool."):
    if not re.fullmatch({NOT_FOR_SERVING!r}, module.name):
        found = importlib.import_module(module.name).__file__
        assert found.startswith(sys.argv[1]), found
        print(module.name)
"""


@pytest.fixture(scope="module")
def members(wheel: Path) -> dict[str, int]:
    """Sizes in bytes of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.file_size for member in archive.infolist()}


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and links to the packages that serving needs among those installed here."""
    return clean_environment(wheel, PYPROJECT["project"]["dependencies"], tmp_path_factory.mktemp("clean") / "venv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def run(program: str, environment: Path, folder: Path, *arguments: object) -> Ended:
    """Runs a program of the clean environment, where nothing leads to the project's folder."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [environment / "bin" / program, *map(str, arguments)],
        cwd=folder,
        env={**variables, "HF_HUB_OFFLINE": "1", "SPOOL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def test_the_wheel_holds_the_packages_and_their_data(members: dict[str, int]) -> None:
    modules = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    protos = list((ROOT / "protos").rglob("*.proto"))
    data = [file for name in DATA for file in (ROOT / name).iterdir() if file.is_file()]
    assert len(protos) > 4
    assert len(data) > 20
    wanted = {f"spool/{file.relative_to(ROOT).as_posix()}" for file in (*modules, *protos, *data)}
    assert sorted(wanted - members.keys()) == []


def test_the_wheel_holds_nothing_else(members: dict[str, int]) -> None:
    tops = {name.split("/")[0] for name in members}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"spool"}
    assert {name.split("/")[1] for name in members if name.startswith("spool/")} == set(FOLDERS)
    assert [name for name in members if "results" in Path(name).parts or "__pycache__" in name] == []
    assert sorted(name for name, size in members.items() if size > 2**20) == [
        "spool/engine/demo/assets/trained_head.safetensors",
        "spool/engine/demo/assets/trained_layers.safetensors",
    ]


def test_the_wheel_says_its_licences_and_its_ranges(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licences = {
            name.partition(".dist-info/licenses/")[2]: archive.read(name)
            for name in archive.namelist()
            if ".dist-info/licenses/" in name
        }
        (metadata,) = [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    assert licences == {name: (ROOT / name).read_bytes() for name in PYPROJECT["project"]["license-files"]}
    assert {"LICENSE", "NOTICE"} < licences.keys()
    said = [line for line in message_from_bytes(metadata).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert set(requirements(said)) == set(requirements(PYPROJECT["project"]["dependencies"]))


def test_the_client_alone_needs_little(folder: Path, tmp_path: Path) -> None:
    """And it says what goes wrong, here that nobody listens, as the first call of a program would."""
    shutil.copytree(ROOT / "spool_client", tmp_path / "sources", ignore=shutil.ignore_patterns("__pycache__"))
    alone = built_from(tmp_path / "sources", tmp_path / "wheel")
    with zipfile.ZipFile(alone) as archive:
        found = {Path(name) for name in archive.namelist() if ".dist-info" not in name}
    wanted = [*(ROOT / "spool_client").rglob("*.py"), *(ROOT / "spool_client").rglob("*.pyi")]
    wanted += [ROOT / "spool_client" / "py.typed"]
    assert found == {"spool/client" / path.relative_to(ROOT / "spool_client") for path in wanted}
    environment = clean_environment(alone, ["grpcio", "protobuf"], tmp_path / "venv")
    program = """
import sys
from spool.client import Client, GenerateRequest, RetryPolicy
assert not {"torch", "ray", "transformers"} & {name.split(".")[0] for name in sys.modules}
Client("127.0.0.1:1", retry=RetryPolicy(attempts=1)).generate(GenerateRequest(text="a"))
"""
    ended = run("python", environment, folder, "-P", "-c", program)
    assert ended.code == 1
    assert "StatusCode.UNAVAILABLE" in ended.err


def test_all_modules_of_serving_can_be_imported(environment: Path, folder: Path) -> None:
    installed = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(environment)}))
    ended = run("python", environment, folder, "-P", "-c", IMPORT_ALL, installed)
    assert ended.code == 0, ended.err
    assert len(ended.out.split()) > 150


def test_the_commands_are_there(environment: Path, folder: Path) -> None:
    ended = run("spool", environment, folder, "--help")
    assert ended.code == 0, ended.err
    commands = re.findall(r"^[│ ]+([a-z]+) {2,}", ended.out, re.MULTILINE)
    assert {"serve", "generate", "verify", "config"} <= set(commands)
    assert run("spool", environment, folder, "serve", "--help").code == 0


def test_an_editable_installation_compiles_nothing(tmp_path: Path) -> None:
    sources = copied_sources(tmp_path)
    editable = linked_environment(["setuptools"], tmp_path / "venv")
    install(editable, "--no-build-isolation", "--editable", sources, CC=str(tmp_path / "none"))
    assert list(sources.rglob("*.so")) == []
    ended = run("python", editable, tmp_path, "-P", "-c", "import spool.engine.cpu.isa as isa; print(isa.__file__)")
    assert (ended.code, ended.out.strip()) == (0, str(sources / "engine" / "cpu" / "isa.py")), ended.err
