"""A gateway that a configuration describes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from spool.deploy.assembly.secrets import client_secrets
from spool.deploy.assembly.tracing import request_tracing
from spool.deploy.config.spool_config import SpoolConfig
from spool.engine.models.fetching import fetch_tokenizer
from spool.engine.models.source import SourceKind, demo_chat_template, resolve_model
from spool.scheduler.messages import Role
from spool.services.gateway.completion import CompletionEngine
from spool.services.gateway.grpc.server import GrpcServer
from spool.services.gateway.http.app import create_app
from spool.services.gateway.http.server import HttpServer
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.settings import (
    GatewaySettings,
    ListenSettings,
    NamedKey,
    RequestSettings,
    SamplingDefaults,
    model_sampling_defaults,
    not_followed,
)
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.scheduler_client.cell_link import Resolve
from spool.services.scheduler_client.remote import SchedulerClient
from spool.services.text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

# From the model card of SmolLM2-135M-Instruct; its folder does not say so.
_DEMO_SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9)


async def start_gateway(
    config: SpoolConfig,
    cells: Sequence[Resolve],
    *,
    gateway_id: str,
    security: ChannelSecurity,
    drain_seconds: Callable[[], float],
    share_port: bool,
    running: AsyncExitStack,
) -> tuple[CompletionEngine, str]:
    """Serves HTTP, and gRPC where it has a port, over the schedulers that `cells` name, one each; returns the URL too.

    Ends when `running` closes: requests under way then have `drain_seconds` to end. With `share_port` several gateways
    of a machine share its ports. Raises SecretError, and OSError for a port that cannot be listened on.
    """
    tokenizer, sampling = await asyncio.to_thread(_model_files, config)
    settings = gateway_settings(config, sampling)
    if tokenizer.reads_clock and settings.template_time is None:
        logger.warning(
            "the chat template of %s reads the clock: the same request has another prompt on another day, unless "
            "gateway.template_time is set",
            tokenizer.folder,
        )
    warning = not_followed(tokenizer.folder)
    if warning is not None:
        logger.warning(warning)
    metrics = GatewayMetrics(config.served_name)
    backend = SchedulerClient(cells, gateway_id=gateway_id, security=security, listener=metrics)
    engine = CompletionEngine(backend, tokenizer, settings, metrics, request_tracing(config.tracing, running))
    await running.enter_async_context(backend)
    http = HttpServer(
        create_app(engine), settings.http, share_port=share_port, limits=settings.connections, metrics=metrics
    )
    grpc = GrpcServer(engine, share_port=share_port)

    def begin_end() -> None:
        http.drain_seconds = grpc.drain_seconds = drain_seconds()
        http.begin_end()

    await running.enter_async_context(http)
    if config.gateway.grpc_port is not None:
        await running.enter_async_context(grpc)
    # Before anything else ends: both servers drain at the same time.
    running.callback(begin_end)
    return engine, http.url


def gateway_settings(config: SpoolConfig, sampling: SamplingDefaults) -> GatewaySettings:
    """Reads the keys that the configuration names, and checks its certificate. Raises SecretError."""
    gateway, secrets = config.gateway, client_secrets(config)
    listen: dict[str, Any] = {"host": gateway.host, "tls": config.auth.tls}
    return GatewaySettings(
        **{name: getattr(gateway, name) for name in RequestSettings.model_fields},
        model_names=(config.served_name,),
        api_keys=secrets.api_keys,  # type: ignore[arg-type]  # pydantic hides them
        metrics_keys=secrets.metrics_keys,  # type: ignore[arg-type]
        named_keys=tuple(NamedKey(name=key.name, digest=key.digest) for key in config.auth.keys),
        share_prefix_cache=config.auth.share_prefix_cache,
        sampling=sampling,
        receipt_key=secrets.receipt_key,  # type: ignore[arg-type]  # pydantic hides it
        http=ListenSettings(port=gateway.port, **listen),
        grpc=ListenSettings(port=gateway.grpc_port or 0, **listen),
    )


def _model_files(config: SpoolConfig) -> tuple[ModelTokenizer, SamplingDefaults]:
    """The tokenizer, and the sampling defaults. The demo and GGUF files have these only together with weights."""
    source, template = resolve_model(config.models.target, Role.TARGET), config.models.template_text()
    folder = fetch_tokenizer(source, lambda message, fraction: None)
    if source.kind is SourceKind.DEMO:
        template = demo_chat_template() if template is None else template
        return ModelTokenizer(folder, template), config.gateway.sampling or _DEMO_SAMPLING
    return ModelTokenizer(folder, template), config.gateway.sampling or model_sampling_defaults(folder)
