"""What replicas of every kind share: the plan they start from, secrets, tracing, and the way to the scheduler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import ray.util
from ray.serve.handle import DeploymentHandle

from deploy.config.ingress import InternalSettings
from deploy.config.observation import TracingSettings
from deploy.config.spool_config import SpoolConfig
from scheduler.messages import Role
from services.observability.observer import ServiceObserver
from services.observability.tracing import RequestTracing
from services.rpc.channel_security import ChannelSecurity


class SecretError(ValueError):
    """A secret that the configuration names is not there; the message says which."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration, with what only the deployment could settle: GPUs of a replica, by role, and thread counts."""

    config: SpoolConfig
    gpus: Mapping[Role, float]
    threads: Mapping[Role, int]

    @property
    def pair_shares_a_gpu(self) -> bool:
        """Whether a draft and a target are on one GPU, and nothing else of this application."""
        return self.config.is_one_pair and min(self.gpus.values()) > 0 and sum(self.gpus.values()) <= 1

    def device(self, role: Role) -> str:
        """The device of one worker. Ray shows a replica its own GPUs only, so the first is always the right one."""
        return "cuda:0" if self.gpus[role] > 0 else "cpu"


class SchedulerAddress:
    """Asks Serve for the address of the current scheduler. Each call asks anew: a successor has another address."""

    def __init__(self, scheduler: DeploymentHandle) -> None:
        self._scheduler = scheduler

    async def __call__(self) -> str:
        """Raises ConnectionError while no scheduler is running."""
        try:
            address: str = await self._scheduler.locate.remote()
        except Exception as error:  # Serve's and Ray's errors have no common ancestor
            raise ConnectionError(f"no scheduler found: {type(error).__name__}: {error}") from error
        return address


def internal_host(settings: InternalSettings) -> str:
    """The address of this node that other replicas reach."""
    if settings.host is not None:
        return settings.host
    found: str = ray.util.get_node_ip_address()
    return found


def channel_security(settings: InternalSettings) -> ChannelSecurity:
    """Reads the secrets that the settings name, on the node where they are needed. Raises SecretError."""
    token = ""
    if settings.token is not None:
        token = settings.token.get_secret_value()
    elif settings.token_env is not None:
        token = secret_from_environment("internal.token_env", settings.token_env)
    elif settings.token_file is not None:
        token = secret_from_file("internal.token_file", settings.token_file)
    if settings.tls is None:
        return ChannelSecurity(token=token)
    tls = settings.tls
    return ChannelSecurity(
        token=token,
        ca_file=str(tls.ca),
        certificate_file=str(tls.certificate),
        key_file=str(tls.key),
        server_name=tls.server_name or "",
    )


def secret_from_environment(field: str, name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise SecretError(f"{field} is {name}, and the environment has no such variable")
    return value


def secret_from_file(field: str, path: Path) -> str:
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(f"{field} is {path}, which cannot be read: {error}") from error
    if not value:
        raise SecretError(f"{field} is {path}, which is empty")
    return value


def request_tracing(settings: TracingSettings, running: AsyncExitStack) -> RequestTracing | None:
    """For a gateway; None where tracing is off. Spans that wait are sent when `running` closes."""
    if settings.endpoint is None:
        return None
    from services.observability.otel import OtelRequests, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.service_name, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return OtelRequests(provider)


def sequence_tracing(settings: TracingSettings, running: AsyncExitStack) -> list[ServiceObserver]:
    """The same for a scheduler; empty where tracing is off."""
    if settings.endpoint is None:
        return []
    from services.observability.otel import OtelSequences, tracer_provider

    provider = tracer_provider(settings.endpoint, settings.service_name, settings.sample_ratio)
    running.push_async_callback(asyncio.to_thread, provider.shutdown)
    return [OtelSequences(provider)]
