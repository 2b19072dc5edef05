"""Metrics say exactly what clients counted: 210 requests of every kind over HTTP and gRPC, against a whole cell."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from scheduler.config import Policy, SchedulerConfig
from services.gateway.settings import GatewaySettings
from services.scheduler.metrics_endpoint import MetricsEndpoint
from services.text.tokenizer import ModelTokenizer
from spool_client.v1 import generation_pb2 as pb
from spool_client.v1 import generation_pb2_grpc
from tests.support.cells import Cell, running_cell
from tests.support.gateway import MODEL, running_gateway, save_tokenizer
from tests.support.stand_in_worker import ROW_FAILS, continuation
from tests.support.waiting import LONG, until
from tests.support.watched_engine import VerifiedDraft, WatchedEngine

KEY = "key"
PROMPT_LENGTH = 4
WINDOW, QUEUE = 6, 12
CONFIG = SchedulerConfig(
    policy=Policy.RAGGED, draft_length=4, batch_size=4, max_running=WINDOW, max_queued_sequences=QUEUE
)
SETTINGS = GatewaySettings(model_names=(MODEL,), api_keys=(SecretStr(KEY),))

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Tally:
    """What clients asked for and got."""

    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    began: int = 0
    stopped_by_text: int = 0
    stop_tokens: dict[tuple[int, ...], int] = field(default_factory=dict)

    def ended(self, usage: tuple[int, int, int, int], ends: list[str]) -> None:
        self.tokens += usage[1]
        self.drafted += usage[2]
        self.accepted += usage[3]
        self.ends.update(ends)
        self.began += len(ends)


@dataclass(frozen=True)
class Ask:
    """A prompt whose continuation is known, and how it is to end."""

    prompt: list[int]
    max_tokens: int
    stop: str | None
    stop_token: int | None
    drafts: bool
    choices: int = 1

    @property
    def end(self) -> str:
        return "length" if self.stop is None and self.stop_token is None else "stop"


class Clients:
    """Over both APIs of one gateway."""

    def __init__(self, http: openai.AsyncOpenAI, stub: generation_pb2_grpc.GenerationServiceStub, tally: Tally) -> None:
        self.http = http
        self.stub = stub
        self.tally = tally
        self.metadata = (("authorization", f"Bearer {KEY}"),)

    async def over_http(self, ask: Ask, stream: bool) -> None:
        extra: dict[str, Any] = {"ignore_eos": True, "spool": {} if ask.drafts else {"speculation": False}}
        if ask.stop_token is not None:
            extra["stop_token_ids"] = [ask.stop_token]
        shared: dict[str, Any] = {
            "model": MODEL,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "stop": ask.stop,
            "n": ask.choices,
            "extra_body": extra,
        }
        ends: list[str] = []
        if stream:
            chunks = await self.http.completions.create(**shared, stream=True, stream_options={"include_usage": True})
            async for chunk in chunks:
                ends += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
                usage = chunk.usage or None
        else:
            whole = await self.http.completions.create(**shared)
            ends = [choice.finish_reason for choice in whole.choices]
            usage = whole.usage
        assert usage is not None
        spool = usage.model_dump()["spool"]
        self.tally.ended((usage.prompt_tokens, usage.completion_tokens, spool["drafted"], spool["accepted"]), ends)
        assert ends == [ask.end] * ask.choices

    async def over_grpc(self, ask: Ask, stream: bool) -> None:
        request = message(ask)
        if stream:
            replies = [reply async for reply in self.stub.GenerateStream(request, metadata=self.metadata)]
            reasons = [reply.choice.finish_reason for reply in replies if reply.choice.finish_reason]
            usage = replies[-1].usage
        else:
            whole = await self.stub.Generate(request, metadata=self.metadata)
            reasons, usage = [choice.finish_reason for choice in whole.choices], whole.usage
        ends = [pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() for reason in reasons]
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.drafted_tokens, usage.accepted_tokens)
        self.tally.ended(counts, ends)
        assert ends == [ask.end] * ask.choices

    async def complete(self, ask: Ask, number: int) -> None:
        self.tally.requests += 1
        if ask.stop_token is not None:
            self.tally.stop_tokens[tuple(ask.prompt)] = ask.stop_token
        self.tally.stopped_by_text += ask.choices * (ask.stop is not None)
        await (self.over_http if number % 2 else self.over_grpc)(ask, stream=number // 2 % 2 == 0)

    async def refused(self, kind: str, call: Awaitable[Any], status: int | grpc.StatusCode) -> None:
        self.tally.requests += 1
        self.tally.failures[kind] += 1
        if isinstance(status, int):
            with pytest.raises(openai.APIStatusError) as found:
                await call
            assert found.value.status_code == status
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() is status


def message(ask: Ask) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenIds(token_ids=ask.prompt),
        max_tokens=ask.max_tokens,
        n=ask.choices,
        stop=[] if ask.stop is None else [ask.stop],
        stop_token_ids=[] if ask.stop_token is None else [ask.stop_token],
        ignore_eos=True,
        draft_length=None if ask.drafts else 0,
    )


def asks(tokenizer: ModelTokenizer, kinds: int) -> list[Ask]:
    """Prompts of their own for each ask: so many of each way to end, and the rest to be cancelled or refused."""
    found: dict[str, list[Ask]] = {"length": [], "token": [], "text": []}
    for number in count():
        prompt = [20 + number % 60, 21 + number // 60 % 60, 30, 31]
        drafts, kind = number % 3 != 0, ("length", "token", "text")[number % 3 if number % 2 else number % 4 % 3]
        if len(found[kind]) < kinds:
            ask = _ask(tokenizer, prompt, drafts, kind)
            found[kind] += [] if ask is None else [ask]
        if all(len(each) == kinds for each in found.values()):
            return [ask for each in zip(*found.values(), strict=True) for ask in each]
    raise AssertionError


def _ask(tokenizer: ModelTokenizer, prompt: list[int], drafts: bool, kind: str) -> Ask | None:
    if kind == "length":
        return Ask(prompt, 5 + sum(prompt) % 40, None, None, drafts, choices=1 + sum(prompt) % 2)
    output = continuation(prompt, 30)
    if kind == "token":
        place = 3 + sum(prompt) % 20
        return Ask(prompt, 40, None, output[place], drafts) if output.index(output[place]) == place else None
    # A text that its last tokens complete, so that scheduler and gateway end the sequence at the same token.
    for length in range(3, 12):
        text, last = tokenizer.decode(output[:length], False), tokenizer.decode(output[length - 1 : length], False)
        if len(last) == 2 and last.isalpha() and text.isascii() and text.index(last) == len(text) - 2:
            return Ask(prompt, length, last, None, drafts)
    return None


@dataclass(frozen=True)
class Outcome:
    tally: Tally
    verified: list[VerifiedDraft]
    metrics: Samples
    of_another_gateway: Samples
    of_scheduler: Samples
    unfinished: int


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return asyncio.run(drive(tmp_path_factory.mktemp("tokenizer")))


async def drive(folder: Path) -> Outcome:
    tokenizer, tally, watched = save_tokenizer(folder), Tally(), WatchedEngine()
    digest = tokenizer.vocabulary_digest.hex()
    async with (
        running_cell(config=CONFIG, tokenizer_digest=digest, model_id=MODEL) as cell,
        running_gateway(cell, tokenizer, SETTINGS) as served,
        running_gateway(cell, tokenizer, SETTINGS) as other,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=LONG) as http,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        watched.watch(cell.workers[1].executor)
        clients = Clients(http, generation_pb2_grpc.GenerationServiceStub(channel), tally)
        await those_that_end(clients, asks(tokenizer, kinds=46))
        await those_that_are_wrong(clients)
        await those_that_fail(clients)
        await those_that_wait_and_those_refused(clients, cell, watched)
        await those_that_leave(clients, cell, watched, tokenizer)
        await cell.wait_empty()
        async with MetricsEndpoint(cell.server.metric_families, "127.0.0.1", 0) as endpoint:
            assert endpoint.url is not None
            of_scheduler = await scrape(endpoint.url)
        gateways = [await scrape(f"{each.url}/metrics") for each in (served, other)]
        return Outcome(tally, watched.drafts, *gateways, of_scheduler, cell.live_sequences)


async def scrape(url: str) -> Samples:
    async with httpx.AsyncClient(timeout=LONG) as http:
        text = (await http.get(url, headers={"authorization": f"Bearer {KEY}"})).text
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


async def those_that_end(clients: Clients, asked: list[Ask]) -> None:
    """138 requests, a few at a time."""
    room = asyncio.Semaphore(8)

    async def one(number: int, ask: Ask) -> None:
        async with room:
            await clients.complete(ask, number)

    await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asked)))


async def those_that_are_wrong(clients: Clients) -> None:
    """14 requests that never get to the scheduler."""
    http, stub = clients.http, clients.stub
    strangers = http.with_options(api_key="another")
    for _ in range(3):
        bad = http.completions.create(model=MODEL, prompt=[20], temperature=-1)
        await clients.refused("invalid", bad, 400)
        long = http.completions.create(model=MODEL, prompt=[20], max_tokens=10_000)
        await clients.refused("invalid", long, 400)
        request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[20]), temperature=-1)
        wrong = stub.Generate(request, metadata=clients.metadata)
        await clients.refused("invalid", wrong, grpc.StatusCode.INVALID_ARGUMENT)
        unknown = strangers.completions.create(model=MODEL, prompt=[20])
        await clients.refused("unauthenticated", unknown, 401)
    keyless = stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[20])))
    await clients.refused("unauthenticated", keyless, grpc.StatusCode.UNAUTHENTICATED)
    nowhere = http.completions.create(model="nowhere", prompt=[20])
    await clients.refused("not_found", nowhere, 404)


async def those_that_fail(clients: Clients) -> None:
    """6 requests with a token that the target cannot take."""
    for _ in range(3):
        failing = Ask([20, ROW_FAILS], 5, None, None, drafts=False)
        await clients.refused("failed", clients.over_http(failing, stream=False), 500)
        await clients.refused("failed", clients.over_grpc(failing, stream=False), grpc.StatusCode.INTERNAL)
    clients.tally.ends["error"] += 6


async def those_that_wait_and_those_refused(clients: Clients, cell: Cell, watched: WatchedEngine) -> None:
    """18 requests that their clients give up before the first token, and 30 for which there is no room beside them."""
    watched.gate.close()
    ask = Ask([20, 21, 22, 23], 50, None, None, drafts=False)
    waiting = [
        asyncio.create_task((clients.over_http if number % 2 else clients.over_grpc)(ask, stream=True))
        for number in range(WINDOW + QUEUE)
    ]
    await until(lambda: cell.live_sequences == WINDOW + QUEUE)
    for number in range(30):
        if number % 2:
            await clients.refused("queue_full", clients.over_http(ask, stream=False), 429)
        else:
            await clients.refused("queue_full", clients.over_grpc(ask, False), grpc.StatusCode.RESOURCE_EXHAUSTED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: not cell.live_sequences)
    watched.gate.open()
    clients.tally.requests += len(waiting)
    clients.tally.ends["abort"] += len(waiting)


async def those_that_leave(clients: Clients, cell: Cell, watched: WatchedEngine, tokenizer: ModelTokenizer) -> None:
    """4 requests whose clients leave after the third token: the target has taken three steps, and takes no other."""
    prompts = [[90 + number // 9, 91 + number % 9, 30, 31] for number in range(81)]
    plain = [one for one in prompts if tokenizer.decode(continuation(one, 3), False).isalpha()]
    plain = [one for one in plain if len(tokenizer.decode(continuation(one, 3), False).encode()) == 6]
    for prompt in plain[:4]:
        await cell.wait_empty()
        watched.gate.close(but_for=3)
        request = message(Ask(prompt, 50, None, None, drafts=False))
        call = clients.stub.GenerateStream(request, metadata=clients.metadata)
        seen: list[int] = []
        async for reply in call:
            seen += reply.choice.token_ids
            if len(seen) == 3:
                break
        call.cancel()
        assert seen == continuation(prompt, 3)
        await until(lambda: not cell.live_sequences)
        watched.gate.open()
        clients.tally.requests += 1
        clients.tally.began += 1
        clients.tally.ends["abort"] += 1
        clients.tally.tokens += len(seen)


def told(samples: Samples, name: str) -> dict[str, float]:
    """By the value of its one label; zeros left out."""
    found = {labels: value for (each, labels), value in samples.items() if each == f"spool_{name}"}
    return {labels[0][1]: value for labels, value in found.items() if value}


def figure(samples: Samples, name: str) -> float:
    return samples[f"spool_{name}", ()]


def test_requests_of_every_kind_were_asked(outcome: Outcome) -> None:
    tally = outcome.tally
    assert tally.requests == 138 + 14 + 6 + 18 + 30 + 4
    assert min(tally.ends[end] for end in ("stop", "length", "abort", "error")) >= 6
    assert tally.tokens > 1000
    assert 0 < tally.accepted < tally.drafted
    assert outcome.unfinished == 0


def test_tokens_and_ends_are_those_that_clients_saw(outcome: Outcome) -> None:
    tally, metrics = outcome.tally, outcome.metrics
    assert figure(metrics, "generation_tokens_total") == tally.tokens
    assert told(metrics, "request_success_total") == tally.ends
    assert told(metrics, "request_failure_total") == tally.failures
    assert figure(metrics, "delivered_draft_tokens_total") == tally.drafted
    assert figure(metrics, "delivered_accepted_tokens_total") == tally.accepted
    assert figure(metrics, "time_to_first_token_seconds_count") == tally.began
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert figure(metrics, f"{name}_count") == tally.ends.total()
    assert figure(metrics, "request_generation_tokens_sum") == tally.tokens
    # All prompts have four tokens, but those of the requests that fail, which have two.
    for name in ("prompt_tokens_total", "request_prompt_tokens_sum"):
        assert figure(metrics, name) == 4 * tally.ends.total() - 2 * tally.ends["error"]


def test_speculation_is_what_clients_were_told_and_what_the_target_did(outcome: Outcome) -> None:
    tally, metrics = outcome.tally, outcome.of_scheduler
    kept = [kept_of(draft, tally) for draft in outcome.verified]
    assert figure(metrics, "spec_decode_num_drafts_total") == len(outcome.verified)
    assert figure(metrics, "spec_decode_num_draft_tokens_total") == tally.drafted
    assert figure(metrics, "spec_decode_num_draft_tokens_total") == sum(draft.drafted for draft in outcome.verified)
    assert figure(metrics, "spec_decode_num_accepted_tokens_total") == tally.accepted == sum(kept)
    positions = Counter(str(position) for length in kept for position in range(length))
    assert told(metrics, "spec_decode_num_accepted_tokens_per_pos_total") == positions
    assert figure(metrics, "spec_decode_accepted_length_sum") == tally.accepted
    assert figure(metrics, "spec_decode_accepted_length_count") == len(outcome.verified)
    for (name, labels), value in metrics.items():
        if name == "spool_spec_decode_accepted_length_bucket":
            assert value == sum(length <= float(labels[0][1]) for length in kept)


def kept_of(draft: VerifiedDraft, tally: Tally) -> int:
    """Accepted tokens that became output: none beyond a stop token."""
    stop = tally.stop_tokens.get(draft.history[:PROMPT_LENGTH])
    emitted = draft.tokens.index(stop) + 1 if stop in draft.tokens else len(draft.tokens)
    return min(draft.accepted, emitted)


def test_the_scheduler_tells_of_the_same_ends(outcome: Outcome) -> None:
    tally, metrics = outcome.tally, outcome.of_scheduler
    assert told(metrics, "sequences_total") == {
        # To the scheduler a stop string is the end of max_tokens, as these were asked.
        "stop": tally.ends["stop"] - tally.stopped_by_text,
        "length": tally.ends["length"] + tally.stopped_by_text,
        "cancelled": tally.ends["abort"],
        "failed": tally.ends["error"],
    }
    assert told(metrics, "refusals_total") == {"queue_full": tally.failures["queue_full"]}
    assert told(metrics, "row_errors_total").keys() == {"failed"}
    assert told(metrics, "recoveries_total") == {}
    nothing = ("num_requests_running", "num_requests_waiting", "live_sequences", "num_preemptions_total")
    assert [figure(metrics, name) for name in nothing] == [0, 0, 0, 0]
    assert told(metrics, "kv_pages_used") == {}
    assert figure(metrics, "gateway_sessions") == 2


def test_each_process_tells_of_its_own_alone(outcome: Outcome) -> None:
    def families(samples: Samples) -> set[str]:
        return {name for name, _ in samples}

    assert families(outcome.metrics).isdisjoint(families(outcome.of_scheduler))
    assert families(outcome.of_another_gateway) <= families(outcome.metrics)
    assert figure(outcome.of_another_gateway, "scheduler_up") == 1
    assert figure(outcome.of_another_gateway, "generation_tokens_total") == 0
    assert told(outcome.of_another_gateway, "request_success_total") == {}
