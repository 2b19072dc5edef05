"""Files of the GGUF format, version 2 and 3, in one part or several: their header, and their tensors.

Files come from strangers. Each count, length and offset is compared with the bytes that are left before anything of
that size is made. Known to launchers, so torch is imported where a tensor is read.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spool.engine.errors import UnsupportedModelError
from spool.engine.leftovers import listed
from spool.engine.quantization.gguf_types import NAMES, TYPES

if TYPE_CHECKING:
    import torch

    from spool.engine.quantization.weights import QuantizedWeight

VERSIONS = (2, 3)

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4
# Of a key with its value and of a tensor in the header: what the shortest takes.
_ENTRY_BYTES, _TENSOR_BYTES = 13, 32
_LONGEST_SHOWN = 60
_PART = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)")
"""The name of a file in parts: which part it is, and of how many."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """What the header says of a tensor: `shape` as torch has it, `offset` and `size` in bytes of the file."""

    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


def part_paths(path: Path) -> list[Path]:
    """All parts of a file, by the name of its first one."""
    name = _PART.fullmatch(path.name)
    if name is None:
        return [path]
    return [path.with_name(f"{name[1]}{part:05}{name[3]}") for part in range(1, int(name[4]) + 1)]


class GgufFile:
    """The header of a file, checked as a whole, with those of its other parts. Raises UnsupportedModelError."""

    def __init__(self, path: Path, part: int = 0) -> None:
        """`path`: that of the first part, or of `part` alone, which counts from 0."""
        self.path = path
        try:
            with path.open("rb") as file:
                # An empty file cannot be mapped.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        except OSError as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error.strerror}") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._read_header()
        self._others: list[GgufFile] = []
        if (number := self._part_number("split.no", 0)) != part:
            raise self._error("split.no", number, f"{part}: models in parts are named by their first file")
        if part == 0:
            self._read_other_parts(self._part_number("split.count", 1))

    def read(self, name: str) -> torch.Tensor | QuantizedWeight:
        """The numbers of a tensor of `tensors`. Raises UnsupportedModelError for scales that are not finite."""
        from spool.engine.quantization.gguf_blocks import tensor_of_blocks

        holder, tensor = self._holder(name), self.tensors[name]
        try:
            return tensor_of_blocks(holder._bytes, tensor.type, tensor.shape, tensor.offset)
        except ValueError as error:
            raise UnsupportedModelError(f"{holder.path.name}: {name} {error}") from error

    def floats(self, name: str) -> tuple[float, ...]:
        """The numbers of a tensor of type F32, without torch."""
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise self._error(f"the type of {name}", tensor.type, "F32")
        return struct.unpack_from(f"<{tensor.size // 4}f", self._holder(name)._bytes, tensor.offset)

    def commonest_type(self) -> str:
        """Of matrices: vectors are many where linear layers have biases."""
        tensors = self.tensors.values()
        matrices = [tensor for tensor in tensors if len(tensor.shape) > 1] or tensors
        return Counter(tensor.type.lower() for tensor in matrices).most_common(1)[0][0]

    def header_digest(self) -> str:
        """Of all parts, with the sizes of those behind the first."""
        digest = hashlib.sha256(self._bytes[: self._at])
        for part in self._others:
            digest.update(f"{len(part._bytes)} {part.header_digest()}".encode())
        return digest.hexdigest()

    def _holder(self, name: str) -> GgufFile:
        """The part with this tensor."""
        return next((part for part in self._others if name in part.tensors), self)

    def _part_number(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._error(key, value, "a number of 0 or more")
        return value

    def _read_other_parts(self, count: int) -> None:
        """Takes their tensors for this file's."""
        paths = part_paths(self.path)
        if len(paths) != max(1, count) or paths[0].name != self.path.name:
            raise UnsupportedModelError(
                f"{self.path.name} has {count} parts by its split.count, must be named NAME-00001-of-{count:05}.gguf, "
                "with the others beside it"
            )
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise UnsupportedModelError(
                f"{self.path.name} is one of {count} parts, of which {listed(missing)} is not in its folder"
            )
        for number, path in enumerate(paths[1:], 1):
            part = GgufFile(path, number)
            for key in part.metadata.keys() - {"split.no"}:
                if part.metadata[key] != self.metadata.get(key):
                    raise part._error(key, part.metadata[key], f"{self.metadata.get(key)!r}, as in {self.path.name}")
            if both := part.tensors.keys() & self.tensors.keys():
                raise part._error("tensor", min(both), "there once, in one of the parts")
            self.tensors |= part.tensors
            self._others.append(part)
        if (stated := self._part_number("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise self._error("split.tensors.count", stated, f"{len(self.tensors)}, the number of tensors in all parts")

    def _read_header(self) -> None:
        magic = self._take(4, "the first bytes")
        if magic != b"GGUF":
            raise self._error("the first bytes", magic, "b'GGUF'")
        version = self._number("I", "the version")
        if version not in VERSIONS:
            raise self._error("the version", version, f"{VERSIONS[0]} or {VERSIONS[1]}, little-endian")
        tensors = self._count("the number of tensors", _TENSOR_BYTES)
        for _ in range(self._count("the number of keys", _ENTRY_BYTES)):
            key = self._text("the length of a key")
            if key in self.metadata:
                raise self._error("key", key, "there once")
            self.metadata[key] = self._value(key, self._number("I", f"the type of {key}"))
        stated = [self._stated_tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._error("general.alignment", alignment, "a power of two of 8 or more")
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset, size in stated:
            if name in self.tensors:
                raise self._error("tensor", name, "there once")
            if offset % alignment:
                raise self._error(f"the offset of {name}", offset, f"a multiple of {alignment}")
            if start + offset + size > len(self._bytes):
                limit = f"at most {len(self._bytes)}, the file's size"
                raise self._error(f"the end of {name}", start + offset + size, limit)
            self.tensors[name] = GgufTensor(kind, shape, start + offset, size)

    def _stated_tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self._text("the length of a tensor's name")
        dimensions = self._number("I", f"the number of dimensions of {name}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"the number of dimensions of {name}", dimensions, f"1 to {_MAX_DIMENSIONS}")
        shape = self._numbers("Q", dimensions, f"the shape of {name}")[::-1]
        number = self._number("I", f"the type of {name}")
        kind = NAMES.get(number, str(number))
        if kind not in TYPES:
            raise self._error(f"the type of {name}", kind, f"one of {', '.join(TYPES)}")
        block, block_bytes = TYPES[kind].values, TYPES[kind].size
        if 0 in shape or shape[-1] % block or (block > 1 and dimensions != 2):
            limit = f"without zeros and, of type {kind}, of rows of a multiple of {block}"
            raise self._error(f"the shape of {name}", list(shape), limit)
        return name, kind, shape, self._number("Q", f"the offset of {name}"), prod(shape) // block * block_bytes

    def _value(self, key: str, kind: int, nesting: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], 1, key)[0]
        if kind == _STRING:
            return self._text(f"the length of {key}")
        if kind != _ARRAY or nesting == _MAX_NESTING:
            limit = f"0 to 12, and arrays in one another at most {_MAX_NESTING} deep"
            raise self._error(f"the type of {key}", kind, limit)
        kind = self._number("I", f"the type of the values of {key}")
        format = _NUMBERS.get(kind)
        # An array in another has a type and a count, a text has a length.
        size = struct.calcsize(f"<{format}") if format else 8 if kind == _STRING else 12
        count = self._count(f"the number of values of {key}", size)
        if format:
            return list(self._numbers(format, count, key))
        if kind == _STRING:
            return self._texts(count, f"the length of {key}")
        return [self._value(key, kind, nesting + 1) for _ in range(count)]

    def _texts(self, count: int, field: str) -> list[str]:
        """As many calls of `_text`: vocabularies have hundreds of thousands, and each process reads them."""
        texts: list[str] = []
        content, length = self._bytes, struct.Struct("<Q")
        for _ in range(count):
            begin = self._at + length.size
            end = begin + length.unpack(content[self._at : begin])[0] if begin <= len(content) else begin
            if end > len(content):
                return [*texts, self._text(field)]  # which raises
            try:
                texts.append(content[begin:end].decode())
            except UnicodeDecodeError:
                return [*texts, self._text(field)]
            self._at = end
        return texts

    def _text(self, field: str) -> str:
        taken = self._take(self._count(field, 1), field)
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise self._error(field.removeprefix("the length of "), taken, "UTF-8") from error

    def _count(self, field: str, size: int) -> int:
        """Of things that take `size` bytes of the file or more each."""
        count = self._number("Q", field)
        if count > (limit := (len(self._bytes) - self._at) // size):
            raise self._error(field, count, f"at most {limit}, for which the file has bytes")
        return count

    def _number(self, format: str, field: str) -> int:
        return int(self._numbers(format, 1, field)[0])

    def _numbers(self, format: str, count: int, field: str) -> tuple[Any, ...]:
        taken = self._take(count * struct.calcsize(f"<{format}"), field)
        if format == "?" and max(taken, default=0) > 1:
            raise self._error(field, max(taken), "0 or 1")
        return struct.unpack(f"<{count}{format}", taken)

    def _take(self, size: int, field: str) -> bytes:
        end = self._at + size
        if end > len(self._bytes):
            raise self._error(f"the end of {field}", end, f"at most {len(self._bytes)}, the file's size")
        taken = self._bytes[self._at : end]
        self._at = end
        return taken

    def _error(self, field: str, value: object, limit: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path.name}: {_shown(field)} is {_shown(value)}, must be {limit}")


def _shown(value: object) -> str:
    """One short line, of a text or of what a stranger's file holds in its place."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[: _LONGEST_SHOWN + 1])
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
