"""HTTP routes that generate no text, and the API keys of all routes."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.protos import scheduler_pb2
from spool.services.backend.interface import GenerationRequest
from spool.services.gateway.settings import GatewaySettings
from spool.services.scheduler_client.remote_stream import RemoteStream
from tests.integration.gateway.expected import CHAT, TIMEOUT, Recorder, error_of
from tests.integration.gateway.test_http_tools import TOOLS
from tests.support.gateway import MODEL, Gateways
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY
from tests.support.waiting import LONG, wait_until

OPEN = ("/health", "/ping", "/-/healthz")
"""Routes for probes, which have no key."""


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL).to_dict()
    assert (model["root"], model["max_model_len"], model["quantization"]) == (MODEL, MAX_LENGTH, "int8")
    with pytest.raises(openai.NotFoundError, match="model 'other' does not exist, this server has stand-in"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.completions.create(model="gpt", prompt="a")


class Elsewhere(Recorder):
    """A backend whose target has its model in a folder of the server."""

    root = ""

    async def model(self) -> scheduler_pb2.ServedModel:
        served = scheduler_pb2.ServedModel()
        served.CopyFrom(await self.backend.model())
        served.model_id = self.root
        return served


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("/srv/secret/llama", "llama"),
        ("/srv/secret/llama/", "llama"),
        ("../secret/q4.gguf", "q4.gguf"),
        ("~/llama", "llama"),
        ("org/llama", "org/llama"),
    ],
)
def test_a_models_root_does_not_tell_where_the_server_keeps_it(gateways: Gateways, root: str, shown: str) -> None:
    backend = Elsewhere(gateways)
    backend.root = root
    with gateways.serve(GatewaySettings(model_names=("m",)), backend) as served:
        [listed] = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert (listed["id"], listed["root"]) == ("m", shown)


def test_the_list_of_models_has_a_slash_at_its_end_too(http: httpx.Client) -> None:
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


@pytest.mark.parametrize("path", [*OPEN, "/metrics", "/load", "/v1/models", f"/v1/models/{MODEL}", "/dashboard"])
def test_head_is_answered_as_get_is_without_the_body(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert head.status_code == whole.status_code
    assert head.headers.keys() == whole.headers.keys()
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.content == b""
    assert http.head("/v1/chat/completions").status_code == 405


def test_head_of_an_endless_stream_ends(http: httpx.Client) -> None:
    assert http.head("/dashboard/views").headers["content-type"].startswith("text/event-stream")


def test_names_for_the_model(gateways: Gateways) -> None:
    with (
        gateways.serve(GatewaySettings(model_names=("demo", "org/demo"))) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["demo", "org/demo"]
        named = http.get("/v1/models/org/demo").json()
        assert (named["id"], named["root"]) == ("org/demo", MODEL)
        assert http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "demo"
        assert http.post("/v1/completions", json={"prompt": "a", "model": MODEL}).status_code == 404


def test_tokenize_and_detokenize(gateways: Gateways, http: httpx.Client) -> None:
    text = http.post("/tokenize", json={"prompt": "the é", "return_token_strs": True}).json()
    assert text["tokens"] == gateways.tokenizer.encode("the é")
    assert text["count"] == len(text["tokens"])
    assert text["max_model_len"] == MAX_LENGTH
    assert text["token_strs"] == ["t", "he", " ", "\\xc3", "\\xa9"]
    assert http.post("/detokenize", json={"tokens": text["tokens"]}).json() == {"prompt": "the é"}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == gateways.tokenizer.encode_chat(CHAT)
    assert http.post("/tokenize", json={"prompt": "a", "messages": CHAT}).status_code == 400
    half = http.post("/tokenize", content=b'{"prompt": "\\ud83d"}', headers={"content-type": "application/json"})
    assert (half.status_code, half.json()["error"]["param"]) == (400, "prompt")
    for size in (MAX_LENGTH + 1, 4_000_000):
        for field, body in (("prompt", "A" * size), ("messages", [{"role": "user", "content": "A" * size}])):
            error = http.post("/tokenize", json={field: body}).json()["error"]
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert error["message"].endswith(f"tokens; the model's limit is {MAX_LENGTH}")
    assert http.post("/tokenize", json={"prompt": "A" * MAX_LENGTH}).json()["count"] == MAX_LENGTH
    assert http.post("/detokenize", json={"tokens": [VOCABULARY]}).status_code == 400
    # A text has no template.
    for field in ({"chat_template_kwargs": {"a": 1}}, {"continue_final_message": True}, {"tools": TOOLS}):
        response = http.post("/tokenize", json={"prompt": "a", **field})
        assert (response.status_code, response.json()["error"]["param"]) == (400, *field)


@pytest.mark.parametrize(("route", "instead"), [("responses", "chat/completions"), ("embeddings", "embedding model")])
def test_routes_that_are_not_there_name_what_to_use(http: httpx.Client, route: str, instead: str) -> None:
    response = http.post(f"/v1/{route}", json={"model": MODEL, "input": "a"})
    assert response.status_code == 404
    assert instead in error_of(response)


def test_health_load_and_version(http: httpx.Client) -> None:
    for path in OPEN:
        assert http.get(path).json() == {"status": "ok"}
    load = http.get("/load").json()
    assert load["server_load"] == load["running"] == load["waiting"] == 0
    assert {worker["role"] for worker in load["workers"]} == {"draft", "target"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", http.get("/version").json()["version"])


def test_every_route_but_those_of_probes_takes_a_key(gateways: Gateways) -> None:
    keys = (SecretStr("first-key"), SecretStr("second-key"))
    with (
        gateways.serve(GatewaySettings(api_keys=keys)) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
    ):
        described = http.get("/openapi.json", headers={"authorization": "Bearer first-key"}).json()
        routes = [(method, path) for path, methods in described["paths"].items() for method in methods]
        routes += [("get", path) for path in ("/docs", "/redoc", "/openapi.json", "/nowhere", "/health/", "//health")]
        assert len(routes) > 15
        for method, path in routes:
            path = path.replace("{model}", "x")
            response = http.request(method, path)
            if path in OPEN:
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "missing_api_key"
            assert response.headers.get_list("www-authenticate")[0] == "Bearer"
        for value in ("Bearer first-key2", "Basic first-key", "é"):
            headers = {"authorization": value.encode()}
            assert http.get("/v1/models", headers=headers).status_code == 401, value  # type: ignore[arg-type]
        two = [("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")]
        assert http.get("/v1/models", headers=two).status_code == 401
        for key in ("first-key", "second-key"):
            with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key) as client:
                assert client.completions.create(model=MODEL, prompt="a").choices
        with (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError, match="not known here"),
        ):
            client.models.list()


class Broken(Recorder):
    """A backend with a mistake in its code."""

    def submit(self, request: GenerationRequest) -> RemoteStream:
        raise KeyError("a mistake")


class Counting(Recorder):
    """A backend that counts what the scheduler is asked, and answers once the gate is open."""

    def __init__(self, gateways: Gateways) -> None:
        super().__init__(gateways)
        self.asked = 0
        self.gate = threading.Event()

    async def statuses(self) -> list[scheduler_pb2.StatusReply]:
        self.asked += 1
        await asyncio.to_thread(self.gate.wait, LONG)
        return await self.backend.statuses()


def test_many_who_ask_for_health_at_once_ask_the_scheduler_once(gateways: Gateways) -> None:
    backend = Counting(gateways)
    with (
        gateways.serve(backend=backend) as served,
        grpc.insecure_channel(served.address) as channel,
        httpx.Client(base_url=served.url, timeout=TIMEOUT) as http,
        ThreadPoolExecutor(20) as pool,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check
        serving = [check.future(health_pb2.HealthCheckRequest()) for _ in range(10)]
        statuses = [pool.submit(http.get, "/health") for _ in range(10)]
        wait_until(lambda: backend.asked > 0, "the scheduler is asked", pause=0.01)
        backend.gate.set()
        assert {one.result().status for one in serving} == {health_pb2.HealthCheckResponse.SERVING}
        assert {one.result().status_code for one in statuses} == {200}
        # Busy machines may take longer over the answers than one answer holds.
        assert backend.asked < 5


PAGE = "https://page.example"
ASKED = ("authorization", "content-type", "x-stainless-lang")


@pytest.mark.parametrize(
    ("allowed", "shown"), [((PAGE,), PAGE), (("*",), "*"), (("http://page.example",), None), ((), None)]
)
def test_browsers_may_call_from_the_allowed_origins(
    gateways: Gateways, allowed: tuple[str, ...], shown: str | None
) -> None:
    settings = GatewaySettings(api_keys=(SecretStr("key"),), allowed_origins=allowed)
    with (
        gateways.serve(settings, Broken(gateways)) as broken,
        gateways.serve(settings) as served,
        httpx.Client(base_url=served.url, timeout=TIMEOUT, headers={"origin": PAGE}) as http,
    ):
        for path, method in (("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/nowhere", "POST")):
            asked = {"access-control-request-method": method, "access-control-request-headers": ", ".join(ASKED)}
            preflight = http.options(path, headers=asked)
            assert (preflight.status_code == 200, preflight.headers.get("access-control-allow-origin")) == (
                shown is not None,
                shown,
            )
            # The server is on the page's own network, or on its machine.
            private = http.options(path, headers={**asked, "access-control-request-private-network": "true"})
            assert private.status_code == preflight.status_code
            if shown is not None:
                assert private.headers["access-control-allow-private-network"] == "true"
                assert method in preflight.headers["access-control-allow-methods"]
                assert {*preflight.headers["access-control-allow-headers"].lower().split(", ")} == {*ASKED}
        key, body = {"authorization": "Bearer key"}, {"prompt": "a", "max_tokens": 2}
        answers = {
            200: http.post("/v1/completions", json=body, headers=key),
            400: http.post("/v1/completions", json={"prompt": ""}, headers=key),
            401: http.post("/v1/completions", json=body),
            404: http.post("/nowhere", headers=key),
            413: http.post("/v1/completions", content=b" " * (settings.limits.body_bytes + 1), headers=key),
            500: http.post(f"{broken.url}/v1/completions", json=body, headers=key),
        }
        stream = http.post("/v1/completions", json={**body, "stream": True}, headers=key)
        assert stream.text.endswith("data: [DONE]\n\n")
        for status, response in [*answers.items(), (200, stream)]:
            assert response.status_code == status
            assert response.headers.get("access-control-allow-origin") == shown
            assert response.headers["x-request-id"]
            exposed = response.headers.get("access-control-expose-headers", "")
            assert shown is None or {"x-request-id", "x-spool-seed", "retry-after"} <= {*exposed.split(", ")}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/dashboard", "/v1/completions", "/nowhere"])
def test_pages_cannot_reach_a_server_without_keys_under_their_own_names(gateways: Gateways, path: str) -> None:
    """Whoever owns a name can let it lead to 127.0.0.1; an address, or `localhost`, no page can have for its own."""
    known = ["localhost", "LOCALHOST:8000", "localhost.:1", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "192.0.2.7"]
    strange = [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[::1",
        "a@b",
        "",
    ]
    listed = GatewaySettings(allowed_hosts=("spool.internal",))
    keyed = GatewaySettings(api_keys=(SecretStr("key"),))
    with (
        gateways.serve() as served,
        gateways.serve(listed) as named,
        gateways.serve(keyed) as closed,
        httpx.Client() as http,
    ):

        def ask(url: str, host: str, path: str = path) -> httpx.Response:
            method = "POST" if path == "/v1/completions" else "GET"
            headers = {"host": host, "authorization": "Bearer key"}
            return http.request(method, f"{url}{path}", headers=headers, json={"prompt": "a", "max_tokens": 1})

        right = 404 if path == "/nowhere" else 200
        for host in known:
            assert ask(served.url, host).status_code == right, host
        for host in strange:
            refused = ask(served.url, host)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_host"), host
            assert f"is {host!r}, must be localhost, an address, or a name in gateway.allowed_hosts" in refused.text
            assert {ask(served.url, host, path).status_code for path in OPEN} == {200}
            # A page has no key to send.
            assert ask(closed.url, host).status_code == right, host
        assert ask(named.url, "spool.internal:8000").status_code == right
        assert ask(named.url, "evil.internal").status_code == 400


def test_a_key_of_metrics_opens_nothing_else(gateways: Gateways) -> None:
    settings = GatewaySettings(
        api_keys=(SecretStr("key"), SecretStr("both")), metrics_keys=(SecretStr("m"), SecretStr("both"))
    )
    with gateways.serve(settings) as served, httpx.Client(base_url=served.url, timeout=TIMEOUT) as http:

        def status(key: str, method: str, path: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "a", "max_tokens": 1} if method == "POST" else None
            return http.request(method, path, headers=headers, json=body).status_code

        for path in ("/metrics", "/load", *OPEN):
            assert {status(key, "GET", path) for key in ("key", "m", "both")} == {200}
            assert {status(key, "HEAD", path) for key in ("key", "m", "both")} == {200}
        assert http.get("/metrics", auth=("prometheus", "m")).status_code == 200
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/dashboard"),
            ("GET", "/metrics/"),
            ("GET", "/version"),
            ("POST", "/metrics"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("GET", "/nowhere"),
        ):
            refused = http.request(method, path, headers={"authorization": "Bearer m"}, json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "metrics_key"), path
            assert status("key", method, path) == status("both", method, path) != 403
        assert status("nobody's", "GET", "/metrics") == 401
        with grpc.insecure_channel(served.address) as channel:
            stub = GenerationServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListModels(pb.ListModelsRequest(), metadata=[("authorization", "Bearer m")], timeout=LONG)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
