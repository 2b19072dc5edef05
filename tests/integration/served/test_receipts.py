"""Receipts of answers amid which targets and the scheduler are killed, computed again by `spool replay`, also after
changes of one bit of each."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from spool.client import Client
from spool.engine.cpu.isa import AUTO, available_isas, library_limits
from spool.services.receipts.receipt import Receipt
from spool.services.receipts.signing import ReceiptKey
from tests.support.changed_workers import slow_steps, unlike
from tests.support.chat_templates import HERMES
from tests.support.command_line import Ended, spool, write_lines
from tests.support.no_ray import NoRay, served_without_ray
from tests.support.serving import ENGINE, PACED
from tests.support.waiting import LONG

pytestmark = pytest.mark.slow

MANY = [pytest.mark.long, pytest.mark.timeout(7200)]

KILLS = (["target-0"], ["scheduler"], ["target-1", "scheduler"])
CHAT = {"messages": [{"role": "user", "content": "Look!"}]}
ITEM = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n", "s"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": ITEM}}
STRICT = {
    "type": "function",
    "function": {"name": "look", "parameters": {**ITEM, "additionalProperties": False}, "strict": True},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "item", "schema": ITEM}}
ENDED = {"stop_token_ids": [93]}
SHAPES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"prompt": "Once upon a hill", "n": 2},
    {"prompt": [5, 9, 23] * 30, "echo": True, "logprobs": 1},
    {"prompt": "A number: ", "structured_outputs": {"regex": "([0-9]{1,3},){12,20}"}, **ENDED},
    {**CHAT, "stop": "q"},
    {**CHAT, "n": 2, "tools": [TOOL], "tool_choice": "required", **ENDED},
    {**CHAT, "response_format": SCHEMA, **ENDED},
    {**CHAT, "tools": [STRICT], "logprobs": True, **ENDED},
]
PARAMETERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 30},
    {"min_p": 0.02},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"5": 4, "9": -100}},
    {"bad_words": ["q", "on"]},
    {"min_tokens": 20},
    {"spool": {"speculation": False}},
    {"spool": {"draft_length": 3}},
]


def asked(number: int) -> dict[str, Any]:
    """A request of any kind."""
    rng = random.Random(number)
    body: dict[str, Any] = {
        "receipt": True,
        "temperature": rng.choice([0, 0, 0.3, 0.7, 1, 1.2]),
        "max_tokens": rng.randint(40, 80),
    }
    if rng.random() < 0.5:
        body["seed"] = rng.getrandbits(63)
    for parameters in rng.sample(PARAMETERS, rng.randint(0, 4)):
        body |= parameters
    return body | SHAPES[number % len(SHAPES)]


@contextmanager
def serving(
    target: Path, draft: Path, folder: Path, engine: Mapping[str, str], group: Mapping[str, Any], **settings: Any
) -> Iterator[tuple[NoRay, str]]:
    """With the public key of its receipts. `engine` and `group`: settings of the engine and of targets."""
    key = folder / "key.pem"
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key.write_bytes(private)
    settings |= {
        "engine": ENGINE | engine,
        "groups": {"target": group},
        "gateway": {"receipts": True, "receipt_key_file": str(key)},
    }
    with served_without_ray(folder, target, "--draft", draft, **settings) as server:
        yield server, ReceiptKey(private.decode()).public
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(LONG)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Queue[None]) -> list[dict[str, Any]]:
    """The receipts of a stream; tells when the stream has tokens."""
    route = "chat/completions" if "messages" in body else "completions"
    found: list[dict[str, Any]] = []
    told = False
    async with client.stream("POST", f"/v1/{route}", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            assert '"error"' not in line, line
            if not told and line.startswith("data: ") and '"role":' not in line:
                told = True
                begun.put_nowait(None)
            if '"receipt":' in line:
                found += [choice["receipt"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    return found


async def ask_all(server: NoRay, bodies: list[dict[str, Any]], kills: list[str]) -> list[dict[str, Any]]:
    """At once; processes are killed when some of the streams have begun."""
    begun: asyncio.Queue[None] = asyncio.Queue()
    async with httpx.AsyncClient(base_url=server.url, timeout=4 * LONG) as client:
        answers = [asyncio.create_task(ask(client, body, begun)) for body in bodies]
        for _ in range(len(bodies) // 2):
            await begun.get()
        server.kill(*kills)
        return [receipt for answer in await asyncio.gather(*answers) for receipt in answer]


def chatty(target: Path, folder: Path) -> Path:
    """A copy that takes tools. Each of its conversations has a prompt of its own, which only the receipt knows."""
    copy = shutil.copytree(target, folder / "target")
    (copy / "chat_template.jinja").write_text("{{ strftime_now('%H:%M:%S.%f') }}" + HERMES)
    return copy


async def gathered(server: NoRay, count: int, at_once: int) -> list[dict[str, Any]]:
    """So many receipts or more, of requests of all kinds; each time that so many run at once, processes are killed."""
    receipts: list[dict[str, Any]] = []
    for kills in cycle(KILLS):
        await asyncio.to_thread(server.wait_until_up)
        bodies = [asked(len(receipts) + number) for number in range(at_once)]
        found = await ask_all(server, bodies, kills)
        assert len(found) == sum(body.get("n", 1) for body in bodies)
        receipts += found
        if len(receipts) >= count:
            return receipts
    raise AssertionError


def replayed(target: Path, receipts: list[dict[str, Any]], *options: object, isa: str = AUTO) -> Ended:
    file = write_lines(target.parent / "receipts.jsonl", *receipts)
    limits = library_limits(isa)
    return spool("replay", file, "--target", target, "--json", *options, environment=limits, timeout=1000)


@pytest.mark.parametrize(
    ("count", "at_once", "isa"),
    [(42, 12, "auto"), *(pytest.param(1000, 125, isa, marks=MANY) for isa in ("avx2", "avx512"))],
)
def test_killed_processes_leave_no_mark_on_receipts_and_changes_do(
    count: int, at_once: int, isa: str, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    if isa not in ("auto", *(each.name for each in available_isas())):
        pytest.skip(f"another processor: without {isa}")
    target = chatty(tiny_pair[0], tmp_path)
    group = PACED | {"replicas": 2}
    with serving(target, tiny_pair[1], tmp_path, {"cpu_isa": isa}, group) as (server, public_key):
        receipts = asyncio.run(gathered(server, count, at_once))
        server.wait_until_up()
        with Client(server.address) as client:
            answers = client.replay(map(json.dumps, receipts), timeout=8 * LONG)
            found = [next(answers)]
            server.kill("target-0", "scheduler")
            found += answers
        assert sorted(answer.index for answer in found) == [*range(len(receipts))]
        assert not [answer for answer in found if not answer.equal]
    ended = replayed(target, receipts, "--public-key", public_key)
    assert ended.code == 0, ended.err
    assert ended.summary["tokens"] == sum(len(receipt["output_token_ids"]) for receipt in receipts)

    rng = random.Random(count)
    forged, places = [], []
    for receipt in map(Receipt.from_json, receipts):
        output, digests = list(receipt.output), list(receipt.logits_digests)
        place = rng.randrange(len(output))
        changed, bits = rng.choice([(output, 5), (digests, 64)])
        changed[place] ^= 1 << rng.randrange(bits)
        forged.append(replace(receipt, output=tuple(output), logits_digests=tuple(digests)).to_json())
        places.append(place)
    ended = replayed(target, forged)
    assert ended.code == 1, ended.err
    for found, place in zip(ended.summary["receipts"], places, strict=True):
        assert found["reason"].startswith(f"output token {place} is "), found["reason"]


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=MANY)])
def test_unlike_targets_give_one_text_and_receipts_hold_on_every_processor(
    count: int, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Requests go on at targets with another instruction set where theirs are killed."""
    isas = [isa.name for isa in available_isas()]
    environment = slow_steps(0.02) | unlike({"target-0": isas[0], "target-1": isas[-1]})
    group = PACED | {"replicas": 2, "environment": environment}
    models, target = {"quantization": "int4"}, chatty(tiny_pair[0], tmp_path)
    with serving(target, tiny_pair[1], tmp_path, {}, group, models=models) as (server, _):
        receipts = asyncio.run(gathered(server, count, 20))
        said = "\n".join(server.lines)
    assert all(f"CPU kernels for {isa}" in said for isa in (isas[0], isas[-1])), said
    assert "may give other bits" not in said
    assert {receipt["fingerprint"]["numerics"] for receipt in receipts} == {"universal 1"}
    for isa in isas:
        ended = replayed(target, receipts, isa=isa)
        assert ended.code == 0, ended.err
        assert ended.summary["tokens"] == sum(len(receipt["output_token_ids"]) for receipt in receipts)
