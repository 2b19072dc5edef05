"""Self-dialogue without a model: turns follow the chat template whatever is chosen."""

import random
import re

import pytest

from bench.distill.chat_frame import ChatFrame, read_chat_frame, special_token_ids
from bench.distill.dialogue import DialogueRow, DialogueStyle, TokenKind
from tests.support.tiny_chat import END, OTHER, START, tiny_chat_tokenizer

LENGTH = 400


@pytest.fixture(scope="module")
def frame() -> ChatFrame:
    tokenizer = tiny_chat_tokenizer()
    return read_chat_frame(tokenizer, [tokenizer.convert_tokens_to_ids(END)])


def converse(
    frame: ChatFrame, seed: int, style: DialogueStyle
) -> tuple[list[int], list[TokenKind], list[float], list[int]]:
    """Tokens, kinds, temperatures they were chosen at, and what a random chooser chose for each place."""
    tokenizer = tiny_chat_tokenizer()
    openers = [[tuple(tokenizer.encode(text)) for text in ("Tell ", "Say ")]]
    choices, chooser = random.Random(seed), random.Random(seed + 1)
    row = DialogueRow(frame, openers, style, LENGTH, choices)
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz") + sorted(frame.stops)
    tokens, kinds, temperatures, chosen = [], [], [], []
    for _ in range(LENGTH):
        temperatures.append(row.temperature)
        chosen.append(chooser.choice(letters))
        token, kind = row.next(chosen[-1])
        tokens.append(token)
        kinds.append(kind)
    return tokens, kinds, temperatures, chosen


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_dialogues_of_the_template(frame: ChatFrame, seed: int) -> None:
    tokens, kinds, temperatures, chosen = converse(frame, seed, DialogueStyle(answer_limit=0.05))
    text = tiny_chat_tokenizer().decode(tokens)
    turn = r"{}{}\n(?:Tell |Say )?([a-z]*){}\n"
    user, answer = (turn.format(START, role, END) for role in ("user", "assistant"))
    whole = re.match(f"(?:{user}{answer})*", text)
    assert whole is not None
    # What is left is at most one turn of each, the last one cut off by the end of the row.
    assert text[whole.end() :].count(START) <= 2
    assert len(re.findall(answer, text)) >= 3
    assert all(len(found) <= 0.05 * LENGTH for found in re.findall(answer, text))
    for token, kind, temperature, choice in zip(tokens, kinds, temperatures, chosen, strict=True):
        if kind is not TokenKind.FORCED:
            assert token == choice
            assert (kind is TokenKind.GREEDY) == (temperature == 0)


def test_turns_cut_short_are_ended_by_force(frame: ChatFrame) -> None:
    style = DialogueStyle(answer_limit=0.01, begun=0.0, greedy=1.0)
    tokens, kinds, _, chosen = converse(frame, 3, style)
    ends = [place for place, token in enumerate(tokens) if token in frame.stops]
    assert {kinds[place] is TokenKind.FORCED for place in ends} == {True, False}
    assert all((kinds[place] is TokenKind.FORCED) == (chosen[place] != tokens[place]) for place in ends)
    assert TokenKind.SAMPLED not in kinds


def test_special_tokens_without_a_role_are_known(frame: ChatFrame) -> None:
    tokenizer = tiny_chat_tokenizer()
    ids = tokenizer.convert_tokens_to_ids([START, END, OTHER])
    assert special_token_ids(tokenizer) == set(ids)
    assert frame.forbidden == (ids[0], ids[2])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['content'] }}<end>{% endfor %}", "puts nothing before"),
        ("{% for m in messages %}<start>{{ m['content'] }}\n{% endfor %}", "ends user turns with none of the stop"),
        ("<start>{{ messages[0]['content'] }}<end>", "does not show each message once"),
    ],
)
def test_templates_that_cannot_be_taken_apart(template: str, message: str) -> None:
    tokenizer = tiny_chat_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        read_chat_frame(tokenizer, [tokenizer.convert_tokens_to_ids(END)])
