"""The state of a grammar is a function of the output: however a worker came there, the next tokens are the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.sampling.grammars import GrammarError, GrammarRow, Grammars, GrammarState, GrammarTokens, check_grammar
from engine.sampling.logits_scan import LogitsScan
from scheduler.sampling import MAX_GRAMMAR_BYTES, Grammar
from services.gateway.grammar_check import definition
from tests.support.tiny_chat import END, tiny_chat_tokenizer

SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}'


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


@pytest.mark.parametrize(
    ("kind", "text"), [("json_schema", SCHEMA), ("regex", "(ab?c)*x{2,5}"), ("choice", '["ab", "abc"]')]
)
def test_state_does_not_depend_on_the_way(grammars: Grammars, tokenizer: Tokenizer, kind: str, text: str) -> None:
    asked, end = grammar(tokenizer, kind, text), tokenizer.token_to_id(END)
    rng = random.Random(2)
    state, output = GrammarState(), list[int]()
    ends = 0
    for _ in range(60):
        fresh, kept = (grammars.masks([GrammarRow(one, asked, output)]).result() for one in (GrammarState(), state))
        assert (fresh.errors, kept.errors) == ([None], [None])
        [choices] = allowed(fresh.allowed)
        assert allowed(kept.allowed) == [choices]
        assert kept.complete == fresh.complete == ([0] if choices == [end] else [])
        ends += end in choices
        going_on = [token for token in choices if token != end]
        if going_on and rng.random() < 0.8:
            output = [*output, rng.choice(going_on)]
        else:
            output = output[: rng.randrange(len(output) + 1)]
    # White space at random keeps JSON from its end.
    assert ends > 0 or kind == "json_schema"


def test_masks_along_draft_tokens_are_those_of_the_longer_outputs(grammars: Grammars, tokenizer: Tokenizer) -> None:
    asked = grammar(tokenizer, "json_schema", SCHEMA)
    text = tokenizer.encode('{"a": [1, 2]}').ids
    state = GrammarState()
    rows = [GrammarRow(state, asked, text[:3], text[3:]), GrammarRow(GrammarState(), asked, [])]
    masks = grammars.masks(rows).result()
    for place in range(len(text) - 2):
        alone = grammars.masks([GrammarRow(GrammarState(), asked, text[: 3 + place])]).result()
        assert allowed(masks.allowed)[place] == allowed(alone.allowed)[0]
    assert masks.complete == [len(text) - 3]
    # What was drafted is no part of the state.
    again = grammars.masks([GrammarRow(state, asked, text[:3])]).result()
    assert allowed(again.allowed)[0] == allowed(masks.allowed)[0]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_tokens_have_no_chance(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 20, generator=torch.manual_seed(0)).to(dtype)
    wanted = torch.rand(2, 20) < 0.5
    bits = np.packbits(np.pad(wanted.numpy(), ((0, 0), (0, 12))), axis=1, bitorder="little")
    expected = logits.clone()
    expected[[0, 2]] = expected[[0, 2]].masked_fill(~wanted, -torch.inf)
    masked = logits.clone()
    LogitsScan().forbid(masked, [0, 2], bits)
    assert torch.equal(masked, expected)
    # A draft that knows some tokens only.
    token_ids = torch.tensor([1, 5, 19])
    few = logits[:2, token_ids].clone()
    LogitsScan().forbid(few, [0, 1], bits, token_ids)
    assert torch.equal(few, logits[:2, token_ids].masked_fill(~wanted[:, token_ids], -torch.inf))


def test_limits(tokenizer: Tokenizer) -> None:
    tokens = GrammarTokens(tokenizer)
    check_grammar(tokens, definition("regex", "a+"))
    with pytest.raises(GrammarError, match=r"too many expressions constructed$"):
        check_grammar(tokens, definition("regex", "((a{1,1000}){1,1000}){1,1000}"))
    with pytest.raises(GrammarError, match=r"^no text fits$"):
        check_grammar(tokens, definition("lark", "start: A\nA: /a/ & /b/"))
    for bad in (definition("grammar", "start: A\nA: /a/ & /b/"), definition("json_schema", '{"type": "x"}'), "{"):
        with pytest.raises(GrammarError):
            check_grammar(tokens, bad)
    with pytest.raises(ValueError, match=r"at least one choice"):
        definition("choice", "[]")
    with pytest.raises(ValueError, match=r"grammar has 65537 characters, must have between 1 and 65536"):
        Grammar("x" * (MAX_GRAMMAR_BYTES + 1), frozenset([1]))
    with pytest.raises(ValueError, match=r"end_token_ids of the grammar is set\(\)"):
        Grammar("x", frozenset())
