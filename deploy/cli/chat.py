"""`spool chat`: a conversation with a running server, over its HTTP API."""

from __future__ import annotations

import importlib
import json
import os
import re
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import httpx

from spool.deploy.errors import RunError, UsageError

KEY_VARIABLE = "SPOOL_API_KEY"

FALLBACK_URL = "http://127.0.0.1:8000"
_HELP = "/new starts over, /quit or Ctrl-D ends, /help says this; Ctrl-C stops an answer."
_NEW, _QUIT = "/new", "/quit"
_COMMAND = re.compile(r"/\w+(\s|$)")
"""The beginning of a line that looks like a command, unlike a path."""
_PROMPT = "> "
_TRIES = 4
_LONGEST_WAIT_SECONDS = 10


def chat(
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    parameters: dict[str, Any],
    source: TextIO = sys.stdin,
    sink: TextIO = sys.stdout,
    stats: bool = False,
    ca_file: Path | None = None,
) -> int:
    """Until the end of input; `parameters` are those of each request. With `stats`, a line after each answer has its
    speed and what was drafted. `ca_file` has the authorities that the server's certificate may come from; None: those
    that the machine knows.

    In a terminal, a question that fails is told why, and the conversation goes on without it. Raises UsageError for an
    address or a file that is none, RunError when there is no server, or it refuses.
    """
    if isinstance(source, TextIOWrapper):
        source.reconfigure(errors="replace")
    key = api_key or os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    common = parameters | {"stream": True} | ({"stream_options": {"include_usage": True}} if stats else {})
    try:
        timeout = httpx.Timeout(10.0, read=None)
        with httpx.Client(base_url=url, headers=headers, timeout=timeout, verify=_trusted(ca_file)) as client:
            model = model or _first_model(client)
            if source.isatty():
                print(f"{model} at {url}. {_HELP}", file=sink)
            for question in _questions(source, sink):
                if question == _NEW:
                    messages = list(opening)
                    continue
                asked = [*messages, {"role": "user", "content": question}]
                try:
                    answer = _answer(client, {"model": model, "messages": asked, **common}, sink)
                except (RunError, httpx.TransportError) as error:
                    if not source.isatty():
                        raise
                    print(f"[{error or type(error).__name__}; the question can be asked again]", file=sink)
                    continue
                # A conversation cannot go on from an empty answer.
                if answer:
                    messages = [*asked, {"role": "assistant", "content": answer}]
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(f"--url is {url!r}, must be as in {FALLBACK_URL}: {error}") from error
    except httpx.HTTPError as error:
        remedy = " (--ca-file names the certificate of its authority)" if "CERTIFICATE_VERIFY" in str(error) else ""
        raise RunError(f"{url} does not answer: {error or type(error).__name__}{remedy}") from error
    return 0


def _trusted(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context() if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise UsageError(f"--ca-file is {ca_file}, must be certificates in PEM: {error}") from error


def _questions(source: TextIO, sink: TextIO) -> Iterator[str]:
    edited = source is sys.stdin and source.isatty()
    if edited:
        with suppress(ImportError):
            importlib.import_module("readline")  # gives input() arrow keys and a history
    while True:
        try:
            if edited:
                line = input(_PROMPT)
            else:
                line = source.readline()
                if not line:
                    return
        except EOFError:
            print(file=sink)
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sink)
            continue
        question = line.strip()
        if question == _QUIT:
            return
        if question == "/help":
            print(_HELP, file=sink, flush=True)
        elif question != _NEW and _COMMAND.match(line):
            print(f"[{question} is no command, and sent only after a space; {_HELP}]", file=sink, flush=True)
        elif question:
            yield question


def _answer(client: httpx.Client, body: dict[str, Any], sink: TextIO) -> str:
    """Prints the answer as it comes, and the model's reasoning before it, which is not returned. Ctrl-C closes the
    stream, at which the server stops working on it."""
    parts: list[str] = []
    reasoning, usage = False, None
    started = time.perf_counter()
    try:
        for name, piece in _pieces(client, body, sink):
            if name == "usage":
                usage = piece
                continue
            if name == "content":
                parts.append(piece)
                if reasoning:
                    print("\n", file=sink)
            reasoning = name != "content"
            print(piece, end="", flush=True, file=sink)
    except KeyboardInterrupt:
        print(" ...", end="", file=sink)
    print(file=sink, flush=True)
    if usage is not None:
        print(_speed(usage, time.perf_counter() - started), file=sink, flush=True)
    return "".join(parts)


def _speed(usage: dict[str, Any], seconds: float) -> str:
    tokens, spool = usage["completion_tokens"], usage["spool"]
    drafted = f"{spool['accepted']} of {spool['drafted']} drafted tokens accepted"
    return f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s with the prompt; {drafted}]"


def _pieces(client: httpx.Client, body: dict[str, Any], sink: TextIO) -> Iterator[tuple[str, Any]]:
    """Texts, and the usage if there is one, each with the field that has it. A server that says when to try again is
    asked again, unless that is long."""
    for tries_left in reversed(range(_TRIES)):
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not response.is_error:
                yield from _events(response)
                return
            response.read()
        wait = response.headers.get("Retry-After", "")
        if not tries_left or not wait.isdecimal() or int(wait) > _LONGEST_WAIT_SECONDS:
            raise RunError(f"the server refuses: {_reason(response)}")
        print(f"[{_reason(response)}; trying again in {wait} s]", flush=True, file=sink)
        time.sleep(int(wait))


def _events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    for line in _lines(response):
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RunError(f"the answer broke off: {event['error'].get('message', event['error'])}")
        if event.get("usage"):
            yield "usage", event["usage"]
        for choice in event.get("choices", ()):
            for name in ("reasoning_content", "content"):
                if piece := choice["delta"].get(name):
                    yield name, piece


def _lines(response: httpx.Response) -> Iterator[str]:
    """Those of the response's own method also end at characters that JSON texts may hold, such as U+2028."""
    held = ""
    for text in response.iter_text():
        *lines, held = (held + text).split("\n")
        yield from lines
    yield held


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.is_error:
        raise RunError(f"the server refuses: {_reason(response)}")
    model: str = response.json()["data"][0]["id"]
    return model


def _reason(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return f"{message} (--api-key or ${KEY_VARIABLE} gives a key)"
    return f"{message} (HTTP {response.status_code})"
