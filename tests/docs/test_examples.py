"""The examples do what they say, against a gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.gateway.settings import GatewaySettings
from tests.docs.documents import ROOT
from tests.support.gateway import Gateways, Served, stand_in_gateways
from tests.support.waiting import LONG

KEY = "key-of-an-example"
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = stand_in_gateways(tmp_path_factory.mktemp("model"), step_seconds=0.002, unlucky=False)
    yield gateways
    gateways.close()


@pytest.fixture(scope="module")
def served(gateways: Gateways) -> Iterator[Served]:
    with gateways.serve(GatewaySettings(api_keys=(SecretStr(KEY),))) as served:
        yield served


def run(served: Served, folder: Path, *words: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SPOOL_URL": served.url,
            "SPOOL_GRPC": served.address,
            "SPOOL_API_KEY": key,
        },
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text] == []


def test_openai_client(served: Served, tmp_path: Path) -> None:
    done = run(served, tmp_path, str(EXAMPLES / "openai_client.py"))
    assert done.returncode == 0, done.stderr
    assert "80 tokens; of drafted ones accepted:" in done.stdout


def test_grpc_client(served: Served, tmp_path: Path) -> None:
    done = run(served, tmp_path, str(EXAMPLES / "grpc_client.py"))
    assert done.returncode == 0, done.stderr
    assert "\n60 tokens; accepted " in done.stdout
    refused = run(served, tmp_path, str(EXAMPLES / "grpc_client.py"), key="wrong")
    assert refused.returncode == 1
    assert refused.stderr == "UNAUTHENTICATED: the API key is not known here\n"


def test_batch_file(served: Served, tmp_path: Path) -> None:
    prompts = [f"{number} bottles" for number in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    done = run(served, tmp_path, str(EXAMPLES / "batch_file.py"), "in.jsonl", "out.jsonl")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(answer["answer"] for answer in answers)


def test_plot_and_load(served: Served, tmp_path: Path) -> None:
    locust = ["-m", "locust", "-f", str(EXAMPLES / "locustfile.py"), "--host", served.url, "--headless"]
    locust += ["--users", "4", "--spawn-rate", "4", "--run-time", "4s", "--only-summary"]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(run, served, tmp_path, *locust)
        plot = run(served, tmp_path, str(EXAMPLES / "plot_run.py"), "run.png", "--seconds", "3", "--every", "0.5")
        assert plot.returncode == 0, plot.stderr
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
        done = load.result(LONG)
    assert done.returncode == 0, done.stderr
    assert "first token" in done.stderr + done.stdout
