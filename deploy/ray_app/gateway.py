"""The HTTP and gRPC ingress as a Serve replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.assembly.gateway import start_gateway
from deploy.assembly.secrets import channel_security
from deploy.config.spool_config import SpoolConfig
from deploy.ray_app.ray_metrics import RayMirror
from deploy.ray_app.replica import SchedulerAddress
from services.launch.process_tuning import keep_loaded_objects
from services.observability.logs import install_logs
from services.observability.request_ids import REQUEST_ID


@serve.ingress()
class Gateway:
    """Serves OpenAI's API through Serve's HTTP proxies, and gRPC on a port of its own.

    Serve's gRPC proxy loses some cancellations and has no authentication, so it is not used. Replicas on one node
    share the port: the kernel spreads connections over them.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: SpoolConfig, schedulers: Sequence[DeploymentHandle], workers: Sequence[DeploymentHandle]
    ) -> None:
        """`workers` are only tied to the application here."""
        install_logs(config.logging.format, config.logging.level.number)
        self._running = AsyncExitStack()
        self._engine, self._app = await start_gateway(
            config,
            [SchedulerAddress(scheduler) for scheduler in schedulers],
            gateway_id=serve.get_replica_context().replica_id.unique_id,
            security=channel_security(config.internal),
            drain_seconds=config.gateway.drain_seconds / 2,
            share_port=True,
            running=self._running,
        )
        await self._running.enter_async_context(RayMirror(self._engine.metrics.families))
        keep_loaded_objects()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _with_one_id(self._app)

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        self._engine.backend.check_health()

    async def __del__(self) -> None:
        await self._running.aclose()


def _with_one_id(app: ASGIApp) -> ASGIApp:
    """Serve's proxies add the id that they sent with a request to its response, so the application must not."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get(REQUEST_ID) == Headers(scope=scope).get(REQUEST_ID):
                    del headers[REQUEST_ID]
            await send(message)

        await app(scope, receive, send_without_id)

    return answer
