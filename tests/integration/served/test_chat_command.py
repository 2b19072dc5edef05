"""`spool chat` against a real gateway over workers of known output."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path

import pytest
from pydantic import SecretStr

from spool.deploy.cli.chat import chat
from spool.deploy.errors import RunError
from spool.services.gateway.settings import GatewaySettings, TlsFiles
from tests.support.certificates import issue
from tests.support.command_line import SPOOL, spool
from tests.support.gateway import Gateways, stand_in_gateways
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG

TOKENS = 30


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with stand_in_gateways(tmp_path_factory.mktemp("chat"), step_seconds=0.05) as gateways:
        yield gateways


def answer(gateways: Gateways, messages: list[dict[str, str]], count: int = TOKENS) -> str:
    tokenizer = gateways.tokenizer
    return tokenizer.decode(continuation(tokenizer.encode_chat(messages, add_generation_prompt=True), count))


def test_a_conversation_keeps_its_history(gateways: Gateways) -> None:
    with gateways.serve() as served:
        words = f"--url {served.url} --temperature 0 --max-tokens {TOKENS} --priority -3"
        options = (*words.split(), "--system", "be brief")
        ended = spool("chat", *options, given="hello there\n\nand now\n/new\nhello there\n")
    assert ended.code == 0, ended.err
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    first = answer(gateways, history)
    history += [{"role": "assistant", "content": first}, {"role": "user", "content": "and now"}]
    assert ended.out == f"{first}\n{answer(gateways, history)}\n{first}\n"


def test_stats_follow_each_answer(gateways: Gateways) -> None:
    with gateways.serve() as served:
        options = f"--url {served.url} --temperature 0 --max-tokens {TOKENS} --stats".split()
        ended = spool("chat", *options, given="hello there\n/new\nhello there\n")
    assert ended.code == 0, ended.err
    text, stats = answer(gateways, [{"role": "user", "content": "hello there"}]), r"\[30 tokens, [\d.]+ tokens/s .*"
    found = re.findall(rf"{re.escape(text)}\n{stats}; (\d+) of (\d+) drafted tokens accepted\]\n", ended.out)
    assert len(found) == 2
    assert all(0 < int(accepted) <= int(drafted) for accepted, drafted in found)


def test_an_interrupt_stops_the_answer_and_not_the_conversation(gateways: Gateways) -> None:
    with gateways.serve() as served:
        command = [str(SPOOL), "chat", "--url", served.url, "--temperature", "0"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"tell it all\n")
            process.stdin.flush()
            begun = process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            # The whole answer would take 38 seconds or more: 1967 tokens, at most 5 in two steps.
            gateways.wait_until_idle(30)
            process.stdin.write(b"/new\n/quit\n")
            process.stdin.close()
            rest = process.stdout.read()
            assert process.wait(LONG) == 0, process.stderr.read() if process.stderr is not None else ""
    text = (begun + rest).decode(errors="replace")
    assert text.endswith(" ...\n")
    whole = answer(gateways, [{"role": "user", "content": "tell it all"}], 1500)
    assert whole.startswith(text.removesuffix(" ...\n").rstrip("\ufffd"))


class _Answering(BaseHTTPRequestHandler):
    """An OpenAI server with one answer to everything."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = f"{asked['messages'][-1]['content']}\u2028\x85!"
        self.send_response(200)
        self.end_headers()
        event = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
        self.wfile.write(f"data: {event}\r\n\r\ndata: [DONE]\r\n\r\n".encode())


@contextmanager
def answering() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_any_text_can_be_asked_and_answered() -> None:
    """An event ends at no other character than the two that end lines there; a character that the terminal does not
    have is no reason to stop."""
    with answering() as url:
        command = ("chat", "--url", url, "--model", "any")
        ended = spool(*command, given="\xe9\n", environment={"PYTHONIOENCODING": "ascii"})
    assert (ended.code, ended.out) == (0, r"\ufffd\ufffd\u2028\x85!" + "\n"), ended.err


@pytest.mark.slow
def test_lines_can_be_edited_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with answering() as url:
        command = [str(SPOOL), "chat", "--url", url, "--model", "any"]
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            shown = b""
            while not shown.endswith(b"> "):
                shown += os.read(ours, 4096)
            # Left and right, then up to what was asked before.
            os.write(ours, b"helo\x1b[D\x1b[D\x1b[Cl\r")
            while not shown.endswith(b"!\r\n> "):
                shown += os.read(ours, 4096)
            os.write(ours, b"\x1b[A\x1b[Hagain, \r/quit\r")
            with suppress(OSError):  # the other end is closed
                while part := os.read(ours, 4096):
                    shown += part
            assert process.wait(LONG) == 0
    os.close(ours)
    assert "hello\u2028\x85!" in shown.decode()
    assert "again, hello\u2028\x85!" in shown.decode()


def test_commands_are_not_sent_to_the_model() -> None:
    asked = "/help\n/bye\n/new day\n /bye\n/etc/hosts: what is it?\n/\n"
    with answering() as url:
        ended = spool("chat", "--url", url, "--model", "any", given=asked)
    assert ended.code == 0, ended.err
    help, bye, new_day, *answers = ended.out.removesuffix("\n").split("\n")
    assert help.startswith("/new starts over, ")
    assert (bye, new_day) == tuple(
        f"[{line} is no command, and sent only after a space; {help}]" for line in ("/bye", "/new day")
    )
    assert answers == [f"{line}\u2028\x85!" for line in ("/bye", "/etc/hosts: what is it?", "/")]


def test_a_server_that_wants_a_key(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    with gateways.serve(GatewaySettings(api_keys=(SecretStr("sesame"),))) as served:

        def answered(key: str | None, model: str | None = None) -> str:
            sink = StringIO()
            assert chat(served.url, model, key, None, {"max_tokens": 3}, StringIO("hello\n"), sink) == 0
            return sink.getvalue()

        with pytest.raises(RunError, match=r"^the server refuses: .* \(--api-key or \$SPOOL_API_KEY gives a key\)$"):
            answered(None)
        with pytest.raises(RunError, match=r"^the server refuses: the model 'other' does not exist"):
            answered("sesame", "other")
        monkeypatch.setenv("SPOOL_API_KEY", "sesame")
        assert answered(None) == answered("sesame") != ""


@pytest.mark.slow
def test_a_server_whose_authority_only_its_users_know(gateways: Gateways, tmp_path: Path) -> None:
    issued = issue(tmp_path, "127.0.0.1")
    tls = TlsFiles(certificate=Path(issued.certificate_file), key=Path(issued.key_file))
    with gateways.serve(tls=tls) as served:
        options = ("chat", "--url", served.url, "--temperature", "0", "--max-tokens", "3")
        ended = spool(*options, "--ca-file", issued.ca_file, given="hello there\n")
        assert (ended.code, ended.out) == (0, f"{answer(gateways, [{'role': 'user', 'content': 'hello there'}], 3)}\n")
        ended = spool(*options, given="hello there\n")
        assert ended.code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in ended.err
        assert "(--ca-file names the certificate of its authority)" in ended.err
        for wrong in (issued.key_file, tmp_path / "missing.pem"):
            ended = spool(*options, "--ca-file", wrong, given="hello there\n")
            assert (ended.code, f"--ca-file is {wrong}, must be certificates in PEM" in ended.err) == (2, True), (
                ended.err
            )
