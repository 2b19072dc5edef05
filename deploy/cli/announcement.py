"""What `spool serve` says once it serves."""

from __future__ import annotations

from rich.console import Console

from deploy.cluster.addresses import curl_line
from deploy.cluster.served_state import Served
from deploy.config.spool_config import SpoolConfig

DOWN_STOPS = "`spool down` stops it."
CTRL_C_STOPS = "Ctrl-C stops it."


def announce(config: SpoolConfig, served: Served, console: Console, end: str) -> None:
    drafted = f", drafted by {config.models.draft_name}" if config.models.drafts else ""
    lines = [f"{config.models.target} is served{drafted}", f"  HTTP  {served.http_url}/v1"]
    if served.grpc_address is not None:
        lines.append(f"  gRPC  {served.grpc_address}")
    lines.append(f"  try   {curl_line(config, served.http_url)}")
    lines.append("  chat  spool chat")
    lines.append(end)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def served_already(app_name: str) -> str:
    return f"{app_name} is served already (`spool down` stops it; ray.app_name names another)"
