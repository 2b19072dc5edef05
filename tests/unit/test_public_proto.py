"""The public .proto explains every element, and keeps to the rules of style that `buf lint` has."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proto(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    """With the places of comments."""
    out = tmp_path_factory.mktemp("proto") / "set.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "--include_source_info"]
    subprocess.run([*command, f"--descriptor_set_out={out}", "spool/v1/generation.proto"], cwd=ROOT, check=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def elements(proto: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of everything that a reader looks up, and their paths in the descriptor."""
    for place, message in enumerate(proto.message_type):
        yield message.name, (4, place)
        for number, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", (4, place, 2, number)
        for number, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # those of `optional`
                yield f"{message.name}.{oneof.name}", (4, place, 8, number)
    for place, enum in enumerate(proto.enum_type):
        yield enum.name, (5, place)
        for number, value in enumerate(enum.value):
            yield f"{enum.name}.{value.name}", (5, place, 2, number)
    for place, service in enumerate(proto.service):
        yield service.name, (6, place)
        for number, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (6, place, 2, number)


def test_everything_is_explained(proto: descriptor_pb2.FileDescriptorProto) -> None:
    explained = {tuple(one.path) for one in proto.source_code_info.location if one.leading_comments.strip()}
    found = list(elements(proto))
    assert len(found) > 100
    assert [name for name, path in found if path not in explained] == []


def test_names_keep_to_the_rules(proto: descriptor_pb2.FileDescriptorProto) -> None:
    assert proto.package == "spool.v1"
    assert [service.name for service in proto.service] == ["GenerationService"]
    for enum in proto.enum_type:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert [value.name for value in enum.value if not value.name.startswith(f"{prefix}_")] == []
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}_UNSPECIFIED", 0)
