"""What Serve itself is told: where its proxies listen, and the file for `serve deploy`."""

from __future__ import annotations

from typing import Any

import yaml

from deploy.configuration.entrance import ProxyLocation
from deploy.configuration.tree import SpoolConfig

_LOCATIONS = {ProxyLocation.EVERY_NODE: "EveryNode", ProxyLocation.HEAD_NODE: "HeadOnly"}

IMPORT_PATH = "deploy.serve_app:build"


def proxy_location(config: SpoolConfig) -> str:
    """Nodes with an HTTP proxy."""
    return _LOCATIONS[config.gateway.http_on]


def http_options(config: SpoolConfig) -> dict[str, Any]:
    """For Serve's HTTP proxies."""
    options: dict[str, Any] = {"host": config.gateway.host, "port": config.gateway.http_port}
    if config.auth.tls is not None:
        options["ssl_certfile"] = str(config.auth.tls.certificate)
        options["ssl_keyfile"] = str(config.auth.tls.key)
    return options


def serve_file(config: SpoolConfig) -> str:
    """The file for `serve deploy`, or a RayService's serveConfigV2, secrets and all."""
    application = {
        "name": config.ray.app_name,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"settings": config.plain()},
    }
    content = {
        "proxy_location": proxy_location(config),
        "http_options": http_options(config),
        "applications": [application],
    }
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text
