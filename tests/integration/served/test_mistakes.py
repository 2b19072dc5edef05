"""Common mistakes: each ends with one sentence that says what to do. Others stand beside what they are about: ports in
test_serving.py, compilers in test_cpu_build.py, pairs in test_cli_errors.py, keys in test_chat_command.py, versions of
Ray in test_ray_own.py."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.command_line import SPOOL, Ended, save_tokenizer, spool, write_lines
from tests.support.ports import free_ports
from tests.support.tiny_models import save_tiny_pair


def check(ended: Ended, code: int, *parts: str) -> None:
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("spool: ")
    for part in parts:
        assert part in last


@contextmanager
def hub(error: str) -> Iterator[str]:
    """The address of a hub that refuses every model with this error code."""

    class Refuse(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(401)
            self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()

        def log_message(self, *_: object) -> None:
            """Not to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def fetched_from(address: str, folder: Path) -> Ended:
    places = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
    return spool("models", "fetch", "nobody/nothing", environment=places)


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        ("GatedRepo", "only to those who accepted its terms", "accept them on the model's page and set HF_TOKEN"),
        ("RepoNotFound", "the hub has no such model", "check the name, or set HF_TOKEN"),
    ],
)
def test_a_model_that_the_hub_refuses(tmp_path: Path, error: str, what: str, remedy: str) -> None:
    with hub(error) as address:
        check(fetched_from(address, tmp_path), 2, "nobody/nothing: ", what, remedy)


def test_no_network(tmp_path: Path) -> None:
    [port] = free_ports(1)
    nowhere = f"http://127.0.0.1:{port}"
    remedy = "check network and proxy (HTTPS_PROXY), or give the folder of a model"
    check(fetched_from(nowhere, tmp_path), 2, "nobody/nothing: no such folder, and not to be had", remedy)
    index = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": nowhere, "PIP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    ended = spool("models", "fetch", "demo", environment={"SPOOL_CACHE": str(tmp_path), **index})
    check(ended, 1, "pip could not download", "PIP_INDEX_URL", "spool serve FOLDER")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for model in save_tiny_pair("llama", folder):
        save_tokenizer(model)
    write_lines(folder / "prompts.jsonl", *[{"prompt": "x"}] * 200)
    return folder


GENERATE = ("generate", "llama-target", "--draft", "none", "--prompts", "prompts.jsonl", "--threads", "1")


@pytest.mark.slow
def test_no_memory(folder: Path) -> None:
    # More than a processor can address.
    ended = spool(*GENERATE, "--kv-memory", "1000TiB", cwd=folder)
    check(ended, 1, "target-0: ", "if memory ran out: a smaller model, --quantization int4", "a smaller --kv-memory")


@pytest.mark.slow
def test_a_full_disk(folder: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    command = [str(SPOOL), *GENERATE, "--max-tokens", "20", "--output", "out.jsonl"]
    # Python would write the beginnings of large modules' bytecode, and fail to load them from then on.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    check(
        Ended(done.returncode, done.stdout, done.stderr), 1, "out.jsonl", "free some space", "the same command goes on"
    )
    ended = spool(*command[1:], "--json", cwd=folder)
    assert (ended.code, ended.summary["kept"] > 0) == (0, True), ended.err
    check(spool(*GENERATE, "--output", "/dev/full", cwd=folder), 2, "--output is /dev/full, must be a regular file")
