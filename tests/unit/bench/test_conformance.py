"""Schemas from files, and what is valid by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.structured.conformance import UncheckedError, error_of
from bench.structured.schemas import NamedSchema, read_schemas

SCHEMA = {"type": "array", "items": {"type": "integer"}}


def test_schemas_come_in_three_forms(tmp_path: Path) -> None:
    files = {
        "a/suite.json": [{"description": "lists", "schema": SCHEMA, "tests": []}, {"schema": True}],
        "b/bench.json": {"schema": SCHEMA, "tests": [], "meta": {}},
        "c/plain.json": SCHEMA,
        "c/never.json": False,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert read_schemas(tmp_path) == [
        NamedSchema("a/suite/lists", SCHEMA),
        NamedSchema("a/suite/1", True),
        NamedSchema("b/bench", SCHEMA),
        NamedSchema("c/never", False),
        NamedSchema("c/plain", SCHEMA),
    ]


@pytest.mark.parametrize("text", ["[1", "17", '[{"description": "no schema"}]'])
def test_other_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"odd\.json (is not JSON|holds neither)"):
        read_schemas(tmp_path)


def test_what_is_valid() -> None:
    assert error_of(SCHEMA, "[1, 2]") is None
    assert error_of(SCHEMA, '[1, "2"]') == "'2' is not of type 'integer'"
    assert "no JSON" in (error_of(SCHEMA, "[1,") or "")
    assert error_of(False, "1") is not None
    for schema in ({"$ref": "http://localhost/other"}, {"pattern": r"^\cA$"}):
        with pytest.raises(UncheckedError):
            error_of(schema, '"a"')
