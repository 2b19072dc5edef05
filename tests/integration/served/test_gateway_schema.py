"""The HTTP API answers all generated requests as its OpenAPI description says, and never with an internal error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from spool.services.gateway.settings import GatewaySettings
from tests.support.gateway import stand_in_gateways

pytestmark = pytest.mark.slow

# Limits depend on the model, so the description allows some requests that the server refuses.
NOT_CHECKED = "positive_data_acceptance"

# Clients may set deadlines that cannot be met.
CONFIGURATION = """\
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""


def test_generated_requests(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION, encoding="utf-8")
    keys = GatewaySettings(api_keys=(SecretStr("key"),))
    with stand_in_gateways(tmp_path / "model", unlucky=False) as gateways, gateways.serve(keys) as served:
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
        command += [f"{served.url}/openapi.json", "--header", "Authorization: Bearer key", "--no-color"]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1", "--max-failures", "5"]
        command += ["--exclude-checks", NOT_CHECKED, "--generation-database", "none", "--request-timeout", "60"]
        command += ["--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
        metrics = httpx.get(f"{served.url}/metrics", headers={"authorization": "Bearer key"}).text
        assert 'spool_request_failure_total{kind="failed"}' not in metrics
        assert 'spool_request_success_total{finished_reason="length"}' in metrics
        gateways.wait_until_idle()
