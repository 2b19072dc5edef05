"""The HTTP and gRPC ingress as a Serve replica."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deploy.config.spool_config import SpoolConfig
from deploy.ray_app.ray_metrics import RayMirror
from deploy.ray_app.replica import (
    Plan,
    SchedulerAddress,
    channel_security,
    request_tracing,
    secret_from_environment,
    secret_from_file,
)
from engine.models.fetching import fetch_model
from engine.models.source import SourceKind, demo_chat_template, resolve_model
from scheduler.messages import Role
from services.gateway.grpc.server import GrpcServer
from services.gateway.http.app import create_app
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import (
    GatewaySettings,
    ListenSettings,
    NamedKey,
    SamplingDefaults,
    TlsFiles,
    model_sampling_defaults,
)
from services.observability.logs import install_logs
from services.scheduler_client.remote import SchedulerClient
from services.text.tokenizer import ModelTokenizer, load_tokenizer

# From the model card of SmolLM2-135M-Instruct; its folder does not say so.
_DEMO_SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9)


@serve.ingress()
class Gateway:
    """Serves OpenAI's API through Serve's HTTP proxies, and gRPC on a port of its own.

    Serve's gRPC proxy loses some cancellations and has no authentication, so it is not used. Replicas on one node
    share the port: the kernel spreads connections over them.
    """

    async def __init__(self, plan: Plan, scheduler: DeploymentHandle, *others: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        """`others` are only tied to the application here."""
        config = plan.config
        install_logs(config.logging.format, config.logging.level.number)
        tokenizer, sampling = await asyncio.to_thread(_model_files, config)
        settings = gateway_settings(config, sampling)
        metrics = GatewayMetrics(config.vllm_model_name)
        self._backend = backend = SchedulerClient(
            resolve=SchedulerAddress(scheduler),
            gateway_id=serve.get_replica_context().replica_id.unique_id,
            security=channel_security(config.internal),
            listener=metrics,
        )
        self._running = AsyncExitStack()
        tracing = request_tracing(config.tracing, self._running)
        self._app = create_app(backend, tokenizer, settings, metrics, tracing)
        await self._running.enter_async_context(backend)
        await self._running.enter_async_context(RayMirror(metrics.families))
        if config.gateway.grpc_port is not None:
            grpc_server = GrpcServer(
                backend,
                tokenizer,
                settings,
                metrics,
                config.gateway.drain_seconds / 2,
                share_port=True,
                tracing=tracing,
            )
            await self._running.enter_async_context(grpc_server)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        self._backend.check_health()

    async def __del__(self) -> None:
        await self._running.aclose()


def gateway_settings(config: SpoolConfig, sampling: SamplingDefaults) -> GatewaySettings:
    """Reads the keys that the configuration names. Raises SecretError."""
    gateway, tls = config.gateway, config.auth.tls
    listen: dict[str, Any] = {"host": gateway.host}
    if tls is not None:
        listen["tls"] = TlsFiles(certificate=tls.certificate, key=tls.key)
    return GatewaySettings(
        model_names=(config.served_name,),
        api_keys=tuple(_api_keys(config)),  # type: ignore[arg-type]  # pydantic hides them
        named_keys=tuple(NamedKey(name=key.name, digest=key.digest) for key in config.auth.keys),
        sampling=sampling,
        limits=gateway.limits,
        tool_format=gateway.tool_format,
        default_timeout_seconds=gateway.default_timeout_seconds,
        retry_after_seconds=gateway.retry_after_seconds,
        http=ListenSettings(port=gateway.port, **listen),
        grpc=ListenSettings(port=gateway.grpc_port or 0, **listen),
    )


def _api_keys(config: SpoolConfig) -> list[str]:
    auth = config.auth
    keys = [key.get_secret_value() for key in auth.api_keys]
    if auth.api_keys_env is not None:
        named = secret_from_environment("auth.api_keys_env", auth.api_keys_env)
        keys += [key.strip() for key in named.split(",") if key.strip()]
    if auth.api_keys_file is not None:
        keys += secret_from_file("auth.api_keys_file", auth.api_keys_file).split()
    return keys


def _model_files(config: SpoolConfig) -> tuple[ModelTokenizer, SamplingDefaults]:
    """The tokenizer, and the sampling defaults. The demo has these files only together with its weights."""
    source = resolve_model(config.models.target, Role.TARGET)
    if source.kind is SourceKind.DEMO:
        tokenizer = ModelTokenizer(fetch_model(source, lambda message, fraction: None), demo_chat_template())
        return tokenizer, config.gateway.sampling or _DEMO_SAMPLING
    tokenizer = load_tokenizer(str(source.folder or config.models.target))
    return tokenizer, config.gateway.sampling or model_sampling_defaults(tokenizer.folder)
