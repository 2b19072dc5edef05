"""What every replica is told at its start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray.util

from deploy.configuration.entrance import InternalSettings
from deploy.configuration.tree import SpoolConfig
from scheduler.messages import Role
from services.channel_security import ChannelSecurity


class SecretError(ValueError):
    """A secret that the configuration names is not there; the message says which."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration, with what only the deployment could settle: GPUs of a replica, by role, and thread counts."""

    config: SpoolConfig
    gpus: Mapping[Role, float]
    threads: Mapping[Role, int]

    def device(self, role: Role) -> str:
        """The device of one worker. Ray shows a replica its own GPUs only, so the first is always the right one."""
        return "cuda:0" if self.gpus[role] > 0 else "cpu"


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
