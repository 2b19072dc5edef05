"""Keys with a name: their limits, priorities, metrics and log lines, over HTTP and gRPC and a session with the
scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import SecretStr

from spool.client.v1 import generation_pb2 as pb
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import EmitTokens, SendStep, SequenceRequest
from spool.services.gateway.settings import GatewaySettings, NamedKey, SamplingDefaults
from spool.services.observability.logs import LogFormat, install_logs
from spool.services.observability.observer import ServiceObserver
from tests.support.cells import running_cell
from tests.support.clients import Answer, clients_of
from tests.support.gateway import running_gateway, save_tokenizer
from tests.support.logs import restored_logger
from tests.support.waiting import LONG, until
from tests.support.watched_engine import WatchedEngine

KEYS = (
    KeyClass("queued", max_running=1, max_waiting=1),
    KeyClass("metered", tokens_per_minute=60),
    KeyClass("urgent", max_running=1),
)
SECRETS = {key.name: f"secret-of-{key.name}" for key in KEYS} | {"": "without-a-name"}
SETTINGS = GatewaySettings(
    api_keys=(SecretStr(SECRETS[""]),),
    named_keys=tuple(
        NamedKey(name=key.name, digest=hashlib.sha256(SECRETS[key.name].encode()).hexdigest()) for key in KEYS
    ),
)
CONFIG = SchedulerConfig(policy=Policy.RAGGED, max_running=4, keys=KEYS)
SALT = "salt-of-a-tenant"
TOKENS = {"max_tokens": 5, "ignore_eos": True}


@dataclass
class Outcome:
    http: dict[str, Answer] = field(default_factory=dict)
    grpc: dict[str, Answer] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    samples: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """By name, key and limit."""
    shown: list[str] = field(default_factory=list)
    """What another key sees while sequences of the first run and wait."""
    lines: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    stream = io.StringIO()
    with restored_logger():
        install_logs(LogFormat.JSON, logging.DEBUG, stream)
        outcome = asyncio.run(drive(tmp_path_factory.mktemp("tokenizer")))
    outcome.lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return outcome


async def drive(folder: Path) -> Outcome:
    tokenizer, watched, outcome = save_tokenizer(folder), WatchedEngine(), Outcome()
    async with (
        running_cell(config=CONFIG, tokenizer_digest=tokenizer.vocabulary_digest.hex()) as cell,
        running_gateway(cell, tokenizer, SETTINGS) as served,
        clients_of(served) as clients,
    ):
        watched.watch(cell.workers[1].executor)

        def headers(name: str, key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {SECRETS[key]}", "x-request-id": name}

        async def over_http(name: str, key: str, **fields: Any) -> Answer:
            outcome.http[name] = await clients.over_http([20, 21], headers=headers(name, key), **TOKENS, **fields)
            outcome.ended.append(name)
            return outcome.http[name]

        async def over_grpc(name: str, key: str, **fields: Any) -> None:
            outcome.grpc[name] = await clients.over_grpc([20, 22], headers=headers(name, key), **TOKENS, **fields)

        # max_waiting: one runs, one waits, and another key's sequence comes in.
        watched.gate.close()
        salted = {"cache_salt": SALT}
        held = [asyncio.create_task(over_http(f"held-{number}", "queued", **salted)) for number in range(2)]
        await until(lambda: cell.live_sequences == 2)
        other = headers("other", "")
        for path in ("/metrics", "/load", "/dashboard"):
            outcome.shown.append((await clients.http.get(path, headers=other)).text)
        async with clients.http.stream("GET", "/dashboard/views", headers=other) as views:
            outcome.shown.append(await anext(line async for line in views.aiter_lines() if '"sequences":[[' in line))
        await over_http("too-many", "queued")
        await over_grpc("too-many", "queued")
        held.append(asyncio.create_task(over_http("beside", "")))
        await until(lambda: cell.live_sequences == 3)
        watched.gate.open()
        await asyncio.gather(*held)
        # tokens_per_minute: 2 tokens of prompt and 5 of output each time, 60 in all.
        while (await over_http(f"metered-{len(outcome.ended)}", "metered")).status == 200:
            await cell.wait_empty()
        await over_grpc("metered", "metered")
        # priority: one runs; of the two that wait, the later one is more urgent.
        watched.gate.close()
        held = []
        for name, priority in (("first", 0), ("low", 7), ("high", -7)):
            held.append(asyncio.create_task(over_http(name, "urgent", priority=priority)))
            await until(lambda: cell.live_sequences == len(held))
        watched.gate.open()
        await asyncio.gather(*held)
        await over_grpc("named", "urgent", priority=-3)
        await cell.wait_empty()
        for family in cell.server.metric_families():
            for sample in family.samples:
                if "key" in sample.labels:
                    place = sample.name, sample.labels["key"], sample.labels.get("limit", "")
                    outcome.samples[place] = sample.value
    return outcome


def test_too_many_waiting_sequences_of_a_key_are_refused_by_name(outcome: Outcome) -> None:
    statuses = {429: outcome.http["too-many"], grpc.StatusCode.RESOURCE_EXHAUSTED: outcome.grpc["too-many"]}
    for status, answer in statuses.items():
        assert (answer.status, answer.code) == (status, "rate_limit_exceeded")
        assert answer.error == "1 sequences wait, max_waiting of key queued is 1"
        assert int(answer.headers["retry-after"]) >= 1
    assert [outcome.http[name].status for name in ("held-0", "held-1", "beside")] == [200] * 3


def test_a_key_that_has_used_its_tokens_gets_the_time_to_retry(outcome: Outcome) -> None:
    answered = [answer for name, answer in outcome.http.items() if name.startswith("metered-")]
    # 8 x 7 tokens of 60 are gone after eight, and a ninth finds four. A slow machine adds one a second.
    assert 9 <= len(answered) - 1 <= 9 + LONG / 7
    for status, refused in ((429, answered[-1]), (grpc.StatusCode.RESOURCE_EXHAUSTED, outcome.grpc["metered"])):
        assert refused.status == status
        assert "tokens_per_minute of key metered is 60" in refused.error
        # A token a second, and at most as many were owed as the last request took.
        assert 1 <= int(refused.headers["retry-after"]) <= 8


def test_priorities_order_the_requests_of_a_key(outcome: Outcome) -> None:
    assert [name for name in outcome.ended if name in ("first", "low", "high")] == ["first", "high", "low"]


def test_metrics_count_tokens_and_refusals_by_key(outcome: Outcome) -> None:
    def by_key(name: str) -> dict[str, float]:
        return {key: value for (sample, key, _), value in outcome.samples.items() if sample == f"spool_key_{name}"}

    metered = sum(answer.status == 200 for name, answer in outcome.http.items() if "metered" in name)
    served = {"": 1, "queued": 2, "metered": metered, "urgent": 4}
    assert by_key("prompt_tokens_total") == {key: 2 * count for key, count in served.items()}
    assert by_key("generation_tokens_total") == {key: 5 * count for key, count in served.items()}
    assert by_key("requests_running") == by_key("requests_waiting") == dict.fromkeys(served, 0)
    refused = {(key, limit): value for (name, key, limit), value in outcome.samples.items() if limit and value}
    assert refused == {("queued", "max_waiting"): 2, ("metered", "tokens_per_minute"): 2}


def test_log_lines_of_a_request_name_its_key(outcome: Outcome) -> None:
    of_gateway = [line for line in outcome.lines if line["logger"].startswith("spool.services.gateway")]
    expected = {"held-0": "queued", "too-many": "queued", "named": "urgent", "metered": "metered", "beside": None}
    for request_id, key in expected.items():
        lines = [line for line in of_gateway if line.get("request_id") == request_id]
        assert lines, request_id
        assert {line.get("key") for line in lines} == {key}, request_id
    (access,) = [line for line in of_gateway if line.get("request_id") == "too-many" and "status" in line]
    assert access["status"] == 429
    text = json.dumps(outcome.lines)
    assert not any(secret in text for secret in SECRETS.values())


def test_what_other_keys_see_names_neither_key_nor_request(outcome: Outcome) -> None:
    text = "\n".join(outcome.shown)
    assert "spool_" in text
    for private in (*SECRETS.values(), "held-0", SALT, r"\bqueued\b"):
        assert not re.search(private, text), private


GREEDY, MODEST = "key-that-asks-for-everything", "key-that-asks-for-little"
PRIVATE = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
WITHOUT_NAMES = GatewaySettings(
    api_keys=(SecretStr(GREEDY), SecretStr(MODEST)),
    receipt_key=SecretStr(PRIVATE),
    sampling=SamplingDefaults(temperature=0),
)


def showing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_without_a_name_cannot_fill_the_queue_of_another(tmp_path: Path) -> None:
    """Each choice of a request counts as one that waits."""

    async def drive() -> None:
        tokenizer, watched = save_tokenizer(tmp_path), WatchedEngine()
        config = SchedulerConfig(policy=Policy.RAGGED, max_running=1, max_queued_sequences=8)
        async with (
            running_cell(config=config, tokenizer_digest=tokenizer.vocabulary_digest.hex()) as cell,
            running_gateway(cell, tokenizer, WITHOUT_NAMES) as served,
            clients_of(served) as clients,
        ):

            async def ask(key: str, n: int) -> Answer:
                return await clients.over_http([20, 21], headers=showing(key), n=n, **TOKENS)

            watched.watch(cell.workers[1].executor)
            watched.gate.close()
            held = [asyncio.create_task(ask(GREEDY, n)) for n in (5, 4)]
            await until(lambda: cell.live_sequences == 9)
            assert (await ask(GREEDY, 1)).status == 429
            held += [asyncio.create_task(ask(MODEST, 2)) for _ in range(2)]
            await until(lambda: cell.live_sequences == 13)
            assert (await ask(MODEST, 1)).status == 429
            watched.gate.open()
            assert [(await one).status for one in held] == [200] * 4

    asyncio.run(drive())


class MostReplayed(ServiceObserver):
    """How many tokens of replays the largest of all steps verifies."""

    def __init__(self) -> None:
        self.tokens = 0
        self._replays: set[int] = set()

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        if request.expected_output:
            self._replays.add(request.sequence_id)

    def step_sent(self, step: SendStep, now: float) -> None:
        self.tokens = max(self.tokens, sum(row.verify for row in step.rows if row.sequence_id in self._replays))


def test_replays_of_one_key_leave_queue_and_steps_to_others(tmp_path: Path) -> None:
    """Six calls with many receipts each: few of them are with the scheduler, the rest with the client, and no step
    takes much longer for them than for as many choices."""

    async def drive() -> None:
        tokenizer, watched, most = save_tokenizer(tmp_path), WatchedEngine(), MostReplayed()
        async with (
            running_cell(tokenizer_digest=tokenizer.vocabulary_digest.hex(), observers=[most]) as cell,
            running_gateway(cell, tokenizer, WITHOUT_NAMES) as served,
            clients_of(served) as clients,
        ):

            async def replayed() -> list[bool]:
                requests = [pb.ReplayRequest(receipt=receipt)] * 40
                call = clients.stub.Replay(iter(requests), metadata=tuple(showing(GREEDY).items()), timeout=LONG)
                return [answer.equal async for answer in call]

            asked = {"prompt": [20, 21], "receipt": True, "max_tokens": 40, "ignore_eos": True}
            answer = await clients.http.post("/v1/completions", json=asked, headers=showing(GREEDY))
            receipt = json.dumps(answer.json()["choices"][0]["receipt"])
            watched.watch(cell.workers[1].executor)
            watched.gate.close()
            replays = [asyncio.create_task(replayed()) for _ in range(6)]
            await until(lambda: cell.live_sequences >= 4)
            others = [asyncio.create_task(clients.over_http([20, 21], headers=showing(MODEST), **TOKENS)) for _ in "12"]
            await until(lambda: cell.live_sequences >= 6)
            assert cell.live_sequences == 6
            watched.gate.open()
            assert [(await one).status for one in others] == [200] * 2
            assert [all(await one) for one in replays] == [True] * 6
            assert 15 <= most.tokens <= 60

    asyncio.run(drive())


def niceness_of_checks() -> set[int]:
    """Of the processes that check constraints, now or once there are some, more than this one's."""
    own, found = os.nice(0), set[int]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spool.services.gateway.grammar_check" in process.cmdline():
                found.add(process.nice() - own)
    return found


@pytest.mark.slow
def test_checks_of_constraints_go_by_turns_of_keys_and_count_for_the_deadline(tmp_path: Path) -> None:
    """One key asks for a hundred checks that each take all the time that a check may. Of these few come before another
    key's, and a request that waits behind them fails at its deadline. Workers come first on the cores."""

    async def drive() -> None:
        tokenizer = save_tokenizer(tmp_path)
        async with (
            running_cell(tokenizer_digest=tokenizer.vocabulary_digest.hex(), unlucky=False) as cell,
            running_gateway(cell, tokenizer, WITHOUT_NAMES) as served,
            clients_of(served) as clients,
        ):
            answers: list[httpx.Response] = []

            async def ask(key: str, regex: str, seconds: float = LONG) -> httpx.Response:
                headers = {**showing(key), "x-request-timeout-seconds": str(seconds)}
                body = {"prompt": [20, 21], "max_tokens": 2, "structured_outputs": {"regex": regex}}
                answers.append(await clients.http.post("/v1/completions", json=body, headers=headers))
                return answers[-1]

            # The processes begin, which takes a while.
            assert [one.status_code for one in await asyncio.gather(*(ask(GREEDY, f"a{n}") for n in "12"))] == [200] * 2
            answers.clear()

            def checked() -> int:
                return sum(one.status_code == 400 for one in answers)

            hostile = [asyncio.create_task(ask(GREEDY, f"(a{{1000}}){{1000}}{n}")) for n in range(8)]
            await until(lambda: checked() > 0)
            assert niceness_of_checks() == {min(10, 19 - os.nice(0))}
            assert (await ask(GREEDY, "[de]{2}", seconds=0.1)).status_code == 504
            answers.clear()
            hostile += [asyncio.create_task(ask(GREEDY, f"(a{{1000}}){{1000}}{n}")) for n in range(8, 100)]
            await until(lambda: len(answers) >= 66)
            refused = [one for one in answers if one.status_code == 429]
            assert len(refused) >= 66 - 2
            error = refused[0].json()["error"]
            assert error["message"] == "32 constraints of this API key wait to be checked, no more may"
            assert (error["param"], error["code"]) == ("structured_outputs", "rate_limit_exceeded")
            assert int(refused[0].headers["retry-after"]) >= 1

            before = checked()
            assert (await ask(MODEST, "[bc]{2}")).status_code == 200
            assert checked() - before <= 8
            for one in hostile:
                one.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)

    asyncio.run(drive())


class StepsUntilAnswered(ServiceObserver):
    """Counts the target's steps that were answered between a sequence's arrival and its first token."""

    def __init__(self, prompt: list[int]) -> None:
        self.steps: int | None = None
        self._prompt, self._sequence_id, self._replies = tuple(prompt), 0, 0

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        if request.prompt == self._prompt:
            self._sequence_id, self._replies = request.sequence_id, 0

    def step_replied(self, *answer: object) -> None:
        self._replies += 1

    def tokens_emitted(self, emissions: Sequence[EmitTokens]) -> None:
        if self.steps is None and self._sequence_id in (one.sequence_id for one in emissions):
            self.steps = self._replies


def test_beside_a_key_that_asks_for_everything_a_request_is_answered_within_five_steps(tmp_path: Path) -> None:
    """60 requests with 32 choices each, with the default configuration."""

    async def drive() -> None:
        tokenizer, watched, counter = save_tokenizer(tmp_path), WatchedEngine(), StepsUntilAnswered([20, 22])
        digest = tokenizer.vocabulary_digest.hex()
        async with (
            running_cell(config=SchedulerConfig(), tokenizer_digest=digest, observers=[counter]) as cell,
            running_gateway(cell, tokenizer, WITHOUT_NAMES) as served,
            clients_of(served) as clients,
        ):
            watched.watch(cell.workers[1].executor)
            watched.gate.close(but_for=3)
            everything = {"prompt": [20, 21], "n": 32, "max_tokens": 1000, "ignore_eos": True}
            greedy: list[asyncio.Task[httpx.Response]] = []
            for _ in range(60):
                post = clients.http.post("/v1/completions", json=everything, headers=showing(GREEDY))
                greedy.append(asyncio.create_task(post))
                # Of many that come at once, each would take a part of the queue and give it back.
                await until(lambda: greedy[-1].done() or cell.live_sequences == 32 * len(greedy))
            assert [one.done() for one in greedy] == [False] * 34 + [True] * 26  # 64 sequences run, 1024 wait
            live = cell.live_sequences
            modest = asyncio.create_task(clients.over_http([20, 22], headers=showing(MODEST), max_tokens=1))
            await until(lambda: cell.live_sequences == live + 1)
            watched.gate.open()
            assert (await modest).status == 200
            assert {one.result().status_code for one in greedy if one.done()} == {429}
            assert counter.steps is not None
            assert counter.steps <= 5
            for one in greedy:
                one.cancel()
            await asyncio.gather(*greedy, return_exceptions=True)

    asyncio.run(drive())
