"""Names of models, without network and without torch."""

import json
from pathlib import Path

import pytest

from spool.engine.models.fetching import fetch_model
from spool.engine.models.source import (
    DEMO_MARKER,
    DemoPart,
    ModelNotFoundError,
    SourceKind,
    demo_folder,
    demo_is_built,
    demo_marker,
    resolve_model,
)
from spool.scheduler.messages import Role


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(part: DemoPart, **changes: object) -> None:
    folder = demo_folder(part)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    marker = {**demo_marker(part), "files": {"config.json": 2}, **changes}
    (folder / DEMO_MARKER).write_text(json.dumps(marker))


@pytest.mark.parametrize(("name", "part"), [("demo", DemoPart.DRAFT), ("demo-head", DemoPart.HEAD)])
def test_demo_is_resolved_before_it_is_built(name: str, part: DemoPart, cache: Path) -> None:
    source = resolve_model(name, Role.DRAFT)
    assert (source.kind, source.folder, source.ready) == (SourceKind.DEMO, cache / part, False)
    build(part)
    assert source.ready
    assert fetch_model(source, lambda stage, fraction: pytest.fail("nothing to do")) == cache / part


def test_damaged_and_outdated_demo_folders_do_not_count(cache: Path) -> None:
    folder = demo_folder(DemoPart.TARGET)
    assert not demo_is_built(DemoPart.TARGET)
    build(DemoPart.TARGET)
    assert demo_is_built(DemoPart.TARGET)
    (folder / "config.json").write_text("{")
    assert not demo_is_built(DemoPart.TARGET)
    (folder / "config.json").unlink()
    assert not demo_is_built(DemoPart.TARGET)
    (folder / DEMO_MARKER).write_text("[]")
    assert not demo_is_built(DemoPart.TARGET)
    build(DemoPart.DRAFT, recipe=0)
    assert not demo_is_built(DemoPart.DRAFT)


def test_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    monkeypatch.chdir(tmp_path)
    source = resolve_model("model", Role.TARGET)
    assert (source.kind, source.folder, source.ready) == (SourceKind.FOLDER, tmp_path / "model", True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such folder, and not a hub id"),
        ("a/b/c", "no such folder, and not a hub id"),
        ("a--b/..", "no such folder, and not a hub id"),
        ("", "no config.json"),
        ("file.txt", "is a file, must be a folder"),
        ("empty", "holds no config.json"),
        ("light", "holds no weights"),
    ],
)
def test_names_that_are_no_model(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model(name, Role.TARGET)
