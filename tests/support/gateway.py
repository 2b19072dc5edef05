"""A gateway over a cell of stand-in workers, and a tokenizer for their tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import string
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.backend.interface import Backend
from services.gateway.grpc.server import GrpcServer
from services.gateway.http.app import create_app
from services.gateway.http.server import HttpServer
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings, ListenSettings, TlsFiles
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint
from services.scheduler_client.local import LocalBackend
from services.text.tokenizer import ModelTokenizer
from tests.support.stand_in_worker import VOCABULARY
from tests.support.waiting import LONG

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
MODEL = "stand-in"
# Drafts always; `auto` would weigh what stand-in workers happen to cost.
DRAFTING = SchedulerConfig(policy=Policy.RAGGED)
LINKS = LinkOptions(connect_timeout=60, step_timeout=60, first_backoff=0.02, longest_backoff=0.2)

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


@asynccontextmanager
async def cell(launches: Sequence[WorkerLaunch], config: SchedulerConfig) -> AsyncIterator[SchedulerService]:
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(config, scheduler_epoch=time.time_ns(), link_options=LINKS) as service,
    ):
        await service.add_workers(
            [WorkerEndpoint(worker.worker_id, worker.role, worker.address) for worker in launcher.workers]
        )
        yield service


@dataclass(frozen=True, slots=True)
class Served:
    """Where a gateway listens."""

    url: str
    address: str


class Gateways:
    """A cell and gateways over it, on an event loop in a thread of its own: tests use blocking clients, as users do."""

    def __init__(
        self, tokenizer: ModelTokenizer, launches: Sequence[WorkerLaunch], config: SchedulerConfig | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._thread.start()
        self._cell = cell(launches, config or DRAFTING)
        self.service = self.run(self._cell.__aenter__())
        self.backend = LocalBackend(self.service)

    def close(self) -> None:
        self.run(self._cell.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONG)

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels at its end what is left
            runner.get_loop().run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives that runs on the loop of the gateways."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * LONG)

    @contextmanager
    def serve(
        self,
        settings: GatewaySettings | None = None,
        backend: Backend | None = None,
        tls: TlsFiles | None = None,
        tokenizer: ModelTokenizer | None = None,
    ) -> Iterator[Served]:
        """A gateway over HTTP and gRPC, on free ports."""
        free = {"http": ListenSettings(tls=tls), "grpc": ListenSettings(tls=tls)}
        settings = (settings or GatewaySettings()).model_copy(update=free)
        backend = backend or self.backend
        tokenizer = tokenizer or self.tokenizer
        metrics = GatewayMetrics()
        http = HttpServer(create_app(backend, tokenizer, settings, metrics), settings.http, drain_seconds=1)
        grpc = GrpcServer(backend, tokenizer, settings, metrics, drain_seconds=1)
        self.run(http.__aenter__())
        try:
            self.run(grpc.__aenter__())
            try:
                yield Served(http.url, grpc.address)
            finally:
                self.run(grpc.__aexit__(None, None, None))
        finally:
            self.run(http.__aexit__(None, None, None))

    def wait_until_idle(self, seconds: float = LONG) -> None:
        """Until no sequence is left and no page in use."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                load = await self.backend.load()
                while load.live_sequences or load.pages_in_use:
                    await asyncio.sleep(0.01)
                    load = await self.backend.load()

        self.run(wait())
        self.run(self._check_integrity())

    async def _check_integrity(self) -> None:
        self.service.core.check_integrity()


def stand_in_gateways(folder: Path, config: SchedulerConfig | None = None, **worker: Any) -> Gateways:
    """Over a draft and a target whose output is known beforehand; `worker` are the stand-in's settings."""
    tokenizer = save_tokenizer(folder)
    settings = {"tokenizer_digest": tokenizer.vocabulary_digest.hex(), "model_id": MODEL, **worker}
    launches = [
        WorkerLaunch(
            role, settings, threads=1, module="tests.support.stand_in_worker", environment={"PYTHONPATH": str(ROOT)}
        )
        for role in (Role.DRAFT, Role.TARGET)
    ]
    return Gateways(tokenizer, launches, config)
