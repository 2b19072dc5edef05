"""What a stream has delivered, over all the calls that it took."""

from __future__ import annotations

from spool.client.v1.generation_pb2 import GeneratedChoice, GenerateStreamResponse

# What any part of a choice may have. Everything else comes with its first part, and once.
_GROWING = {"index", "text", "token_ids", "logprobs", "finish_reason", "stop_string", "stop_token_id", "receipt"}


class OutputChangedError(RuntimeError):
    """A stream broke, and the same request then gave other output than before.

    The server's model, or its numbers, have changed in between: what has been delivered stays valid, but cannot be
    continued.
    """


class IncompleteOutputError(RuntimeError):
    """A stream ended well, but without the usage that a server sends last."""


class ReceivedOutput:
    """The output of one request, of which several calls may each deliver the beginning again.

    `begin_call` comes before each call, `take` with each message of it, `end_call` after a call that ended well.
    """

    def __init__(self) -> None:
        self._id = ""
        self._choices: dict[int, _ReceivedChoice] = {}
        self.complete = False
        """The usage has come, after which nothing does."""

    def begin_call(self) -> None:
        for choice in self._choices.values():
            choice.rewind()

    def take(self, message: GenerateStreamResponse) -> GenerateStreamResponse | None:
        """The part of the message that is new, with the id of the first call; None if nothing is.

        Raises OutputChangedError where the message is not what an earlier call delivered.
        """
        self._id = self._id or message.id
        message.id = self._id
        if message.HasField("usage"):
            unfinished = [index for index, choice in self._choices.items() if choice.behind]
            if unfinished:
                raise OutputChangedError(f"choice {unfinished[0]} ended before what an earlier call delivered of it")
            self.complete = True
            return message
        choice = self._choices.setdefault(message.choice.index, _ReceivedChoice())
        return message if choice.take(message.choice) else None

    def end_call(self) -> None:
        """Raises IncompleteOutputError unless all has come."""
        if not self.complete:
            raise IncompleteOutputError("the stream ended without its usage, which is its last message")


class _ReceivedChoice:
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parts: list[str] = []
        self._end: int = 0
        """The finish reason, once it came."""
        # What earlier calls delivered, and how much of it this call has repeated.
        self._known_tokens = 0
        self._known_text = ""
        self._known_end = 0
        self._token_place = 0
        self._text_place = 0
        self._repeating = False

    def rewind(self) -> None:
        self._known_tokens, self._known_text, self._known_end = len(self._tokens), "".join(self._parts), self._end
        self._parts = [self._known_text]
        self._token_place = self._text_place = 0
        self._repeating = True

    @property
    def behind(self) -> bool:
        """This call has not repeated all that earlier ones delivered."""
        return self._token_place < self._known_tokens or self._text_place < len(self._known_text)

    def take(self, choice: GeneratedChoice) -> bool:
        """Cuts off what is known already; whether anything is left."""
        known = self._tokens[self._token_place : min(self._token_place + len(choice.token_ids), self._known_tokens)]
        if list(choice.token_ids[: len(known)]) != known:
            raise self._changed(choice, "tokens", self._token_place)
        text = self._known_text[self._text_place : self._text_place + len(choice.text)]
        if not choice.text.startswith(text):
            raise self._changed(choice, "text", self._text_place)
        self._token_place += len(known)
        self._text_place += len(text)
        if choice.finish_reason and self.behind:
            raise self._changed(choice, "an end", self._token_place)
        if self._repeating:
            self._cut(choice, len(known), len(text))
        if self._known_end:
            if choice.token_ids or choice.text or choice.finish_reason not in (0, self._known_end):
                raise self._changed(choice, "another end", self._token_place)
            return False
        self._tokens += choice.token_ids
        self._parts.append(choice.text)
        self._end = choice.finish_reason
        is_new = not self._repeating or bool(choice.token_ids or choice.text or choice.finish_reason)
        self._repeating = self._repeating and self.behind
        return is_new

    def _cut(self, choice: GeneratedChoice, tokens: int, characters: int) -> None:
        for field, _ in choice.ListFields():
            if field.name not in _GROWING:
                choice.ClearField(field.name)
        del choice.token_ids[:tokens]
        del choice.logprobs[:tokens]
        choice.text = choice.text[characters:]

    def _changed(self, choice: GeneratedChoice, what: str, place: int) -> OutputChangedError:
        return OutputChangedError(
            f"choice {choice.index}: the repeated call has {what} at {place} that differ from what was delivered before"
        )
