"""Whose prompts a request can find in the prefix cache, over HTTP and gRPC: those with its own key and salt."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from pydantic import SecretStr

from services.gateway.settings import GatewaySettings, NamedKey
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc
from tests.support.cells import running_cell
from tests.support.gateway import running_gateway, save_tokenizer
from tests.support.waiting import LONG

PROMPT = list(range(20, 69))
"""Twelve pages of four tokens, and one token."""
ALL = 48
NAMED, OTHER, NAMELESS, OTHER_NAMELESS = "key-a", "key-b", "key-c", "key-d"
DIGESTS = {key: hashlib.sha256(key.encode()).hexdigest() for key in (NAMED, OTHER)}
SETTINGS = GatewaySettings(
    api_keys=(SecretStr(NAMELESS), SecretStr(OTHER_NAMELESS)),
    named_keys=(NamedKey(name="a", digest=DIGESTS[NAMED]), NamedKey(name="b", digest=DIGESTS[OTHER])),
)


@pytest.mark.parametrize("shared", [False, True])
async def test_keys_and_salts_have_a_cache_of_their_own(shared: bool, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    settings = SETTINGS.model_copy(update={"share_prefix_cache": shared})
    async with (
        running_cell(tokenizer_digest=tokenizer.vocabulary_digest.hex(), unlucky=False) as cell,
        running_gateway(cell, tokenizer, settings) as served,
        httpx.AsyncClient(base_url=served.url, timeout=LONG) as http,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        computed_before = {"target": 0.0, "draft": 0.0}

        async def computed() -> dict[str, float]:
            """Positions of prompts that workers computed, by role."""
            await cell.wait_empty()
            samples = {
                (sample.name.removeprefix("spool_prefix_cache_"), sample.labels["role"]): sample.value
                for family in cell.server.metric_families()
                for sample in family.samples
                if sample.name.startswith("spool_prefix_cache_")
            }
            return {role: samples["queries_total", role] - samples["hits_total", role] for role in computed_before}

        async def over_http(key: str, **fields: Any) -> int:
            response = await http.post(
                "/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, **fields},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == 200, response.text
            return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        async def over_grpc(key: str, **fields: Any) -> int:
            request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=PROMPT), max_tokens=8, ignore_eos=True, **fields)
            answer = await stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
            return int(answer.usage.cached_prompt_tokens)

        between_keys = ALL if shared else 0
        for call, key, fields, cached in (
            (over_http, NAMED, {}, 0),
            (over_http, NAMED, {}, ALL),
            (over_http, OTHER, {}, between_keys),
            (over_grpc, OTHER, {}, ALL),
            (over_grpc, NAMELESS, {}, between_keys),
            (over_http, NAMELESS, {"cache_salt": None}, ALL),
            (over_http, OTHER_NAMELESS, {}, between_keys),
            # Salts are apart from each other and from requests without one, whether or not keys share.
            (over_http, NAMED, {"cache_salt": "one"}, 0),
            (over_grpc, NAMED, {"cache_salt": "one"}, ALL),
            (over_grpc, NAMED, {"cache_salt": "two"}, 0),
            (over_http, NAMED, {"cache_salt": "two"}, ALL),
            (over_http, OTHER, {"cache_salt": "two"}, between_keys),
            (over_http, NAMED, {}, ALL),
        ):
            what = call.__name__, key, fields
            assert await call(key, **fields) == cached, what
            after = await computed()
            # What is said to be computed is computed, by drafts as well.
            assert after["target"] - computed_before["target"] == len(PROMPT) - cached, what
            assert (after["draft"] - computed_before["draft"] < ALL) == (cached == ALL), what
            computed_before.update(after)
