"""The file that names the tokens of a draft's head: what it may hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from spool.engine.errors import DraftVocabularyError
from spool.engine.models.draft_vocabulary import read_draft_vocabulary
from spool.engine.models.source import DRAFT_VOCABULARY


def test_ids_are_read_as_they_stand(tmp_path: Path) -> None:
    assert read_draft_vocabulary(tmp_path, 10) is None
    (tmp_path / DRAFT_VOCABULARY).write_text('{"token_ids": [0, 3, 9]}')
    token_ids = read_draft_vocabulary(tmp_path, 10)
    assert token_ids is not None
    assert token_ids.dtype == torch.int64
    assert token_ids.tolist() == [0, 3, 9]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1, 2]", "holds [1, 2], must hold an object"),
        ("{}", "has the keys [], must have token_ids alone"),
        ('{"token_ids": [1], "more": 2}', "has the keys ['more', 'token_ids'], must have token_ids alone"),
        ('{"token_ids": 3}', "token_ids is 3, must be a list of integers"),
        ('{"token_ids": "1\\n2"}', r"token_ids is '1\n2', must be a list of integers"),
        ('{"token_ids": []}', "token_ids is empty, must name at least one token"),
        ('{"token_ids": [1, 2.0]}', "token_ids[1] is 2.0, must be an integer"),
        ('{"token_ids": [0, true]}', "token_ids[1] is True, must be an integer"),
        ('{"token_ids": [1, 5, 4]}', "token_ids[2] is 4, must be above the one before, which is 5"),
        ('{"token_ids": [1, 1]}', "token_ids[1] is 1, must be above the one before, which is 1"),
        ('{"token_ids": [-2, 1]}', "token_ids[0] is -2, must be at least 0 and below the vocabulary size 10"),
        ('{"token_ids": [1, 10]}', "token_ids[1] is 10, must be at least 0 and below the vocabulary size 10"),
        *(
            (content, "cannot be read as JSON: ")
            for content in (b"", b"\xff\x00", b"[" * 200_000, b"[" + b"1" * 5000 + b"]")
        ),
    ],
    ids=range(16),
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: str | bytes, problem: str) -> None:
    path = tmp_path / DRAFT_VOCABULARY
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rest = "[^\n]+" if problem.endswith(": ") else ""
    with pytest.raises(DraftVocabularyError, match=f"^{re.escape(str(path))}:? {re.escape(problem)}{rest}$"):
        read_draft_vocabulary(tmp_path, 10)
