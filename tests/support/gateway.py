"""Gateways over HTTP and gRPC, each with a session to the scheduler of a cell of stand-in workers, as in service."""

from __future__ import annotations

import asyncio
import itertools
import json
import string
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import tokenizers
from opentelemetry.trace import Tracer
from tokenizers import decoders, models, pre_tokenizers

from spool.scheduler.config import SchedulerConfig
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.grpc.server import GrpcServer
from spool.services.gateway.http.app import create_app
from spool.services.gateway.http.server import HttpServer
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.settings import GatewaySettings, ListenSettings, TlsFiles
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler_client.remote import SchedulerClient
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.cells import Cell, client, running_cell
from tests.support.core_state import check_state
from tests.support.stand_in_worker import MODEL, VOCABULARY
from tests.support.waiting import LONG, until

T = TypeVar("T")

TEMPLATE = """\
{% for message in messages %}
{% if message.role == "tool" %}{{ raise_exception("no tools here") }}{% endif %}
[{{ message.role }}] {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
[assistant] {% endif %}"""


def save_tokenizer(folder: Path) -> ModelTokenizer:
    """As many tokens as the stand-in has: bytes, pairs of letters, special ones. What it chooses at random makes text
    with broken characters, and characters in several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(one, two) for one, two in itertools.product(string.ascii_lowercase, repeat=2)]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{number}>" for number in range(VOCABULARY - len(vocabulary))])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<0>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return ModelTokenizer(folder)


@dataclass(frozen=True, slots=True)
class Served:
    """Where a gateway listens."""

    url: str
    address: str


@asynccontextmanager
async def listening(
    backend: Any,
    tokenizer: ModelTokenizer,
    settings: GatewaySettings | None,
    metrics: GatewayMetrics,
    tls: TlsFiles | None = None,
    tracing: Tracer | None = None,
) -> AsyncIterator[Served]:
    """A gateway on free ports; `backend` is a SchedulerClient or stands before one."""
    free = ListenSettings(tls=tls)
    settings = (settings or GatewaySettings()).model_copy(update={"http": free, "grpc": free})
    engine = CompletionEngine(backend, tokenizer, settings, metrics, tracing)
    async with (
        HttpServer(
            create_app(engine), settings.http, drain_seconds=1, limits=settings.connections, metrics=metrics
        ) as http,
        GrpcServer(engine, drain_seconds=1) as grpc,
    ):
        yield Served(http.url, grpc.address)


@asynccontextmanager
async def running_gateway(
    cell: Cell, tokenizer: ModelTokenizer, settings: GatewaySettings | None = None, tracing: Tracer | None = None
) -> AsyncIterator[Served]:
    metrics = GatewayMetrics(MODEL)
    async with (
        client(cell.resolve, listener=metrics) as backend,
        listening(backend, tokenizer, settings, metrics, tracing=tracing) as served,
    ):
        await until(lambda: backend.connected)
        yield served


class Gateways:
    """A cell and gateways over it, on an event loop in a thread of its own: tests use blocking clients, as users do."""

    def __init__(self, tokenizer: ModelTokenizer, cell: AbstractAsyncContextManager[Cell]) -> None:
        self.tokenizer = tokenizer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self.cell = self.run(self._stack.enter_async_context(cell))
        self.backend = self.run(self._connect())

    async def _connect(self) -> SchedulerClient:
        backend = await self._stack.enter_async_context(client(self.cell.resolve))
        await until(lambda: backend.connected)
        return backend

    @property
    def service(self) -> SchedulerService:
        return self.cell.service

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONG)

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels at its end what is left
            runner.get_loop().run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the loop of the gateways."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * LONG)

    @contextmanager
    def serve(
        self,
        settings: GatewaySettings | None = None,
        backend: Any = None,
        tls: TlsFiles | None = None,
        tokenizer: ModelTokenizer | None = None,
    ) -> Iterator[Served]:
        gateway = listening(backend or self.backend, tokenizer or self.tokenizer, settings, GatewayMetrics(), tls)
        served = self.run(gateway.__aenter__())
        try:
            yield served
        finally:
            self.run(gateway.__aexit__(None, None, None))

    def wait_until_idle(self, seconds: float = LONG) -> None:
        """Until no sequence is left and no page in use."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                await self.cell.wait_empty()
            check_state(self.service.core)

        self.run(wait())


def stand_in_gateways(folder: Path, config: SchedulerConfig | None = None, **worker: Any) -> Gateways:
    """Over a target whose output is known beforehand, and which drafts itself, beside an idle draft worker. `worker`
    are the stand-in's settings."""
    tokenizer = save_tokenizer(folder)
    digest = tokenizer.vocabulary_digest.hex()
    return Gateways(tokenizer, running_cell(config=config, tokenizer_digest=digest, guesses=True, **worker))
