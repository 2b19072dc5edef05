"""One rendering of the metrics serves every scrape of a short time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# What the answer of prometheus_client's application depends on: format, compression, and which metrics are asked for.
_ASPECTS = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING")

# Different ways to ask that are remembered; further ones are answered without being remembered.
_MOST_ANSWERS = 8


@dataclass(frozen=True, slots=True)
class _Answer:
    made_at: float
    status: str
    headers: list[tuple[str, str]]
    body: tuple[bytes, ...]


class ScrapeCache:
    """Answers for the WSGI application `rendering`, which runs once in `seconds` for all who ask for the same.

    Scrapes that come while it runs wait for it. Calls come from any thread; `clock` gives monotonic seconds.
    """

    def __init__(self, rendering: WSGIApplication, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rendering = rendering
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, ...], _Answer] = {}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asked = tuple(str(environ.get(aspect, "")) for aspect in _ASPECTS)
        with self._lock:
            now = self._clock()
            self._answers = {
                key: answer for key, answer in self._answers.items() if now - answer.made_at < self._seconds
            }
            answer = self._answers.get(asked)
            if answer is None:
                answer = self._render(environ, now)
                if len(self._answers) < _MOST_ANSWERS:
                    self._answers[asked] = answer
        start_response(answer.status, answer.headers)
        return answer.body

    def _render(self, environ: WSGIEnvironment, now: float) -> _Answer:
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], error: object = None) -> Callable[[bytes], object]:
            started.append((status, headers))
            return lambda data: None

        body = tuple(self._rendering(environ, start))
        status, headers = started[-1]
        return _Answer(now, status, headers, body)
