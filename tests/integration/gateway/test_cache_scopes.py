"""Whose prompts a request can find in the prefix cache, over HTTP and gRPC: those with its own key and salt."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import SecretStr

from spool.services.gateway.settings import GatewaySettings, NamedKey
from tests.support.cells import running_cell
from tests.support.clients import clients_of
from tests.support.gateway import Gateways, Served, running_gateway, save_tokenizer

PAGE_SIZE = 4
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
        clients_of(served) as clients,
    ):
        computed_before = 0.0

        async def computed() -> float:
            """Positions of prompts that targets computed."""
            await cell.wait_empty()
            samples = {
                sample.name.removeprefix("spool_prefix_cache_"): sample.value
                for family in cell.server.metric_families()
                for sample in family.samples
                if sample.name.startswith("spool_prefix_cache_")
            }
            return samples["queries_total"] - samples["hits_total"]

        between_keys = ALL if shared else 0
        for call, key, fields, cached in (
            (clients.over_http, NAMED, {}, 0),
            (clients.over_http, NAMED, {}, ALL),
            (clients.over_http, OTHER, {}, between_keys),
            (clients.over_grpc, OTHER, {}, ALL),
            (clients.over_grpc, NAMELESS, {}, between_keys),
            (clients.over_http, NAMELESS, {"cache_salt": None}, ALL),
            (clients.over_http, OTHER_NAMELESS, {}, between_keys),
            # Salts are apart from each other and from requests without one, whether or not keys share.
            (clients.over_http, NAMED, {"cache_salt": "one"}, 0),
            (clients.over_grpc, NAMED, {"cache_salt": "one"}, ALL),
            (clients.over_grpc, NAMED, {"cache_salt": "two"}, 0),
            (clients.over_http, NAMED, {"cache_salt": "two"}, ALL),
            (clients.over_http, OTHER, {"cache_salt": "two"}, between_keys),
            (clients.over_http, NAMED, {}, ALL),
        ):
            what = call.__name__, key, fields
            headers = {"authorization": f"Bearer {key}"}
            answer = await call(PROMPT, headers=headers, max_tokens=8, ignore_eos=True, **fields)
            assert answer.usage.cached == cached, what
            after = await computed()
            # What is said to be computed is computed.
            assert after - computed_before == len(PROMPT) - cached, what
            computed_before = after


async def test_a_turn_of_a_chat_takes_over_the_pages_of_the_turn_before(gateways: Gateways, served: Served) -> None:
    messages = [{"role": "system", "content": "answer the questions of this chat and of no other"}]
    before = 0
    async with clients_of(served) as clients:
        for turn in range(4):
            messages.append({"role": "user", "content": f"question {turn}"})
            answer = await clients.over_http(messages, max_tokens=8)
            assert answer.usage.prompt == len(gateways.tokenizer.encode_chat(messages))
            assert answer.usage.cached > before - PAGE_SIZE
            assert answer.usage.cached > 0 or turn == 0
            messages.append({"role": "assistant", "content": answer.choices[0].text})
            before = answer.usage.prompt
