"""Text and bytes of single tokens, as reports of log probabilities show them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from spool.services.gateway.token_strings import TokenStrings
from spool.services.text.incremental_decoder import whole_text
from spool.services.text.tokenizer import ModelTokenizer
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


# "\u20ac" and "\U0001f600" in tokens that end one character and begin the next.
MERGES = (("t", "ð"), ("ð", "Ł"), ("Ģ", "â"), ("Ĥ", "¬"))


@pytest.fixture(scope="module", params=[byte_level(*MERGES), byte_fallback()], ids=["byte-level", "byte-fallback"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return strings_of(request.param, tmp_path_factory.mktemp("model"))[0]


@given(text=st.text(alphabet="ab té€漢😀\ufffd", max_size=20), data=st.data())
def test_a_character_that_the_prompt_begins_belongs_to_the_output(
    model: ModelTokenizer, text: str, data: st.DataObject
) -> None:
    tokens, starts = model.encode_with_offsets(text)
    cut = data.draw(st.integers(0, len(tokens)))
    begun = TokenStrings(model).begun_character(tokens[:cut], True)
    before = whole_text(model.decode, tokens[:cut], begun)
    decoder = model.decoder(tokens[:cut], begun=begun)
    output, offsets = "", []
    for token in tokens[cut:]:
        offsets.append(len(before + output) + decoder.held_characters)
        output += decoder.push([token])
    assert before + output + decoder.finish() == model.decode(tokens)
    assert before.count("\ufffd") == model.decode(tokens)[: len(before)].count("\ufffd")
    if model.decode(tokens) == text and "\ufffd" not in text:
        assert offsets == starts[cut:]
