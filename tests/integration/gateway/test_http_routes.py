"""HTTP routes that generate no text, and the API keys of all routes."""

from __future__ import annotations

import re

import httpx
import openai
import pytest
from pydantic import SecretStr

from protos import scheduler_pb2
from services.backend.interface import GenerationRequest
from services.gateway.settings import GatewaySettings
from services.scheduler_client.remote_stream import RemoteStream
from tests.integration.gateway.expected import CHAT, TIMEOUT, Recorder, error_of
from tests.integration.gateway.test_http_tools import TOOLS
from tests.support.gateway import MODEL, Gateways
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY

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

    async def submit(self, request: GenerationRequest) -> RemoteStream:
        raise KeyError("a mistake")


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
