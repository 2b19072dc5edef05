"""`spool k8s drain` where there is nothing to drain; `test_served_cell.py` has it work."""

from __future__ import annotations

import pytest

from deploy.cli.main import run
from tests.support.ports import free_ports


def test_a_ray_that_has_gone_holds_no_pod_up(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert run(["k8s", "drain", "--seconds", "60", "--address", f"127.0.0.1:{port}"]) == 1
    # Ray puts the machine's own address in place of loopback.
    assert f":{port} cannot be joined: Connection refused\n" in capsys.readouterr().err


def test_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["k8s", "drain", "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err
