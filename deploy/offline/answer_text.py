"""Whether text and log probabilities of an answer are those of the tokens in its receipt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from spool.scheduler.errors import SpoolError
from spool.services.gateway.answers.deltas import ContentDelta, ReasoningDelta
from spool.services.gateway.answers.markers import SPACE
from spool.services.gateway.answers.reasoning import THINK, THINK_END, Reasoning, ReasoningSplitter, ThoughtFinder
from spool.services.gateway.http.completion_builder import MIN_LOGPROB
from spool.services.gateway.stop_strings import StopStringCutter
from spool.services.gateway.token_strings import TokenNumbers, TokenStrings
from spool.services.receipts.receipt import FoundReceipt, Receipt
from spool.services.text.incremental_decoder import whole_text
from spool.services.text.tokenizer import ModelTokenizer

_SHOWN = 24
"""Characters of either text from the first difference on."""
_REASONING = ("reasoning_content", "reasoning")
_OF_A_MESSAGE = {"role", "content", "refusal", "tool_calls", *_REASONING}


class NotComparedError(SpoolError, ValueError):
    """An answer has something that cannot be compared with tokens; the message names it."""


@dataclass(slots=True)
class _Answer:
    """What a choice shows, of the events of a stream together: texts by the fields that have them."""

    texts: dict[str, str] = field(default_factory=dict)
    token_ids: list[Any] | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    is_chat: bool = False
    calls: bool = False

    def add(self, choice: Mapping[str, Any]) -> None:
        """Raises NotComparedError."""
        self.finish_reason, self.stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
        if (ids := choice.get("token_ids")) is not None:
            if not isinstance(ids, list):
                raise NotComparedError(f"token_ids is {_short(ids)}, must be a list")
            self.token_ids = [*(self.token_ids or ()), *ids]
        if "text" in choice:
            self._add_text("text", choice["text"])
        for name in ("message", "delta"):
            if name not in choice:
                continue
            message = choice[name]
            if not isinstance(message, dict):
                raise NotComparedError(f"{name} is {_short(message)}, must be an object")
            self.is_chat = True
            for key, value in message.items():
                if value is not None and (key == "refusal" or key not in _OF_A_MESSAGE):
                    raise NotComparedError(f"{name}.{key} is {_short(value)}, which no answer with a receipt has")
            self.calls = self.calls or bool(message.get("tool_calls"))
            content = message.get("content")
            self._add_text(f"{name}.content", "" if content is None else content)
            for each in _REASONING:
                if message.get(each) not in (None, ""):
                    self._add_text(f"{name}.{each}", message[each])

    def check(self) -> None:
        """Raises NotComparedError."""
        if self.stop_reason == "":
            raise NotComparedError("stop_reason is '', must be a stop string")
        if self.calls and any(text for name, text in self.texts.items() if not name.endswith(_REASONING)):
            raise NotComparedError("tool_calls stand beside content")

    def _add_text(self, name: str, text: Any) -> None:
        if not isinstance(text, str):
            raise NotComparedError(f"{name} is {_short(text)}, must be a text")
        self.texts[name] = self.texts.get(name, "") + text


def text_difference(found: FoundReceipt, receipt: Receipt, tokenizer: ModelTokenizer) -> str | None:
    """The first place where a choice says something else than the receipt's tokens; None if there is none, or no text.

    Calls of functions are not compared; beside calls there must be no content.
    """
    answer = _Answer()
    try:
        for choice in found.choices:
            answer.add(choice)
        answer.check()
    except NotComparedError as error:
        return f"text not compared: {error}"
    if answer.token_ids not in (None, list(receipt.output)):
        return "token_ids are not the output_token_ids of the receipt"
    if not answer.texts:
        return None
    sayings = list(_sayings(answer, receipt, tokenizer))
    if not sayings:
        return f"stop_reason is {answer.stop_reason!r}, which the last token is not and does not complete"
    differences = [_difference(answer, *saying) for saying in sayings]
    return None if None in differences else max(filter(None, differences))[1]


def logprob_difference(
    found: FoundReceipt, receipt: Receipt, logprobs: Sequence[float], tokenizer: ModelTokenizer
) -> str | None:
    """The first log probability of the output in a choice that is not that of `logprobs`, or of another token; None if
    there is none, or the choice has none. Those of an echoed prompt are not compared, nor are those of other tokens."""
    count, known = len(receipt.output), len(found.logprobs)
    if known not in (0, count, count + len(receipt.prompt)):
        return f"logprobs has {known} tokens, the receipt {count} of output"
    names, numbers = TokenStrings(tokenizer), TokenNumbers(tokenizer)
    rows = zip(receipt.output, logprobs, found.logprobs[-count:], found.logprob_tokens[-count:], strict=False)
    for place, (token, here, there, text) in enumerate(rows):
        if text not in (names.of(token).text, numbers.of(token).text):
            return f"logprobs of output token {place} is of {_short(text)}, the token is {names.of(token).text!r}"
        if there != max(here, MIN_LOGPROB):
            return f"logprobs of output token {place} is {there!r} in the answer, and {here!r} here"
    return None


def compared(found: FoundReceipt) -> str:
    """What of an answer without differences was compared, and what was not, as a report has it after its tokens."""
    answer = _Answer()
    for choice in found.choices:
        answer.add(choice)
    said = ", text" if any(answer.texts.values()) or (answer.texts and not answer.calls) else ""
    known = ", log probabilities" if found.logprobs else ""
    return f"{said}{known}{'; tool_calls not compared' if answer.calls else ''}"


def _sayings(answer: _Answer, receipt: Receipt, tokenizer: ModelTokenizer) -> Iterator[tuple[str, str]]:
    """What the tokens may have been answered as, reasoning and content: with special tokens and without, after the
    prompt's text and without, and as the prompt may leave reasoning to the model."""
    prompt, strings, seen = receipt.prompt, TokenStrings(tokenizer), set()
    for skips in (True, False):
        begun = strings.begun_character(prompt, skips)
        echo = ""
        if "text" in answer.texts:
            echo = whole_text(partial(tokenizer.decode, skip_special_tokens=skips), prompt, begun)
        for reasoning in _reasonings(answer, receipt, tokenizer):
            marks = frozenset() if reasoning is Reasoning.NONE else frozenset({THINK, THINK_END})
            for tokens in (receipt.output, receipt.output[:-1]):
                decoder = tokenizer.decoder(prompt, skips, marks, begun)
                pieces = [*(decoder.push((token,)) for token in tokens), decoder.finish()]
                for text in _ended(answer, receipt, pieces, reasoning):
                    splitter = ReasoningSplitter(reasoning)
                    deltas = splitter.push(text) + splitter.finish()
                    thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
                    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
                    seen |= {(thought, content), (thought, echo + content)}
    yield from seen


def _reasonings(answer: _Answer, receipt: Receipt, tokenizer: ModelTokenizer) -> Iterator[Reasoning]:
    yield Reasoning.NONE
    if answer.is_chat:
        yield Reasoning.POSSIBLE
        prompt = tokenizer.decode(receipt.prompt, skip_special_tokens=False)
        if prompt.rfind(THINK) > prompt.rfind(THINK_END):
            yield Reasoning.OPEN
            yield Reasoning.BEGUN


def _ended(answer: _Answer, receipt: Receipt, pieces: Sequence[str], reasoning: Reasoning) -> Iterator[str]:
    """The texts that an output may end as; `pieces` are those of its tokens, perhaps but the last, and the rest.

    The last token must complete a stop string, or be the stop token. Another end may be a token without text.
    """
    stop, count = answer.stop_reason, len(receipt.output)
    if stop is not None and not isinstance(stop, str):
        if stop == receipt.output[-1] and len(pieces) == count:
            yield "".join(pieces)
        return
    if stop is None:
        if len(pieces) > count or answer.finish_reason in ("stop", "tool_calls"):
            yield "".join(pieces)
        return
    for includes in (False, True):
        cutter, thoughts, text = StopStringCutter([stop], includes), ThoughtFinder(reasoning), ""
        for number, piece in enumerate(pieces, 1):
            thought, rest = thoughts.push(piece)
            if number == len(pieces):
                held, more = thoughts.finish()
                thought, rest = thought + held, rest + more
            may_end = number > receipt.sampling.min_tokens or number == len(pieces)
            text += thought + (cutter.push(rest) if may_end else rest)
            if cutter.hit is not None:
                break
        # The last of the pieces is what was held back until the end.
        if cutter.hit is not None and number >= count:
            yield text


def _difference(answer: _Answer, thought: str, content: str) -> tuple[int, str] | None:
    """How much of an answer fits, and where it does not. It may leave reasoning out."""
    fitting = 0
    for name, text in answer.texts.items():
        said = thought if name.endswith(_REASONING) else content
        if answer.is_chat:
            text, said = text.strip(SPACE), said.strip(SPACE)
        if text != said and not (answer.calls and not text):
            place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, said, strict=False)))
            rest = f"{_shown(text[place:])} at character {place}, the tokens with {_shown(said[place:])}"
            return fitting + place, f"{name} goes on with {rest}"
        fitting += len(text)
    return None


def _shown(text: str) -> str:
    return repr(text[:_SHOWN]) if text else "nothing"


def _short(value: Any) -> str:
    return repr(value)[:_SHOWN]
