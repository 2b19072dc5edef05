"""The choices of a request are admitted together; if one is not, or the client leaves, nothing of the others stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import RefusalCause
from spool.services.backend.interface import BackendUnavailableError, GenerationRequest
from spool.services.backend.sequence_stream import AdmissionRefusedError
from spool.services.scheduler_client.remote_stream import RemoteStream
from tests.integration.gateway.expected import ENDLESS, PROMPT, TIMEOUT, Recorder, completion, encoded, error_of
from tests.integration.gateway.test_http_generation import connected
from tests.support.gateway import Gateways, Served, stand_in_gateways
from tests.support.waiting import wait_until

MANY = {**ENDLESS, "n": 64}


class Held(Recorder):
    """Holds the scheduler's answers until so many sequences were submitted."""

    def __init__(self, gateways: Gateways, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gateways)
        self.held: list[Callable[[], None]] = []
        admit = RemoteStream.admit

        def hold(stream: RemoteStream) -> None:
            self.held.append(lambda: admit(stream))
            while self.held and len(self.requests) >= wanted:
                self.held.pop(0)()

        monkeypatch.setattr(RemoteStream, "admit", hold)


class Refusing(Recorder):
    """Refuses some sequences, the later ones first, and takes no more than so many."""

    most, streams = 64, list[RemoteStream]()

    def submit(self, request: GenerationRequest) -> RemoteStream:
        if len(self.requests) == self.most:
            raise BackendUnavailableError("closed")
        self.streams = [*self.streams, super().submit(request)]
        if len(self.streams) == 64:
            for number in (60, 40, 5):
                self.streams[number].end(AdmissionRefusedError(RefusalCause.QUEUE_FULL, f"no {number}"))
        return self.streams[-1]


def check_nothing_is_left(gateways: Gateways, served: Served, aborted: int) -> None:
    """Of so many sequences, those that were refused not counted."""
    gateways.wait_until_idle()
    assert gateways.backend.streams == []
    assert not any(key.running or key.waiting for key in gateways.service.core.snapshot().keys)
    families = text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text)
    counts = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    tokens = aborted * len(encoded(gateways))
    assert counts["spool_request_success_total", "abort"] == aborted
    assert counts["spool_request_prompt_tokens_sum",] == counts["spool_prompt_tokens_total",] == tokens


def test_all_are_submitted_before_any_answer(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Held(gateways, 64, monkeypatch)
    with gateways.serve(backend=backend) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:
        choices = completion(http, prompt=[PROMPT, "and"], n=32, max_tokens=1, seed=5, temperature=1)["choices"]
    expected = [(encoded(gateways, text), 5 + number) for text in (PROMPT, "and") for number in range(32)]
    assert [([*one.prompt], one.sampling.seed) for one in backend.requests] == expected
    assert [choice["index"] for choice in choices] == [*range(64)]


@pytest.mark.parametrize(("most", "status", "message", "admitted"), [(64, 429, "no 5", 61), (32, 503, "closed", 32)])
def test_the_first_refusal_is_told(gateways: Gateways, most: int, status: int, message: str, admitted: int) -> None:
    backend = Refusing(gateways)
    backend.most = most
    with gateways.serve(backend=backend) as served:
        response = httpx.post(f"{served.url}/v1/completions", json=MANY, timeout=TIMEOUT)
        assert (response.status_code, error_of(response)) == (status, message)
        check_nothing_is_left(gateways, served, admitted)


def test_full_queue(tmp_path: Path) -> None:
    config = SchedulerConfig(max_running=2, max_queued_sequences=10)
    with (
        stand_in_gateways(tmp_path, config, step_seconds=0.01) as gateways,
        gateways.serve() as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        response = http.post("/v1/completions", json=MANY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        check_nothing_is_left(gateways, served, 12)
        assert len(completion(http, n=12)["choices"]) == 12


def test_a_client_that_leaves_before_the_last_answer(slow: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Held(slow, 65, monkeypatch)
    with slow.serve(backend=backend) as served:
        with connected(served, MANY):
            wait_until(lambda: len(backend.held) == 64, "the scheduler has answered", pause=0.01)
            for admit in backend.held[:32]:
                admit()
        check_nothing_is_left(slow, served, 64)
