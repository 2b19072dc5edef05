"""The state of a grammar is a function of the output: however a worker came there, the next tokens are the same."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from spool.engine.sampling.grammars import (
    GrammarError,
    GrammarRow,
    Grammars,
    GrammarState,
    GrammarTokens,
    check_grammar,
)
from spool.scheduler.sampling import MAX_GRAMMAR_BYTES, Grammar
from spool.services.gateway.grammar_check import definition
from tests.support.tiny_chat import END, tiny_chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_chat_tokenizer().backend_tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["beside the model", "by the caller"])
def grammars(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Grammars:
    return Grammars(tokenizer, beside_model=request.param)


def grammar(tokenizer: Tokenizer, kind: str, text: str) -> Grammar:
    return Grammar(definition(kind, text), frozenset([tokenizer.token_to_id(END)]))


def allowed(masks: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() for row in masks]


def test_an_output_that_does_not_fit_is_told_and_nothing_else_suffers(grammars: Grammars, tokenizer: Tokenizer) -> None:
    asked = grammar(tokenizer, "choice", '["yes", "no"]')
    wrong, right = tokenizer.encode("yo").ids, tokenizer.encode("y").ids
    masks = grammars.masks(
        [GrammarRow(GrammarState(), asked, wrong), GrammarRow(GrammarState(), asked, right)]
    ).result()
    assert masks.errors == ["the output does not follow its grammar", None]
    assert allowed(masks.allowed)[1] == tokenizer.encode("e").ids


def test_forced_and_allowed_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    row = GrammarRow(GrammarState(), grammar(tokenizer, "choice", '["yesterday", "yes"]'), [])
    assert grammars.forced(row) == tokenizer.encode("yes").ids
    assert grammars.allowed_prefix(row, tokenizer.encode("yet").ids) == tokenizer.encode("ye").ids


def test_limits(tokenizer: Tokenizer) -> None:
    tokens = GrammarTokens(tokenizer)
    check_grammar(tokens, definition("regex", "a+"))
    with pytest.raises(GrammarError, match=r"^no text fits$"):
        check_grammar(tokens, definition("lark", "start: A\nA: /a/ & /b/"))
    with pytest.raises(ValueError, match="type is 'x', must be one of"):
        definition("json_schema", '{"type": "x"}')
    for bad in (definition("grammar", "start: A\nA: /a/ & /b/"), "{"):
        with pytest.raises(GrammarError):
            check_grammar(tokens, bad)
    with pytest.raises(ValueError, match=r"grammar has 65537 characters, must have between 1 and 65536"):
        Grammar("x" * (MAX_GRAMMAR_BYTES + 1), frozenset([1]))
    with pytest.raises(ValueError, match=r"end_token_ids of the grammar is set\(\)"):
        Grammar("x", frozenset())
