"""Long texts: how many tokens they have at least, and that other threads go on while they are encoded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from spool.services.text.chat_template import ChatTemplate, UnparsedArguments
from spool.services.text.plain_specials import PlainSpecials
from spool.services.text.token_lengths import most_characters_per_token
from spool.services.text.tokenizer import ModelTokenizer

Change = Callable[[tokenizers.Tokenizer], None]
MERGES = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("Ġ", "Ġ"), ("e", "a")]


def byte_level(change: Change = lambda tokenizer: None) -> tokenizers.Tokenizer:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<start>"])
    change(tokenizer)
    return tokenizer


def with_unknown_bytes(unk_token: str | None) -> tokenizers.Tokenizer:
    """As many published tokenizers: trained on texts that lack some bytes."""
    words = ["<unk>", "a", "aa", "Ġ"]
    model = models.BPE({word: index for index, word in enumerate(words)}, [("a", "a")], unk_token=unk_token)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def byte_fallback(byte_count: int = 256) -> tokenizers.Tokenizer:
    words = ["<unk>", "▁", "a", "aa", "▁aa", *(f"<0x{byte:02X}>" for byte in range(byte_count))]
    vocabulary = {token: index for index, token in enumerate(words)}
    merges = [("a", "a"), ("▁", "aa")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def setting(name: str, value: Any) -> Change:
    return lambda tokenizer: setattr(tokenizer, name, value)


CERTAIN = [
    byte_level(),
    byte_level(setting("normalizer", normalizers.NFC())),
    byte_level(setting("normalizer", normalizers.Sequence([normalizers.NFD(), normalizers.Prepend("b")]))),
    byte_level(setting("normalizer", normalizers.Replace("b", "cd"))),
    byte_fallback(),
    with_unknown_bytes(unk_token="<unk>"),
]
UNCERTAIN = [
    byte_level(setting("normalizer", normalizers.Strip())),
    byte_level(setting("normalizer", normalizers.Replace("aaa", "b"))),
    byte_level(setting("normalizer", normalizers.Replace(Regex(" +"), " "))),
    byte_level(setting("normalizer", normalizers.NFKC())),
    byte_level(setting("pre_tokenizer", pre_tokenizers.Whitespace())),
    byte_level(
        setting(
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
        )
    ),
    byte_level(lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<wide>", rstrip=True)]) and None),
    byte_fallback(byte_count=200),
    with_unknown_bytes(unk_token=None),
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
]


def most(tokenizer: tokenizers.Tokenizer) -> int | None:
    return most_characters_per_token(tokenizer, tokenizer.get_vocab(with_added_tokens=True))


@pytest.mark.parametrize("tokenizer", CERTAIN)
@given(
    parts=st.lists(
        st.one_of(
            st.text(max_size=5),
            st.sampled_from(
                ["a" * 8, "a" * 16, " " * 9, "<start>", "e\u0301a", "\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8"]
            ),
        ),
        max_size=20,
    )
)
def test_no_text_has_fewer_tokens_than_is_certain(tokenizer: tokenizers.Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    length = most(tokenizer)
    assert length is not None
    assert len(tokenizer.encode(text, add_special_tokens=False)) * length >= len(text)


@pytest.mark.parametrize("tokenizer", UNCERTAIN)
def test_nothing_is_certain_where_characters_can_vanish(tokenizer: tokenizers.Tokenizer) -> None:
    assert most(tokenizer) is None


def encode(model: ModelTokenizer) -> None:
    model.encode("hello, world! " * 50_000)


def encode_for_echo(model: ModelTokenizer) -> None:
    model.encode_with_offsets("hello, world! " * 50_000)


def encode_with_a_special_text(model: ModelTokenizer) -> None:
    model.encode_chat([{"role": "user", "content": "hello, <start> world! " * 30_000}])


def decode(model: ModelTokenizer) -> None:
    model.decode([0] * 1_000_000)


@pytest.mark.parametrize("work", [encode, encode_for_echo, encode_with_a_special_text, decode])
def test_other_threads_go_on_meanwhile(tmp_path: Path, work: Callable[[ModelTokenizer], None]) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    model = ModelTokenizer(tmp_path)
    worker = threading.Thread(target=work, args=(model,))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.0005)  # gives the interpreter's lock away
        turns += 1
    # With the lock held throughout, there are two or three: before, after, and between two calls of the library.
    assert turns > 10


def test_a_search_for_special_texts_is_that_of_one_call() -> None:
    """Texts are searched in pieces, of which some end within a special text or begin within one."""
    specials = frozenset({"<a>", "<a><b>", "<", "ab<"})
    tokenizer = tokenizers.Tokenizer(models.BPE())
    plain = PlainSpecials(tokenizer, specials)
    text = "".join("xyz"[: place % 3] + "ab<a><b><a>"[place % 5 :] for place in range(20_000))
    marked = plain.marked(text)
    assert plain.unmarked(marked) == text
    assert not any(special in marked for special in specials if len(special) > 1)


def test_many_unparsed_arguments_are_written_as_they_are() -> None:
    arguments = [UnparsedArguments(f'{{"n": {number}') for number in range(20_000)]
    text = ChatTemplate("{{ messages[0].calls | tojson }}", {}).render(
        [{"calls": [*arguments, "\ue000unparsed 99999999\ue001", "\ue000unparsed x\ue001"]}]
    )
    inner = ["\ue000unparsed 99999999\ue001", "\ue000unparsed x\ue001"]
    assert text == f"[{', '.join([*arguments, *(json.dumps(one, ensure_ascii=False) for one in inner)])}]"
