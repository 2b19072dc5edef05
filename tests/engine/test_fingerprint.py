"""What must be alike for equal bits: each change shows in its own part, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spool.engine.cpu.isa import available_isas
from spool.engine.errors import UnsupportedModelError
from spool.engine.exactness.fingerprint import folder_parts
from spool.engine.models.loading import load_target_engine
from spool.engine.settings import EngineSettings
from tests.support.tiny_models import save_tiny_pair

SETTINGS = {"threads": 1, "page_size": 16, "kv_pages": 8, "max_num_batched_tokens": 96}


def parts_of(settings: EngineSettings) -> dict[str, str]:
    return dict(load_target_engine(settings, lambda *_: None).description.fingerprint)


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return EngineSettings(str(save_tiny_pair("llama", tmp_path_factory.mktemp("models"))[0]), **SETTINGS)


@pytest.fixture(scope="module")
def parts(settings: EngineSettings) -> dict[str, str]:
    return parts_of(settings)


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({}, []),
        ({"threads": 2, "kv_pages": 12, "max_num_batched_tokens": 64, "prefix_cache": False}, []),
        ({"exact": False}, ["exact"]),
        ({"kv_cache_dtype": "int8"}, ["kv_cache_dtype"]),
        ({"dtype": "float16"}, ["dtype", "kernels", "kv_cache_dtype"]),
    ],
    ids=str,
)
def test_settings_that_bits_depend_on_have_a_part(
    change: dict[str, Any], changed: list[str], settings: EngineSettings, parts: dict[str, str]
) -> None:
    assert different(parts_of(replace(settings, **change)), parts) == changed


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        *(
            pytest.param(
                {"cpu_isa": isa.name, "threads": 2, "max_num_batched_tokens": 64},
                [],
                marks=pytest.mark.slow if isa.name == "portable" else [],
            )
            for isa in available_isas()
        ),
        ({"quantization": "int8"}, ["quantization"]),
        ({"quantization": "none"}, ["quantization"]),
        ({"kv_cache_dtype": "int8"}, ["kv_cache_dtype"]),
        ({"dtype": "float16"}, ["dtype", "kv_cache_dtype", "layers"]),
    ],
    ids=str,
)
def test_universal_numerics_depend_on_no_processor(
    change: dict[str, Any], changed: list[str], settings: EngineSettings
) -> None:
    universal = replace(settings, numerics="universal", quantization="int4")
    parts = parts_of(universal)
    assert parts["numerics"] == "universal 1"
    assert not {"kernels", "torch", "transformers", "spool"} & parts.keys()
    assert different(parts_of(replace(universal, **change)), parts) == changed


@pytest.mark.parametrize("portable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_universal_targets_read_the_kv_of_each_other(settings: EngineSettings, portable: bool) -> None:
    """Compiling the portable kernels takes a minute."""
    isas = [isa for isa in available_isas() if portable or isa.name != "portable"] or available_isas()
    layouts = [
        load_target_engine(replace(settings, **change), lambda *_: None).kv_store.layout
        for isa in isas
        for change in ({"cpu_isa": isa.name, "quantization": "int4"}, {"cpu_isa": isa.name, "numerics": "universal"})
    ]
    assert len(set(layouts[::2])) == len(set(layouts[1::2])) == 1
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize("family", ["apertus", "qwen3_moe"])
def test_universal_numerics_are_refused_where_they_are_not_to_be_had(family: str, tmp_path: Path) -> None:
    settings = EngineSettings(str(save_tiny_pair(family, tmp_path)[0]), numerics="universal", exact=False, **SETTINGS)
    with pytest.raises(UnsupportedModelError, match=f"numerics is 'universal', must be 'auto' for .*{family}-target"):
        load_target_engine(settings, lambda *_: None)


@pytest.mark.parametrize(("file", "part"), [("model.safetensors", "weights"), ("config.json", "model")])
def test_every_bit_of_the_files_counts(
    file: str, part: str, settings: EngineSettings, parts: dict[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(settings.model, tmp_path / "model")
    content = (folder / file).read_bytes()
    if file == "config.json":
        content = json.dumps(json.loads(content) | {"rms_norm_eps": 2e-6}).encode()
    else:
        content = content[:-1] + bytes([content[-1] ^ 1])
    (folder / file).write_bytes(content)
    found = parts_of(replace(settings, model=str(folder)))
    assert {name for name in parts if found[name] != parts[name]} == {part}


def test_large_files_are_read_once_unless_they_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path / "cache"))
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(bytes(1 << 24))
    config.write_text("{}")
    fresh = folder_parts(tmp_path)
    assert not (tmp_path / "cache").exists()
    os.utime(weights, (0, 0))
    assert folder_parts(tmp_path) == fresh
    [known] = (tmp_path / "cache" / "digests").iterdir()
    digest = known.read_text()
    known.write_text("no digest")
    assert folder_parts(tmp_path) == fresh
    known.write_text(digest[::-1])
    assert folder_parts(tmp_path)["weights"] != fresh["weights"]
    assert folder_parts(tmp_path)["model"] == fresh["model"]
    # In place, with the size and the time that it had.
    with weights.open("r+b") as content:
        content.write(b"1")
    os.utime(weights, (0, 0))
    assert folder_parts(tmp_path)["weights"] not in (fresh["weights"], digest[::-1])


def test_where_libraries_compute_shapes_and_threads_count(tmp_path: Path) -> None:
    """Norms and rotations of this family are torch's."""
    folder = str(save_tiny_pair("apertus", tmp_path)[0])
    settings = EngineSettings(folder, dtype="float32", exact=False, **SETTINGS)
    one, two = parts_of(settings), parts_of(replace(settings, threads=2, max_num_batched_tokens=64, page_size=32))
    torch.set_num_threads(1)
    changed = {name for name in one if one[name] != two[name]}
    assert changed == {"threads", "max_num_batched_tokens", "page_size"}
    assert {"processor", "row counts"} <= one.keys()
