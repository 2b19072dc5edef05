"""The live page: its data, who may see it, and, if there is a browser, what the page shows."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import SecretStr
from selenium import webdriver
from selenium.webdriver.common.by import By

from spool.services.gateway.settings import GatewaySettings
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.viewer import StepViews
from tests.integration.gateway.expected import NoScheduler
from tests.support.cells import running_cell
from tests.support.gateway import Gateways, Served, save_tokenizer, stand_in_gateways
from tests.support.waiting import LONG, setting, wait_until

KEY, OTHER_KEY = "key-of-a-person", "key-of-another"
UNKNOWN = "\N{EN DASH}"


def recorded(service: SchedulerService) -> bool:
    return any(isinstance(observer, StepViews) for observer in service.observers)


# --- who may see it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with stand_in_gateways(tmp_path_factory.mktemp("model"), step_seconds=0.01) as gateways:
        yield gateways


@pytest.fixture(scope="module")
def served(gateways: Gateways) -> Iterator[Served]:
    with gateways.serve(GatewaySettings(api_keys=(SecretStr(KEY), SecretStr(OTHER_KEY)))) as served:
        yield served


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LONG) as client:
        yield client


@pytest.fixture
def person(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LONG, auth=("anybody", KEY)) as client:
        yield client


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(key.encode()).decode()


def test_a_password_opens_what_people_look_at_and_nothing_else(person: httpx.Client, stranger: httpx.Client) -> None:
    for path in ("/dashboard", "/dashboard/page.js", "/dashboard/views", "/metrics"):
        response = stranger.get(path)
        assert response.status_code == 401
        schemes = [value.split()[0] for value in response.headers.get_list("www-authenticate")]
        assert schemes == ["Bearer", "Basic"]
    for wrong in (basic("anybody:wrong"), basic(KEY), "Basic not-base64!", "Basic", f"Digest {KEY}"):
        assert stranger.get("/dashboard", headers={"authorization": wrong}).status_code == 401
    assert person.get("/dashboard").status_code == person.get("/metrics").status_code == 200
    assert person.get("/v1/models").status_code == person.post("/dashboard").status_code == 401
    assert person.post("/v1/completions", json={"model": "stand-in", "prompt": "x"}).status_code == 401
    assert stranger.get("/dashboard", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


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
        installed = version("spool-serve")
        assert {process["version"] for process in view["workers"]} == {installed}
        assert view["gateways"] == [{"id": "gateway", "version": installed}]
        assert (view["model"], view["quantization"]) == ("stand-in", "int8")
        figures = view["figures"]
        assert (figures["running"], figures["waiting"], figures["kv_usage"]) == (0, 0, 0)
        # A round accepts a token at every position up to as many as it accepts.
        assert sum(figures["accepted_per_position"]) == figures["accepted_tokens"] <= figures["draft_tokens"]
        assert json.loads(next(lines).removeprefix("data: "))["now"] > view["now"]
    wait_until(lambda: not recorded(gateways.service), "the last watcher has gone")


def test_views_tell_what_was_proposed_before_it_was_asked_for(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    cell = running_cell(tokenizer_digest=tokenizer.vocabulary_digest.hex(), ahead=True, step_seconds=0.002)
    pattern = re.compile(r"[1-9]\d*% of proposals were there before they were asked for: hid \d+\.\d s")
    with Gateways(tokenizer, cell) as gateways, gateways.serve() as served:

        def told() -> bool:
            """After another answer; the first ones may be there before a draft worker is granted."""
            body = {"model": "stand-in", "prompt": [20], "max_tokens": 200, "temperature": 0}
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=LONG).raise_for_status()
            with httpx.stream("GET", f"{served.url}/dashboard/views", timeout=LONG) as response:
                line = next(line for line in response.iter_lines() if line.startswith("data: "))
            return any(map(pattern.fullmatch, json.loads(line.removeprefix("data: "))["drafting"]))

        wait_until(told, "the share of proposals that were there before")


def test_no_key_takes_all_places_of_those_who_watch(person: httpx.Client, gateways: Gateways) -> None:
    with ExitStack() as stack:

        def statuses(key: str, count: int) -> list[int]:
            views = [person.stream("GET", "/dashboard/views", auth=("anybody", key)) for _ in range(count)]
            return [stack.enter_context(view).status_code for view in views]

        assert statuses(KEY, 9) == [200] * 8 + [429]
        assert statuses(OTHER_KEY, 5) == [200] * 4 + [429]
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


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there are no chromium and chromedriver here")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chrome.set_page_load_timeout(LONG)
        yield chrome
    finally:
        chrome.quit()


def requested_hosts(chrome: webdriver.Chrome) -> set[str]:
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    urls = [params["request"]["url"] for params in sent]
    return {urlsplit(url).netloc.rpartition("@")[2] for url in urls if url.startswith(("http", "ws"))}


def text_of(chrome: webdriver.Chrome, name: str) -> str:
    return chrome.find_element(By.ID, name).text


def pixels(chrome: webdriver.Chrome, canvas: str) -> str:
    return str(chrome.execute_script(f'return document.querySelector("{canvas}").toDataURL()'))


def counter(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if re.match(rf"{name}(\{{|\s)", line))


def keep_asking(person: httpx.Client, enough: threading.Event) -> set[int]:
    """Status codes of completions, requested one after the other."""
    statuses = set()
    for index in itertools.takewhile(lambda _: not enough.is_set(), itertools.count()):
        body = {"model": "stand-in", "prompt": [20 + index % 50], "max_tokens": 40 + index, "temperature": 0}
        headers = {"authorization": f"Bearer {KEY}"}
        statuses.add(person.post("/v1/completions", json=body, headers=headers, auth=None).status_code)
    return statuses


@pytest.mark.slow
def test_pictures_move_and_figures_are_those_of_metrics_and_load(
    served: Served, person: httpx.Client, chrome: webdriver.Chrome
) -> None:
    enough = threading.Event()
    with ThreadPoolExecutor(8) as pool, setting(enough):
        loads = [pool.submit(keep_asking, person, enough) for _ in range(8)]
        scheme, rest = served.url.split("://")
        chrome.get(f"{scheme}://anybody:{KEY}@{rest}/dashboard")
        wait_until(lambda: text_of(chrome, "connection") == "live", "the page is connected")
        for canvas in ("#pool", "#lanes", "#speed canvas"):
            before = pixels(chrome, canvas)
            wait_until(lambda canvas=canvas, before=before: pixels(chrome, canvas) != before, f"{canvas} moves")  # type: ignore[misc]
        wait_until(lambda: text_of(chrome, "running") not in (UNKNOWN, "0"), "sequences are running")
        assert text_of(chrome, "workers") == "1, 1"
        shown, _, names = text_of(chrome, "versions").partition(": ")
        assert shown == f"version {version('spool-serve')}"
        # Workers in the order in which they have registered.
        assert sorted(names.split(", ")) == ["draft-0", "gateway", "target-0"]
        enough.set()
        assert [load.result(LONG) for load in loads] == [{200}] * 8

    def agree() -> bool:
        metrics = person.get("/metrics").text
        drafted = counter(metrics, "spool_delivered_draft_tokens_total")
        accepted = counter(metrics, "spool_delivered_accepted_tokens_total")
        load = person.get("/load", headers={"authorization": f"Bearer {KEY}"}, auth=None).json()
        expected = {
            "generated": f"{counter(metrics, 'spool_generation_tokens_total'):,.0f}",
            "running": str(load["running"]),
            "waiting": str(load["waiting"]),
            "acceptance": f"{100 * accepted / drafted:.0f} %",
        }
        return {name: text_of(chrome, name) for name in expected} == expected

    wait_until(agree, "the page shows what /metrics and /load say")
    assert chrome.get_log("browser") == []
    assert requested_hosts(chrome) == {rest}
    fits = "return document.documentElement.scrollWidth <= window.innerWidth"
    for width, height in ((1400, 900), (800, 1100), (500, 900)):
        chrome.set_window_size(width, height)
        wait_until(lambda: chrome.execute_script(fits), f"nothing sticks out at a width of {width}", 10)


@pytest.mark.slow
def test_the_page_shows_that_there_is_no_scheduler(gateways: Gateways, chrome: webdriver.Chrome) -> None:
    with gateways.serve(backend=NoScheduler(gateways)) as served:
        assert httpx.get(f"{served.url}/dashboard/views", timeout=LONG).status_code == 503
        unknown = httpx.get(f"{served.url}/dashboard/views?cell=2", timeout=LONG)
        assert (unknown.status_code, "cell is 2, must be between 1 and 1" in unknown.text) == (404, True)
        chrome.get(f"{served.url}/dashboard")
        wait_until(lambda: text_of(chrome, "connection") == "no scheduler answers", "the page says so")
        assert text_of(chrome, "running") == UNKNOWN
