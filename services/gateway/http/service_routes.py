"""Routes other than generation: models, tokenizing, metrics and health."""

from __future__ import annotations

import math
import time

from fastapi import APIRouter
from starlette.responses import Response

from spool.engine.models.source import public_name
from spool.protos.scheduler_pb2 import ServedModel, StatusReply
from spool.protos.worker_pb2 import ROLE_TARGET
from spool.services.backend.interface import BackendUnavailableError
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.http.body_parsing import parsing_route
from spool.services.gateway.http.generation_routes import ERRORS
from spool.services.gateway.http.openai_requests import DetokenizeBody, TokenizeBody
from spool.services.gateway.http.openai_responses import (
    DetokenizeResponse,
    Load,
    ModelList,
    ModelShape,
    Status,
    TokenizeResponse,
    Version,
    WorkerShape,
)
from spool.services.observability.metric_set import CONTENT_TYPE
from spool.services.receipts.fingerprint import fingerprint_name
from spool.services.rpc.protocol_version import SOFTWARE_VERSION
from spool.services.scheduler_client.remote import workers_in_use

BALANCED_PATH = "/-/healthz"
"""Where Ray Serve's proxies say whether they are well."""

_REPLACEMENT_SECONDS = 30.0


def service_router(engine: CompletionEngine) -> APIRouter:
    """Routes that need an API key, if keys are set."""
    router = APIRouter(responses=ERRORS, route_class=parsing_route(engine))
    started = int(time.time())

    def model_shape(name: str, info: ServedModel) -> ModelShape:
        return ModelShape(
            id=name,
            root=public_name(info.model_id),
            object="model",
            created=started,
            owned_by="spool",
            max_model_len=info.max_sequence_length,
            quantization=info.quantization,
            system_fingerprint=fingerprint_name(info.fingerprint),
            fingerprint=dict(info.fingerprint),
        )

    @router.get("/v1/models")
    @router.get("/v1/models/", include_in_schema=False)
    async def models() -> ModelList:
        name, info = await engine.model(None)
        names = engine.settings.model_names or (name,)
        return ModelList(object="list", data=[model_shape(each, info) for each in names])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelShape:
        return model_shape(*await engine.model(model))

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeBody) -> Response:
        _, info = await engine.model(body.model)
        tokens = await engine.tokenize(await engine.threads.run(body.prompt_given), body.add_special_tokens, info)

        def text() -> str:
            words = [engine.strings.of(token).text for token in tokens] if body.return_token_strs else None
            limit = info.max_sequence_length
            return TokenizeResponse(
                count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=words
            ).model_dump_json()

        return Response(await engine.threads.run(text), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> DetokenizeResponse:
        _, info = await engine.model(body.model)
        return DetokenizeResponse(prompt=await engine.detokenize("tokens", body.tokens, info))

    @router.get("/version")
    async def server_version() -> Version:
        return Version(version=SOFTWARE_VERSION)

    @router.get("/load")
    async def load() -> Load:
        return _load_shape(await engine.backend.statuses())

    @router.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE.split(";")[0]: {}}}})
    async def metrics() -> Response:
        """This gateway's own figures; the scheduler serves its own."""
        return Response(engine.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    return router


def open_router(engine: CompletionEngine) -> APIRouter:
    """Routes that never need an API key."""
    router = APIRouter(responses=ERRORS)

    @router.get("/ping")
    async def ping() -> Status:
        """For liveness probes: the gateway answers."""
        return Status(status="ok")

    @router.get("/health")
    async def health() -> Status:
        """For readiness probes: 200 if a target worker is up, 503 otherwise."""
        await engine.check_ready()
        return Status(status="ok")

    last_ready = -math.inf

    @router.get(BALANCED_PATH)
    async def balanced() -> Status:
        """For load balancers: 503 if the gateway leaves, or no target worker has been up for half a minute.

        Requests wait as long for a scheduler that is being replaced, so clients need not be sent elsewhere before.
        """
        nonlocal last_ready
        if engine.leaving:
            raise BackendUnavailableError("this gateway leaves")
        try:
            await engine.check_ready()
            last_ready = time.monotonic()
        except BackendUnavailableError:
            if time.monotonic() - last_ready > _REPLACEMENT_SECONDS:
                raise
        return Status(status="ok")

    return router


def _load_shape(statuses: list[StatusReply]) -> Load:
    """Of all cells that answer."""
    workers = [
        WorkerShape(
            worker_id=worker.worker_id,
            role="target" if worker.role == ROLE_TARGET else "draft",
            sequences=worker.sequences,
            pages_in_use=worker.total_pages - worker.free_pages,
            total_pages=worker.total_pages,
        )
        for worker in workers_in_use(statuses)
    ]
    live, waiting = (sum(getattr(status.live_set, name) for status in statuses) for name in ("live", "waiting"))
    return Load(
        server_load=live,
        running=live - waiting,
        waiting=waiting,
        pages_in_use=sum(worker.pages_in_use for worker in workers),
        total_pages=sum(worker.total_pages for worker in workers),
        workers=workers,
    )
