"""The checked-in protobuf stubs are what the .proto files give."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stubs_of_the_public_api_are_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", f"--python_out={tmp_path}"]
    command += [f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}", "spool/v1/generation.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    generated = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "spool" / "v1").iterdir()}
    checked_in = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "spool_client/v1").glob("*_pb2*.py*")}
    assert len(generated) == 3
    # In the client's package, and nothing else differs.
    generated = {name: text.replace("\nfrom spool.v1 ", "\nfrom spool_client.v1 ") for name, text in generated.items()}
    assert generated == checked_in, "run `make stubs`"
    # Who makes stubs from the same file can have both in one program.
    both = "from spool.v1 import generation_pb2 as own; from spool_client.v1 import generation_pb2 as ours; "
    both += "print(own.GenerateRequest.FromString(ours.GenerateRequest(seed=7).SerializeToString()).seed)"
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    ended = subprocess.run(
        [sys.executable, "-c", both], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("7\n", 0), ended.stderr


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    out = str(tmp_path)
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    command += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *protos]
    subprocess.run(command, cwd=ROOT, check=True)
    generated = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "protos").iterdir()}
    checked_in = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "protos").glob("*_pb2*.py*")}
    assert generated.keys() == checked_in.keys()
    assert [name for name in generated if generated[name] != checked_in[name]] == [], "run `make stubs`"
