"""One option has one name: in `spool serve`, in `spool generate`, and in the configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.cli import main
from deploy.cli.command_options import SERVING
from deploy.config.reference import field_names
from deploy.config.spool_config import SpoolConfig
from scheduler.config import Policy

OF_SERVING = {"config", "overrides", "detach", "no_ray", "help"}

NAMES = frozenset(field_names())


def parameters(command: str) -> dict[str, Any]:
    found = typer.main.get_command(main.app).commands[command]  # type: ignore[attr-defined]
    return {parameter.name: parameter for parameter in found.params}


def file_name(option: str, path: str) -> str:
    """What the option for a field must be called."""
    parts = path.split(".")
    if parameters("serve")[option].multiple:
        assert parts[-1].endswith("s")
        return parts[-1][:-1]
    both = parts[0] == "groups" and len(SERVING[option]) == 1
    return "_".join(parts[1:]) if both else parts[-1]


def test_every_option_of_serve_is_a_field_of_its_name() -> None:
    assert parameters("serve").keys() - OF_SERVING == SERVING.keys()
    for option, paths in SERVING.items():
        for path in paths:
            assert path in NAMES, option
            assert file_name(option, path) == option


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SpoolConfig]:
    """What `spool serve` would serve, from a folder with a file."""
    (tmp_path / "spool.yaml").write_text("models: {target: a, draft: b}\ngateway: {port: 81, grpc_port: 82}\n")
    monkeypatch.chdir(tmp_path)
    found: list[SpoolConfig] = []

    def serve(config: SpoolConfig, detach: bool) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr("deploy.cli.serve.serve", serve)
    return found


def test_options_override_the_file(served: list[SpoolConfig]) -> None:
    assert main.run(["serve"]) == 0
    words = "serve m --port 83 --api-key k1 --api-key k2 --kv-memory 2GiB --no-exact --policy ragged --threads 3"
    assert main.run([*words.split(), "--set", "gateway.port=84", "--host", "0.0.0.0"]) == 0
    plain, given = served
    assert (plain.models.target, plain.models.draft, plain.gateway.port) == ("a", "b", 81)
    assert (given.models.target, given.models.draft) == ("m", "b")
    assert (given.gateway.host, given.gateway.port, given.gateway.grpc_port) == ("0.0.0.0", 83, 82)
    assert [key.get_secret_value() for key in given.auth.api_keys] == ["k1", "k2"]
    assert (given.engine.kv_memory, given.models.exact, given.scheduling.policy) == (2 << 30, False, Policy.RAGGED)
    assert (given.groups.target.threads, given.groups.draft.threads) == (3, 3)
