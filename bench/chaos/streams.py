"""Streaming requests over HTTP and gRPC, each with its text and the times of its deliveries."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

import grpc
import grpc.aio
import openai

from bench.chaos.application import Application
from spool.client.v1 import generation_pb2, generation_pb2_grpc

_CALL_SECONDS = 900.0
_BEGINNINGS = ("Once upon a time", "The moon is", "To bake bread,", "Rivers run", "A good chess player")


class Protocol(Enum):
    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True)
class Case:
    """A request whose answer is always the same: a text or token ids, and a draft length of its own or None. With a
    `regex`, the answer fits it, and ends with one of the `stop_token_ids` where it is complete."""

    prompt: str | tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    draft_length: int | None = None
    regex: str = ""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int


@dataclass
class StreamRecord:
    """One stream. Times are those of the monotonic clock; `arrivals` are those of deliveries.

    `refused`: the server answered 429 or RESOURCE_EXHAUSTED. `error` is empty where there was none.
    """

    case: Case
    protocol: Protocol
    began: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    refused: bool = False
    error: str = ""
    fingerprint: str = ""
    """Of the targets that computed it, as the last message names them."""

    @property
    def answered(self) -> bool:
        return not self.refused and not self.error

    @property
    def answer(self) -> Answer:
        return Answer(self.text, self.tokens)


def cases(count: int, max_tokens: int) -> list[Case]:
    """Prompts of several lengths, every second one sampled."""
    prompts = [f"{number}) {_BEGINNINGS[number % len(_BEGINNINGS)]} " * (1 + number % 4) for number in range(count)]
    return [Case(prompt, number, 0.8 * (number % 2), max_tokens) for number, prompt in enumerate(prompts)]


class StreamClient:
    """Asks one application, without retries, which would hide failures."""

    def __init__(
        self, http: openai.AsyncOpenAI, stub: generation_pb2_grpc.GenerationServiceStub, application: Application
    ) -> None:
        self._http = http
        self._stub = stub
        self._model = application.model
        self._metadata = (("authorization", f"Bearer {application.key}"),)

    async def ask(self, case: Case, protocol: Protocol) -> StreamRecord:
        record = StreamRecord(case, protocol, time.monotonic())
        await self.fill(record)
        return record

    async def fill(self, record: StreamRecord) -> None:
        """Sends the request and reads the stream to its end or error."""
        try:
            if record.protocol is Protocol.HTTP:
                await self._over_http(record)
            else:
                await self._over_grpc(record)
        except openai.RateLimitError:
            record.refused = True
        except openai.OpenAIError as error:
            record.error = f"{type(error).__name__}: {error}"
        except grpc.aio.AioRpcError as error:
            record.refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            record.error = "" if record.refused else f"{error.code().name}: {error.details()}"
        record.ended = time.monotonic()
        if record.answered and not record.tokens:
            record.error = "the stream ended without its number of tokens"

    async def _over_http(self, record: StreamRecord) -> None:
        case = record.case
        options: dict[str, object] = {"stop_token_ids": list(case.stop_token_ids)}
        if case.draft_length is not None:
            options["spool"] = {"draft_length": case.draft_length}
        if case.regex:
            options["structured_outputs"] = {"regex": case.regex}
        stream = await self._http.completions.create(
            model=self._model,
            prompt=case.prompt if isinstance(case.prompt, str) else list(case.prompt),
            max_tokens=case.max_tokens,
            temperature=case.temperature,
            seed=case.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=options,
        )
        async for chunk in stream:
            parts = [choice.text for choice in chunk.choices]
            if parts:
                record.arrivals.append(time.monotonic())
                record.text += "".join(parts)
            record.fingerprint = chunk.system_fingerprint or record.fingerprint
            if chunk.usage is not None:
                record.tokens = chunk.usage.completion_tokens

    async def _over_grpc(self, record: StreamRecord) -> None:
        case = record.case
        text, tokens = (case.prompt, None) if isinstance(case.prompt, str) else (None, case.prompt)
        request = generation_pb2.GenerateRequest(
            model=self._model,
            text=text,
            tokens=None if tokens is None else generation_pb2.TokenIds(token_ids=tokens),
            max_tokens=case.max_tokens,
            temperature=case.temperature,
            seed=case.seed,
            draft_length=case.draft_length,
            stop_token_ids=case.stop_token_ids,
            structured_outputs=generation_pb2.StructuredOutputs(regex=case.regex) if case.regex else None,
        )
        async for message in self._stub.GenerateStream(request, timeout=_CALL_SECONDS, metadata=self._metadata):
            if message.choice.token_ids:
                record.arrivals.append(time.monotonic())
            record.text += message.choice.text
            record.fingerprint = message.system_fingerprint or record.fingerprint
            if message.HasField("usage"):
                record.tokens = message.usage.completion_tokens


@asynccontextmanager
async def streaming(application: Application) -> AsyncIterator[StreamClient]:
    async with (
        openai.AsyncOpenAI(
            base_url=f"{application.url}/v1", api_key=application.key, max_retries=0, timeout=_CALL_SECONDS
        ) as http,
        grpc.aio.insecure_channel(application.grpc_address) as channel,
    ):
        yield StreamClient(http, generation_pb2_grpc.GenerationServiceStub(channel), application)


async def plain_answers(client: StreamClient, asked: Sequence[Case]) -> dict[Case, Answer]:
    """By plain decoding, undisturbed. Raises RuntimeError where a request fails."""
    slots = asyncio.Semaphore(4)

    async def one(case: Case) -> Answer:
        async with slots:
            record = await client.ask(replace(case, draft_length=0), Protocol.HTTP)
        if not record.answered:
            raise RuntimeError(f"{case} was not answered: {record.error or 'refused'}")
        return record.answer

    return dict(zip(asked, await asyncio.gather(*(one(case) for case in asked)), strict=True))


class ConstantLoad:
    """A constant number of streams, half over each protocol: when one ends, the next request is sent.

    `records` has all streams in the order of their beginning; those that run have `ended` 0.
    """

    def __init__(self, client: StreamClient, asked: Sequence[Case], streams: int) -> None:
        self.records: list[StreamRecord] = []
        self._client = client
        self._cases = itertools.cycle(asked)
        self._streams = streams
        self._stopping = False
        self._runs: list[asyncio.Task[None]] = []

    def all_went_on(self, since: float) -> bool:
        """Whether every stream that runs got something after that time."""
        running = [record for record in self.records if not record.ended]
        return all(record.arrivals and record.arrivals[-1] > since for record in running)

    async def __aenter__(self) -> ConstantLoad:
        protocols = itertools.cycle(Protocol)
        self._runs = [asyncio.create_task(self._run(next(protocols))) for _ in range(self._streams)]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Lets the streams that run come to their end, unless the block failed."""
        self._stopping = True
        if error[0] is not None:
            for run in self._runs:
                run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=error[0] is not None)

    async def _run(self, protocol: Protocol) -> None:
        while not self._stopping:
            record = StreamRecord(next(self._cases), protocol, time.monotonic())
            self.records.append(record)
            await self._client.fill(record)


def faults_of(records: Sequence[StreamRecord], expected: Mapping[Case, Answer]) -> list[str]:
    """What is wrong with answers: an error, or another text or number of tokens than expected."""
    faults = []
    for record in records:
        want = expected[record.case]
        if record.error:
            faults.append(f"{record.protocol.value}: {record.error}")
        elif record.answered and record.answer != want:
            faults.append(f"{record.protocol.value}: {record.answer} instead of {want} for {record.case}")
    return faults
