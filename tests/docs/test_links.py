"""What documents point at is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, anchors, links, name_of, named_files

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


@documents
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in links(document):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@documents
def test_named_files_exist(document: Path) -> None:
    missing = [name for name in named_files(document) if not (ROOT / name).exists()]
    assert missing == []


def test_every_document_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        document = todo.pop()
        if document in reached:
            continue
        reached.add(document)
        places = [link.partition("#")[0] for link in links(document) if "://" not in link]
        found = [(document.parent / place).resolve() for place in places if place]
        found += [ROOT / name for name in named_files(document)]
        todo += [place for place in found if place in DOCUMENTS]
    assert [name_of(document) for document in DOCUMENTS if document not in reached] == []
