"""The checked-in protobuf stubs are what the .proto files give."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={folder}", f"--pyi_out={folder}"]
    files = [path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto")]
    assert len(files) > 4
    subprocess.run([*command, f"--grpc_python_out={folder}", *files], cwd=ROOT / "protos", check=True)
    return folder


def test_stubs_are_up_to_date(generated: Path) -> None:
    """In the packages of those who use them; nothing else differs."""
    expected = {}
    for path in generated.rglob("*_pb2*"):
        public = path.parent == generated / "spool" / "v1"
        text = re.sub(r"(?m)^from spool\.[a-z]+\.v1 ", "from spool.protos ", path.read_text(encoding="utf-8"))
        text = re.sub(r"(?m)^from spool\.v1 ", "from spool.client.v1 ", text)
        expected[ROOT / ("spool_client/v1" if public else "protos") / path.name] = text
    checked_in = {path for folder in ("spool_client/v1", "protos") for path in (ROOT / folder).glob("*_pb2*.py*")}
    assert expected.keys() == checked_in
    assert [path for path in expected if path.read_text(encoding="utf-8") != expected[path]] == [], "run `make stubs`"


def test_stubs_of_a_clients_own_can_be_in_the_same_program(generated: Path) -> None:
    both = "from spool.v1 import generation_pb2 as own; from spool.client.v1 import generation_pb2 as ours; "
    both += "print(own.GenerateRequest.FromString(ours.GenerateRequest(seed=7).SerializeToString()).seed)"
    environment = os.environ | {"PYTHONPATH": str(generated)}
    ended = subprocess.run([sys.executable, "-c", both], env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("7\n", 0), ended.stderr
