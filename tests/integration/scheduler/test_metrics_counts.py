"""Metrics say exactly what clients counted: requests of every kind over HTTP and gRPC, against a whole cell."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from spool.scheduler.config import Policy, SchedulerConfig
from spool.services.gateway.settings import GatewaySettings
from spool.services.scheduler.metrics_endpoint import MetricsEndpoint
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.cells import Cell, running_cell
from tests.support.clients import Answer, Clients, clients_of, message_of
from tests.support.gateway import MODEL, running_gateway, save_tokenizer
from tests.support.stand_in_worker import ROW_FAILS, continuation
from tests.support.waiting import LONG, until
from tests.support.watched_engine import VerifiedDraft, WatchedEngine

HEADERS = {"authorization": "Bearer key"}
PROMPT_LENGTH = 4
WINDOW, QUEUE = 6, 12
CONFIG = SchedulerConfig(
    policy=Policy.RAGGED, draft_length=4, batch_size=4, max_running=WINDOW, max_queued_sequences=QUEUE
)
SETTINGS = GatewaySettings(model_names=(MODEL,), api_keys=(SecretStr("key"),))
BY_STATUS: dict[int | grpc.StatusCode, str] = {
    400: "invalid",
    401: "unauthenticated",
    404: "not_found",
    429: "queue_full",
    500: "failed",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "queue_full",
    grpc.StatusCode.INTERNAL: "failed",
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Tally:
    """What clients asked for and got."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    began: int = 0
    stopped_by_text: int = 0
    stop_tokens: dict[tuple[int, ...], int] = field(default_factory=dict)
    max_tokens: dict[tuple[int, ...], int] = field(default_factory=dict)

    def heard(self, answer: Answer) -> None:
        if answer.error:
            self.failures[BY_STATUS[answer.status]] += 1
        self.tokens += answer.usage.completion
        self.drafted += answer.usage.drafted
        self.accepted += answer.usage.accepted
        self.ends.update(choice.end for choice in answer.choices)
        self.began += len(answer.choices)
        self.stopped_by_text += sum(isinstance(choice.stop, str) for choice in answer.choices)


def asks(tokenizer: ModelTokenizer) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Prompts, of which no two are alike, each with what ends it in one of three ways."""
    for number in range(40):
        lengths, tokens, texts = ([20 + number, 21, kind, 31] for kind in (30, 31, 32))
        yield lengths, {"max_tokens": 5 + number, "n": 1 + number % 2}
        output, place = continuation(tokens, 30), 3 + number % 20
        if output.index(output[place]) == place:
            yield tokens, {"max_tokens": 40, "stop_token_ids": [output[place]]}
        # A text that its last tokens complete, so that scheduler and gateway end the sequence at the same token.
        output = continuation(texts, 12)
        for length in range(3, 12):
            text, last = tokenizer.decode(output[:length], False), tokenizer.decode(output[length - 1 : length], False)
            if len(last) == 2 and last.isalpha() and text.isascii() and text.index(last) == len(text) - 2:
                yield texts, {"max_tokens": length, "stop": [last]}
                break


@dataclass(frozen=True)
class Outcome:
    tally: Tally
    verified: list[VerifiedDraft]
    metrics: Samples
    of_another_gateway: Samples
    of_scheduler: Samples


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
        clients_of(served) as clients,
    ):
        watched.watch(cell.workers[1].executor)
        await those_that_end(clients, tokenizer, tally)
        await those_that_are_wrong_and_those_that_fail(clients, tally)
        await those_that_wait_and_those_refused(clients, cell, watched, tally)
        await those_that_leave(clients, cell, watched, tokenizer, tally)
        await cell.wait_empty()
        async with MetricsEndpoint(cell.server.metric_families, "127.0.0.1", 0) as endpoint:
            of_scheduler = await scrape(endpoint.url or "")
        gateways = [await scrape(f"{each.url}/metrics") for each in (served, other)]
        return Outcome(tally, watched.drafts, *gateways, of_scheduler)


async def scrape(url: str) -> Samples:
    async with httpx.AsyncClient(timeout=LONG) as http:
        text = (await http.get(url, headers=HEADERS)).text
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


async def those_that_end(clients: Clients, tokenizer: ModelTokenizer, tally: Tally) -> None:
    """A few at a time, in all four ways, with drafts and without."""
    room = asyncio.Semaphore(8)

    async def one(number: int, prompt: list[int], fields: dict[str, Any]) -> None:
        draft_length = None if number % 3 else 0
        async with room:
            ask = clients.over_http if number % 2 else clients.over_grpc
            stream = number // 2 % 2 == 0
            answer = await ask(prompt, stream, HEADERS, draft_length=draft_length, ignore_eos=True, **fields)
        expected = "stop" if "stop" in fields or "stop_token_ids" in fields else "length"
        assert [choice.end for choice in answer.choices] == [expected] * fields.get("n", 1)
        tally.heard(answer)

    asked = list(asks(tokenizer))
    tally.stop_tokens = {tuple(prompt): token for prompt, more in asked for token in more.get("stop_token_ids", [])}
    tally.max_tokens = {tuple(prompt): more["max_tokens"] for prompt, more in asked}
    await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))


async def those_that_are_wrong_and_those_that_fail(clients: Clients, tally: Tally) -> None:
    """Those that never get to the scheduler, and those with a token that the target cannot take."""
    wrong: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({"temperature": -1}, HEADERS, "invalid"),
        ({"max_tokens": 10_000}, HEADERS, "invalid"),
        ({}, {}, "unauthenticated"),
        ({"model": "nowhere"}, HEADERS, "not_found"),
    ]
    for ask in (clients.over_http, clients.over_grpc):
        for fields, headers, kind in wrong:
            answer = await ask([20], headers=headers, **fields)
            assert BY_STATUS[answer.status] == kind
            tally.heard(answer)
        for _ in range(3):
            answer = await ask([20, ROW_FAILS], headers=HEADERS)
            assert BY_STATUS[answer.status] == "failed"
            tally.heard(answer)
            tally.ends["error"] += 1


async def those_that_wait_and_those_refused(clients: Clients, cell: Cell, watched: WatchedEngine, tally: Tally) -> None:
    """Those that their clients give up before the first token, and those for which there is no room beside them."""
    watched.gate.close()
    asks = [partial(each, [20, 21, 22, 23], headers=HEADERS) for each in (clients.over_http, clients.over_grpc)]
    waiting = [asyncio.create_task(ask(stream=True)) for ask in asks * ((WINDOW + QUEUE) // 2)]
    await until(lambda: cell.live_sequences == WINDOW + QUEUE)
    for ask in asks * 5:
        answer = await ask()
        assert BY_STATUS[answer.status] == "queue_full"
        tally.heard(answer)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: not cell.live_sequences)
    watched.gate.open()
    tally.ends["abort"] += len(waiting)


async def those_that_leave(
    clients: Clients, cell: Cell, watched: WatchedEngine, tokenizer: ModelTokenizer, tally: Tally
) -> None:
    """Those whose clients leave after the third token: the target has taken three steps, and takes no other."""
    prompts = [[80 + number // 9, 81 + number % 9, 30, 31] for number in range(81)]
    texts = {tuple(one): tokenizer.decode(continuation(one, 3), False) for one in prompts}
    plain = [prompt for prompt, text in texts.items() if text.isalpha() and len(text.encode()) == 6]
    for prompt in plain[:4]:
        await cell.wait_empty()
        watched.gate.close(but_for=3)
        request = message_of(prompt, max_tokens=50, ignore_eos=True, draft_length=0)
        call = clients.stub.GenerateStream(request, metadata=tuple(HEADERS.items()))
        seen: list[int] = []
        async for reply in call:
            seen += reply.choice.token_ids
            if len(seen) == 3:
                break
        call.cancel()
        assert seen == continuation(prompt, 3)
        await until(lambda: not cell.live_sequences)
        watched.gate.open()
        tally.began += 1
        tally.ends["abort"] += 1
        tally.tokens += len(seen)


def told(samples: Samples, name: str) -> dict[str, float]:
    """By the value of its one label; zeros left out."""
    found = {labels: value for (each, labels), value in samples.items() if each == f"spool_{name}"}
    return {labels[0][1]: value for labels, value in found.items() if value}


def figure(samples: Samples, name: str) -> float:
    return samples[f"spool_{name}", ()]


def test_tokens_and_ends_are_those_that_clients_saw(outcome: Outcome) -> None:
    tally, metrics = outcome.tally, outcome.metrics
    assert min(tally.ends[end] for end in ("stop", "length", "abort", "error")) >= 6
    assert tally.stopped_by_text >= 6
    assert 0 < tally.accepted < tally.drafted
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
    verified = [draft for draft in outcome.verified if goes_on(draft, tally)]
    kept = [kept_of(draft, tally) for draft in verified]
    assert figure(metrics, "spec_decode_num_drafts_total") == len(verified)
    drafted = sum(draft.drafted for draft in verified)
    assert figure(metrics, "spec_decode_num_draft_tokens_total") == tally.drafted == drafted
    assert figure(metrics, "spec_decode_num_accepted_tokens_total") == tally.accepted == sum(kept)
    # The draft worker alone proposes here.
    assert told(metrics, "draft_tokens_by_source_total") == {"draft": drafted}
    assert told(metrics, "accepted_tokens_by_source_total") == {"draft": tally.accepted}
    positions = Counter(str(position) for length in kept for position in range(length))
    assert told(metrics, "spec_decode_num_accepted_tokens_per_pos_total") == positions
    assert figure(metrics, "spec_decode_accepted_length_sum") == tally.accepted
    assert figure(metrics, "spec_decode_accepted_length_count") == len(verified)
    for (name, labels), value in metrics.items():
        if name == "spool_spec_decode_accepted_length_bucket":
            assert value == sum(length <= float(labels[0][1]) for length in kept)


def goes_on(draft: VerifiedDraft, tally: Tally) -> bool:
    """Not so for a row that was sent before the answer to the one before it, with which its sequence ended."""
    prompt, output = draft.history[:PROMPT_LENGTH], draft.history[PROMPT_LENGTH:]
    return len(output) < tally.max_tokens[prompt] and tally.stop_tokens.get(prompt) not in output


def kept_of(draft: VerifiedDraft, tally: Tally) -> int:
    """Accepted tokens that became output: none beyond a stop token, nor beyond max_tokens."""
    prompt, output = draft.history[:PROMPT_LENGTH], draft.history[PROMPT_LENGTH:]
    stop = tally.stop_tokens.get(prompt)
    emitted = draft.tokens.index(stop) + 1 if stop in draft.tokens else len(draft.tokens)
    return min(draft.accepted, emitted, tally.max_tokens[prompt] - len(output))


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
