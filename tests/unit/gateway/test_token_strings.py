"""Text and bytes of single tokens, as reports of log probabilities show them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.token_strings import TokenStrings
from services.text.tokenizer import ModelTokenizer
from tests.unit.services.test_tokenizer import byte_fallback, byte_level


def strings_of(tokenizer: tokenizers.Tokenizer, folder: Path) -> tuple[ModelTokenizer, TokenStrings]:
    tokenizer.save(str(folder / "tokenizer.json"))
    model = ModelTokenizer(folder)
    return model, TokenStrings(model)


@pytest.fixture(scope="module")
def byte_strings(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, TokenStrings]:
    return strings_of(byte_level(), tmp_path_factory.mktemp("bytes"))


@given(text=st.text(alphabet="th \n<é漢😀\u0301", max_size=20))
def test_bytes_of_tokens_make_up_the_text(byte_strings: tuple[ModelTokenizer, TokenStrings], text: str) -> None:
    tokenizer, strings = byte_strings
    assert b"".join(strings.of(token).data for token in tokenizer.encode(text)) == text.encode()


def test_parts_of_characters_are_shown_as_bytes(byte_strings: tuple[ModelTokenizer, TokenStrings]) -> None:
    tokenizer, strings = byte_strings
    assert [strings.of(token).text for token in tokenizer.encode("é th")] == ["\\xc3", "\\xa9", " ", "th"]
    assert strings.of(tokenizer.encode("<end>")[0]).text == "<end>"
    assert strings.of(100_000).text == ""


def test_marks_for_spaces_and_bytes(tmp_path: Path) -> None:
    tokenizer, strings = strings_of(byte_fallback(), tmp_path)
    shown = [strings.of(token).text for token in tokenizer.encode("a bé")]
    assert shown == [" a", " b", "\\xc3", "\\xa9"]
