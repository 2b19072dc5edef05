"""What Serve's HTTP proxies do before a request reaches a gateway: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

IMPORT_PATH = "deploy.ray_app.proxy_middleware:middlewares"

_HIDDEN = "/-/routes"


class HiddenRoutes:
    """Serve's proxies list the applications of the cluster to everybody who asks; no key is needed for that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == _HIDDEN:
            error = {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}
            await JSONResponse({"error": error}, status_code=404)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Called by each proxy at its start."""
    return [Middleware(HiddenRoutes)]
