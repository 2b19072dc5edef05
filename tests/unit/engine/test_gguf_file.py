"""Files that the gguf package wrote, read again; damaged ones, refused."""

import random
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from spool.engine.errors import UnsupportedModelError
from spool.engine.quantization.gguf_file import TYPES, GgufFile
from spool.engine.quantization.weights import QuantizedWeight

FLOATS = {"F32": np.float32, "F16": np.float16}
METADATA = {
    "a.text": "Stück",
    "a.number": 7,
    "a.float": 0.5,
    "a.flag": True,
    "a.texts": ["x", "", "yz"],
    "a.numbers": [1, 2, 3],
    "a.flags": [True, False],
}


def blocks(kind: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Bytes of a tensor: as the package quantises it or, where it cannot, any with finite scales."""
    generator = np.random.default_rng(seed)
    try:
        return gguf.quants.quantize(generator.standard_normal(shape, np.float32), Kind[kind])
    except NotImplementedError:
        size, of_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
        raw = generator.integers(0, 256, (shape[0], shape[1] // size, of_bytes), np.uint8)
        scales = generator.standard_normal((shape[0], shape[1] // size, 2)).astype(np.float16)
        if kind == "Q6_K":
            raw[..., 208:] = scales[..., :1].view(np.uint8)
        else:
            raw[..., :4] = scales.view(np.uint8)
        return raw.reshape(shape[0], -1)


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]], alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in METADATA.items():
        adding = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float64}
        adding.get(type(value), writer.add_array)(key, value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if kind in FLOATS else Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, alignment: int | None) -> None:
    generator = np.random.default_rng(1)
    arrays = {kind: generator.standard_normal((3, 5)).astype(dtype) for kind, dtype in FLOATS.items()}
    tensors = {kind: (kind, array) for kind, array in arrays.items()}
    tensors["vector"] = ("F32", np.arange(7, dtype=np.float32))
    file = GgufFile(write(tmp_path / "small.gguf", tensors, alignment))
    assert {name: file.metadata[name] for name in METADATA} == METADATA
    assert file.metadata["general.architecture"] == "llama"
    assert {name: (tensor.type, tensor.shape) for name, tensor in file.tensors.items()} == {
        "F32": ("F32", (3, 5)),
        "F16": ("F16", (3, 5)),
        "vector": ("F32", (7,)),
    }
    for name, (_, array) in tensors.items():
        read = file.read(name)
        assert isinstance(read, torch.Tensor)
        assert torch.equal(read, torch.from_numpy(array))
        assert file.tensors[name].offset % (alignment or 32) == 0


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in FLOATS])
def test_the_numbers_of_each_type_are_those_of_the_package(tmp_path: Path, kind: str) -> None:
    # More rows than are taken apart at a time.
    data = blocks(kind, (2051, 512))
    read = GgufFile(write(tmp_path / "small.gguf", {"weight": (kind, data)})).read("weight")
    if isinstance(read, QuantizedWeight):
        assert read.bits == (4 if kind.startswith("Q4") else 8)
        assert read.group == (16 if kind == "Q6_K" else 32)
        read = read.expanded()
    assert torch.equal(read.float(), torch.from_numpy(gguf.quants.dequantize(data, Kind[kind])))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, kind: str) -> None:
    data = blocks(kind, (2, 256))
    at = data.shape[1] - 2 if kind == "Q6_K" else 0
    data[1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    file = GgufFile(write(tmp_path / "small.gguf", {"the.weight": (kind, data)}))
    with pytest.raises(UnsupportedModelError, match=r"small\.gguf: the\.weight .*finite"):
        file.read("the.weight")


def header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, *value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + b"".join(value)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**63
DAMAGED = {
    "empty": (b"", "the first bytes"),
    "magic": (b"GGML" + bytes(20), "the first bytes"),
    "version 1": (header(version=1), "the version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "the version is 50331648"),
    "cut": (header()[:20], "the number of keys"),
    "tensors": (header(tensors=HUGE), f"the number of tensors is {HUGE}"),
    "keys": (header(keys=HUGE), f"the number of keys is {HUGE}"),
    "key": (header(struct.pack("<Q", HUGE), bytes(20), keys=1), f"the length of a key is {HUGE}"),
    "two keys": (header(key(b"k", 0, b"1"), key(b"k", 0, b"2"), keys=2), "key is k"),
    "key type": (header(key(b"k", 13, bytes(8)), keys=1), "the type of k is 13"),
    "no UTF-8": (header(key(b"k", 8, text(b"\xff")), bytes(8), keys=1), "k is b'"),
    "no bool": (header(key(b"k", 7, b"\x02"), keys=1), "k is 2"),
    "text": (header(key(b"k", 8, struct.pack("<Q", HUGE)), bytes(8), keys=1), f"the length of k is {HUGE}"),
    "array": (header(key(b"k", 9, struct.pack("<IQ", 4, 3), bytes(8)), keys=1), "the number of values of k is 3"),
    "texts": (header(key(b"k", 9, struct.pack("<IQ", 8, HUGE), bytes(8)), keys=1), "the number of values of k"),
    "nested": (header(key(b"k", 9, struct.pack("<IQ", 9, 1) * 5, bytes(64)), keys=1), "the type of k is 9"),
    "alignment": (header(key(b"general.alignment", 4, struct.pack("<I", 48)), keys=1), "general.alignment is 48"),
    "dimensions": (header(tensor(b"t", (1,) * 5, 0, 0), tensors=1), "the number of dimensions of t is 5"),
    "no rows": (header(tensor(b"t", (0,), 0, 0), tensors=1), "the shape of t"),
    "block": (header(tensor(b"t", (33, 1), 2, 0), tensors=1), "the shape of t"),
    "a known type": (header(tensor(b"t", (256, 1), 10, 0), tensors=1), "the type of t is Q2_K"),
    "an unknown type": (header(tensor(b"t", (256, 1), 999, 0), tensors=1), "the type of t is 999"),
    "unaligned": (header(tensor(b"t", (1,), 0, 4), bytes(64), tensors=1), "the offset of t is 4"),
    "beyond": (header(tensor(b"t", (1,), 0, HUGE), bytes(64), tensors=1), "the end of t"),
    "large": (header(tensor(b"t", (HUGE, HUGE), 0, 0), bytes(64), tensors=1), "the end of t"),
    "two tensors": (header(tensor(b"t", (1,), 0, 0), tensor(b"t", (1,), 0, 32), bytes(99), tensors=2), "tensor is t"),
}


@pytest.mark.parametrize(("content", "said"), DAMAGED.values(), ids=DAMAGED.keys())
def test_an_error_names_the_file_and_the_field(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError) as caught:
        GgufFile(path)
    assert str(caught.value).startswith("small.gguf: ")
    assert said in str(caught.value)
    assert ", must be " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"small\.gguf cannot be read"):
        GgufFile(tmp_path / "small.gguf")


def mutated(content: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(damaged))
        match generator.randrange(4):
            case 0:
                del damaged[max(at, 1) :]
            case 1:
                damaged[at] ^= 1 << generator.randrange(8)
            case 2:
                number = generator.choice([0, 2**29, 2**40, 2**63, 2**64 - 1, len(damaged), generator.getrandbits(16)])
                damaged[at : at + 8] = struct.pack("<Q", number)
            case 3:
                damaged[at : at + 4] = struct.pack(
                    "<I", generator.choice([8, 9, 12, 30, 2**31, generator.randrange(40)])
                )
    return bytes(damaged)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """256 MiB more of addresses than there are now; what asks for more gets a MemoryError."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("little_memory")
def test_any_file_is_read_or_refused_in_little_memory(tmp_path: Path) -> None:
    tensors = {f"t.{kind}": (kind, blocks(kind, (1, 256))) for kind in TYPES}
    content = write(tmp_path / "whole.gguf", tensors).read_bytes()
    path = tmp_path / "small.gguf"
    generator = random.Random(5)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(2_000):
        # A new file is made quicker than one that is mapped is cut.
        path.unlink(missing_ok=True)
        path.write_bytes(mutated(content, generator))
        try:
            file = GgufFile(path)
            if file.tensors:
                file.read(generator.choice(list(file.tensors)))
            outcomes["read"] += 1
        except UnsupportedModelError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 200
