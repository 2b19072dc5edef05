"""The live page: its data, who may see it, and, if there is a browser, what the page shows."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from pydantic import SecretStr
from selenium import webdriver
from selenium.webdriver.common.by import By

from protos import cell_view_pb2, cell_view_pb2_grpc
from services.backend.interface import BackendUnavailableError
from services.gateway.settings import GatewaySettings
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry.step_trace import StepTrace
from tests.support.cells import client, read_some, request_of, running_cell
from tests.support.gateway import Gateways, Served, stand_in_gateways
from tests.support.waiting import LONG, setting, until, wait_until

KEY = "key-of-a-person"
UNKNOWN = "\N{EN DASH}"
STATES = cell_view_pb2.SequenceState


def recorded(service: SchedulerService) -> bool:
    return any(isinstance(observer, StepTrace) for observer in service.observers)


# --- what a scheduler shows -------------------------------------------------------------------------------------------


def test_views_show_every_sequence_and_the_steps_since_the_last_one() -> None:
    async def run() -> None:
        async with running_cell(targets=2, step_seconds=0.002) as cell, client(cell.resolve) as backend:
            streams = [await backend.submit(request_of(index, 400)) for index in range(6)]
            lengths: dict[int, list[int]] = {}
            workers = set()
            ended = 0.0
            async for view in backend.watch(0.1, 100):
                for sequence in view.sequences:
                    assert STATES.Name(sequence.state) != "SEQUENCE_STATE_UNSPECIFIED"
                    lengths.setdefault(sequence.sequence_id, []).append(sequence.length)
                for step in view.steps:
                    assert step.rows >= 1
                    assert ended <= step.ended <= view.now
                    assert step.started <= step.ended
                    ended = step.ended
                    workers.add(step.worker_id)
                assert view.status.live_set.live == len(view.sequences)
                if len(workers) == 3 and all(len(set(seen)) > 2 for seen in lengths.values()):
                    break
            assert len(lengths) == 6
            assert all(seen == sorted(seen) for seen in lengths.values())
            for stream in streams:
                stream.cancel()
            # All watchers have gone, so no steps are recorded any more.
            await until(lambda: not recorded(cell.service))

    asyncio.run(run())


def test_sequences_beyond_the_limit_are_counted() -> None:
    async def run() -> None:
        async with running_cell(step_seconds=0.005) as cell, client(cell.resolve) as backend:
            streams = [await backend.submit(request_of(index, 1900)) for index in range(5)]
            for stream in streams:
                await read_some(stream, 1)
            view = await anext(backend.watch(1, 2))
            assert [sequence.prompt_length for sequence in view.sequences] == [
                len(request_of(index, 1).prompt) for index in range(2)
            ]
            assert view.unlisted_sequences == 3
            for stream in streams:
                stream.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"period_seconds": 0.01}, "period_seconds is 0.01, must be between 0.1 and 60"),
        ({"period_seconds": float("nan")}, "period_seconds is nan, must be between 0.1 and 60"),
        ({"period_seconds": 1, "max_sequences": 10_001}, "max_sequences is 10001, must be at most 10000"),
    ],
)
def test_impossible_wishes_are_refused(request_fields: dict[str, Any], message: str) -> None:
    async def run() -> None:
        async with running_cell() as cell, grpc.aio.insecure_channel(cell.resolve.address) as channel:
            call = cell_view_pb2_grpc.CellViewerStub(channel).Watch(cell_view_pb2.WatchRequest(**request_fields))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.value.details() == message

    asyncio.run(run())


def test_a_view_ends_with_its_scheduler() -> None:
    async def run() -> None:
        async with running_cell() as cell, client(cell.resolve) as backend:
            await until(lambda: backend.connected)
            views = backend.watch(0.1, 10)
            await anext(views)
            await cell.service.close("enough")
            with pytest.raises(BackendUnavailableError, match="the scheduler does not answer"):
                async for _ in views:
                    pass

    asyncio.run(run())


# --- who may see it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = stand_in_gateways(tmp_path_factory.mktemp("model"), step_seconds=0.01)
    yield gateways
    gateways.close()


@pytest.fixture(scope="module")
def served(gateways: Gateways) -> Iterator[Served]:
    with gateways.serve(GatewaySettings(api_keys=(SecretStr(KEY),))) as served:
        yield served


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LONG) as client:
        yield client


@pytest.fixture
def person(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LONG, auth=("anybody", KEY)) as client:
        yield client


def test_strangers_are_asked_for_a_key(stranger: httpx.Client) -> None:
    for path in ("/dashboard", "/dashboard/page.js", "/dashboard/views", "/metrics"):
        response = stranger.get(path)
        assert response.status_code == 401
        schemes = [value.split()[0] for value in response.headers.get_list("www-authenticate")]
        assert schemes == ["Bearer", "Basic"]


@pytest.mark.parametrize(
    "authorization",
    [
        "Basic " + base64.b64encode(b"anybody:wrong").decode(),
        "Basic " + base64.b64encode(KEY.encode()).decode(),
        "Basic not-base64!",
        "Basic",
        f"Digest {KEY}",
    ],
)
def test_wrong_keys_open_nothing(stranger: httpx.Client, authorization: str) -> None:
    assert stranger.get("/dashboard", headers={"authorization": authorization}).status_code == 401


def test_a_password_opens_what_people_look_at_and_nothing_else(person: httpx.Client, stranger: httpx.Client) -> None:
    assert person.get("/dashboard").status_code == 200
    assert person.get("/metrics").status_code == 200
    assert person.get("/v1/models").status_code == 401
    assert person.post("/v1/completions", json={"model": "stand-in", "prompt": "x"}).status_code == 401
    assert person.post("/dashboard").status_code == 401
    bearer = {"authorization": f"Bearer {KEY}"}
    assert stranger.get("/dashboard", headers=bearer).status_code == 200


def test_the_page_is_whole_and_asks_nobody_else(person: httpx.Client) -> None:
    page = person.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    seen, missing = {"/dashboard"}, re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
    while missing:
        name = missing.pop()
        part = person.get(f"/{name}")
        assert part.status_code == 200, name
        seen.add(name)
        imports = [f"dashboard/{other}" for other in re.findall(r'from "\./([^"]+)"', part.text)]
        missing += [other for other in imports if other not in seen]
        # The only address is that of the library's home page, in a comment.
        if name != "dashboard/uplot.js":
            assert not re.search(r"https?://", part.text)
    assert len(seen) > 8
    assert person.get("/dashboard/none.js").status_code == 404
    assert person.get("/dashboard/..%2fapp.py").status_code == 404


def test_events_are_views(person: httpx.Client, gateways: Gateways) -> None:
    with person.stream("GET", "/dashboard/views") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        view = json.loads(next(lines).removeprefix("data: "))
        assert {worker["role"] for worker in view["workers"]} == {"draft", "target"}
        assert view["model"] == "stand-in"
        figures = view["figures"]
        assert (figures["running"], figures["waiting"], figures["kv_usage"]) == (0, 0, 0)
        # A round accepts a token at every position up to as many as it accepts.
        assert sum(figures["accepted_per_position"]) == figures["accepted_tokens"] <= figures["draft_tokens"]
        assert json.loads(next(lines).removeprefix("data: "))["now"] > view["now"]
    wait_until(lambda: not recorded(gateways.service), "the last watcher has gone")


def test_more_watchers_than_a_gateway_serves_are_refused(person: httpx.Client, gateways: Gateways) -> None:
    with ExitStack() as stack:
        responses = [stack.enter_context(person.stream("GET", "/dashboard/views")) for _ in range(17)]
        assert [response.status_code for response in responses] == [200] * 16 + [429]
    wait_until(lambda: not recorded(gateways.service), "the watchers have gone")
    with person.stream("GET", "/dashboard/views") as response:
        assert response.status_code == 200


# --- what it shows ----------------------------------------------------------------------------------------------------

# Without these options Chromium sends requests of its own to its maker.
CHROMIUM_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def browser(profile: Path, width: int, height: int) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there are no chromium and chromedriver here")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chrome.set_page_load_timeout(LONG)
        yield chrome
    finally:
        chrome.quit()


def requested_urls(chrome: webdriver.Chrome) -> list[str]:
    """Of all network requests."""
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    urls = [params["request"]["url"] for params in sent]
    return [url for url in urls if url.startswith(("http", "ws"))]


def text_of(chrome: webdriver.Chrome, name: str) -> str:
    return chrome.find_element(By.ID, name).text


def pixels(chrome: webdriver.Chrome, canvas: str) -> str:
    return str(chrome.execute_script(f'return document.querySelector("{canvas}").toDataURL()'))


def counter(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if re.match(rf"{name}(\{{|\s)", line))


def keep_asking(url: str, enough: threading.Event) -> set[int]:
    """Status codes of completions, requested one after the other."""
    statuses = set()
    for index in itertools.count():
        if enough.is_set():
            break
        body = {"model": "stand-in", "prompt": [20 + index % 50], "max_tokens": 40 + index, "temperature": 0}
        headers = {"authorization": f"Bearer {KEY}"}
        statuses.add(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=LONG).status_code)
    return statuses


def test_pictures_move_and_figures_are_those_that_are_told(
    served: Served, person: httpx.Client, tmp_path: Path
) -> None:
    def differs(read: Callable[[], str]) -> bool:
        before = read()
        wait_until(lambda: read() != before, "the page moves")
        return True

    enough = threading.Event()
    with browser(tmp_path / "profile", 1200, 900) as chrome, ThreadPoolExecutor(8) as pool, setting(enough):
        loads = [pool.submit(keep_asking, served.url, enough) for _ in range(8)]
        scheme, rest = served.url.split("://")
        chrome.get(f"{scheme}://anybody:{KEY}@{rest}/dashboard")
        wait_until(lambda: text_of(chrome, "connection") == "live", "the page is connected")
        for canvas in ("#pool", "#lanes", "#speed canvas"):
            assert differs(lambda canvas=canvas: pixels(chrome, canvas)), canvas  # type: ignore[misc]
        wait_until(lambda: text_of(chrome, "running") not in (UNKNOWN, "0"), "sequences are running")
        assert text_of(chrome, "workers") == "1, 1"
        enough.set()
        assert [load.result(LONG) for load in loads] == [{200}] * 8

        def agree() -> bool:
            figures = partial(counter, person.get("/metrics").text)
            drafted, accepted = (
                figures("spool_delivered_draft_tokens_total"),
                figures("spool_delivered_accepted_tokens_total"),
            )
            response = person.get("/load", headers={"authorization": f"Bearer {KEY}"}, auth=None)
            assert response.status_code == 200, response.text
            load = response.json()
            return {name: text_of(chrome, name) for name in ("generated", "running", "waiting", "acceptance")} == {
                "generated": f"{figures('spool_generation_tokens_total'):,.0f}",
                "running": str(load["running"]),
                "waiting": str(load["waiting"]),
                "acceptance": f"{100 * accepted / drafted:.0f} %",
            }

        wait_until(agree, "the page shows what /metrics and /load say")
        assert chrome.get_log("browser") == []
        places = {urlsplit(url).netloc.rpartition("@")[2] for url in requested_urls(chrome)}
        assert places == {rest}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (800, 1100), (500, 900)])
def test_nothing_sticks_out_at_any_width(served: Served, tmp_path: Path, width: int, height: int) -> None:
    with browser(tmp_path / "profile", width, height) as chrome:
        scheme, rest = served.url.split("://")
        chrome.get(f"{scheme}://anybody:{KEY}@{rest}/dashboard")
        wait_until(lambda: text_of(chrome, "connection") == "live", "the page is connected")
        assert chrome.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_a_missing_scheduler_is_said(gateways: Gateways, tmp_path: Path) -> None:
    class Lost:
        cells = 1

        async def model(self) -> None:
            raise BackendUnavailableError("there is no scheduler")

        async def load(self) -> None:
            raise BackendUnavailableError("there is no scheduler")

        async def watch(self, period_seconds: float, max_sequences: int, cell: int) -> Any:
            raise BackendUnavailableError("there is no scheduler")
            yield

    with gateways.serve(backend=Lost()) as served, browser(tmp_path / "profile", 800, 600) as chrome:  # type: ignore[arg-type]
        assert httpx.get(f"{served.url}/dashboard/views", timeout=LONG).status_code == 503
        unknown = httpx.get(f"{served.url}/dashboard/views?cell=2", timeout=LONG)
        assert (unknown.status_code, "cell is 2, must be between 1 and 1" in unknown.text) == (404, True)
        chrome.get(f"{served.url}/dashboard")
        wait_until(lambda: text_of(chrome, "connection") == "no scheduler answers", "the page says so")
        assert text_of(chrome, "running") == UNKNOWN
