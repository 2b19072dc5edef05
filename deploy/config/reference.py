"""docs/configuration.md, and tables of other files' fields, from the fields themselves."""

from __future__ import annotations

from pydantic import BaseModel

from deploy.config.example import shown_value
from deploy.config.field_documents import FieldDocument, documents
from deploy.config.spool_config import SpoolConfig

_HEAD = """\
# Configuration

One file, `spool.yaml`, configures everything. This page is what `spool config explain --markdown` prints. Sections may
be left out, and so may every field that has a default. `spool config show --defaults` prints a file with all of them,
`spool config check FILE` says what is wrong with one, and `--set scheduling.batch_size=16` overrides a field on the
command line of a command that reads it. The most used fields are options of `spool serve` too, under the same names.
"""

_TABLE = """
| field | type | default | |
| --- | --- | --- | --- |
"""


def reference() -> str:
    """The page."""
    return _HEAD + field_tables(SpoolConfig, SpoolConfig())


def field_tables(model: type[BaseModel], defaults: BaseModel | None = None, level: str = "##") -> str:
    """Markdown: a table for each section, of the fields that belong to no section below it; those of no section first.

    `defaults` is the file as it is by default; without it the fields' own defaults count.
    """
    heads: dict[tuple[str, ...], str] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for document in documents(model, defaults):
        if document.section:
            optional = " May be null, for none." if document.optional else ""
            if document.listed:
                optional = " Each entry of the list has these fields."
            heads[document.path] = f"\n{level} {document.name}\n\n{document.description}{optional}\n"
        else:
            rows.setdefault(document.path[:-1], []).append(_row(document))
    tables = {path: "".join([_TABLE, *fields]) for path, fields in rows.items()}
    return "".join([tables.get((), ""), *(head + tables.get(path, "") for path, head in heads.items())])


def _row(document: FieldDocument) -> str:
    default = "required" if document.required else f"`{shown_value(document.default)}`"
    cells = (f"`{document.path[-1]}`", document.type, default, document.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
