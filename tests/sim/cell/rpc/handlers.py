"""The server's end of the generated stubs: the handlers of a simulated process, behind the services' own guard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from services.rpc.call_guards import MessageGuard
from tests.sim.cell.virtual_time import result_of


class Handlers:
    """What the generated code needs of a grpc.aio server. `methods` holds the handlers by full method name."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        return

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self.methods[method] = result_of(_guarded(method, handler))


@dataclass(frozen=True, slots=True)
class _Details:
    method: str
    invocation_metadata: Any = ()


async def _guarded(method: str, handler: Any) -> Any:
    async def unguarded(_details: grpc.HandlerCallDetails) -> Any:
        return handler

    return await MessageGuard().intercept_service(unguarded, _Details(method))
