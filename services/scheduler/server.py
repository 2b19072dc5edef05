"""The gRPC server of a scheduler: sessions of gateways, registration of workers, status, views and health."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from prometheus_client.core import Metric as Family

from spool.protos import cell_view_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from spool.services.observability.observer import ServiceObserver
from spool.services.observability.vllm_names import with_vllm_names
from spool.services.rpc.call_guards import guards
from spool.services.rpc.certificates import RenewedCertificate
from spool.services.rpc.channel_options import SERVER_OPTIONS
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.supervision import SupervisedTask
from spool.services.rpc.worker_codec import ROLES
from spool.services.scheduler.service import SchedulerService, ServiceClosedError
from spool.services.scheduler.session import GatewaySession, RetryAdvice, SessionEndedError, SessionOptions
from spool.services.scheduler.status import WORKER_STATES, ReplicaFigures, status_of, workers_in
from spool.services.scheduler.telemetry.metrics import Reading
from spool.services.scheduler.viewer import CellViewer
from spool.services.scheduler.workers.worker_link import WorkerEndpoint, WorkerState
from spool.services.scheduler.workers.worker_set import RegistryOptions

logger = logging.getLogger(__name__)

SERVICE_NAME = "spool.scheduler.v1.Scheduler"

_SWEEP_SECONDS = 0.5

# Workers register every second, and their steps may be long.
_SETTLING_SECONDS = 5.0

# For a worker that leaves: how long its sequences may take to move where the call has no deadline, and how long before
# a deadline the call is answered.
_DRAIN_SECONDS = 10.0
_DRAIN_MARGIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class SchedulerServerOptions:
    """With `vllm_model_name`, metrics that vLLM has too are exported under vLLM's names as well, for a model of this
    name."""

    sessions: SessionOptions = field(default_factory=SessionOptions)
    registry: RegistryOptions = field(default_factory=RegistryOptions)
    vllm_model_name: str | None = None


class _TargetsWatch(ServiceObserver):
    """A gateway of several cells gives no sequences to a cell without targets, and takes those back that it has."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server

    def targets_changed(self, targets: int) -> None:
        self._server.tell_load()


class SchedulerServer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves one scheduler service and grpc.health.v1 on `host`:`port` (0: a free port).

    `replicas` gives the decision on the number of workers, for the status. `security` says who may call; health checks
    need no token. `start` returns the address. The server stays up after its service has closed, because another
    scheduler took over or for another reason: sessions then end with ABORTED or UNAVAILABLE, so that gateways submit
    their unfinished sequences elsewhere, and health is NOT_SERVING. The owner of the service closes it.
    """

    def __init__(
        self,
        service: SchedulerService,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        security: ChannelSecurity | None = None,
        options: SchedulerServerOptions | None = None,
        replicas: Callable[[], ReplicaFigures | None] = lambda: None,
    ) -> None:
        self._service = service
        self._replicas = replicas
        self._host = host
        self._port = port
        self._security = security or ChannelSecurity()
        self._options = options or SchedulerServerOptions()
        self._advice = RetryAdvice()
        self._health = health_aio.HealthServicer()
        self._sessions: list[GatewaySession] = []
        service.observers.append(_TargetsWatch(self))
        self._server: grpc.aio.Server | None = None
        self._certificate: RenewedCertificate[grpc.ServerCertificateConfiguration] | None = None
        self._chores: list[SupervisedTask] = []
        self._started = time.monotonic()

    async def start(self) -> str:
        """Raises OSError if the port cannot be bound, and InsecureListenError for a host open to strangers."""
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=guards(self._security))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)
        cell_view_pb2_grpc.add_CellViewerServicer_to_server(CellViewer(self._service, self.status), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._certificate = self._security.certificate()
        address = self._security.listen(server, self._host, self._port, self._certificate)
        await server.start()
        self._server = server
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._chores = [
            SupervisedTask(self._await_close(), "watch for the end of the service"),
            SupervisedTask(self._sweep(), "sweep of workers that are gone"),
        ]
        return address

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Ends the sessions, so that gateways go elsewhere, and then the server."""
        await self._health.enter_graceful_shutdown()
        for chore in self._chores:
            chore.cancel()
        for session in list(self._sessions):
            session.close("the scheduler is shutting down")
        if self._server is not None:
            await self._server.stop(grace_seconds)
        await asyncio.gather(*(chore.stop() for chore in self._chores))

    def check_health(self) -> None:
        """Raises ServiceClosedError with the reason if the service has closed, RuntimeError if the server is broken."""
        if self._service.closed_because is not None:
            raise ServiceClosedError(self._service.closed_because)
        for chore in self._chores:
            chore.check()

    def status(self) -> scheduler_pb2.StatusReply:
        """The answer of the Status method."""
        uptime = time.monotonic() - self._started
        return status_of(self._service, self._sessions, uptime, self._replicas())

    def metric_families(self) -> Iterator[Family]:
        """The scheduler's metrics at this moment."""
        links = self._service.workers.known()
        leaving = {link.endpoint.worker_id for link in links if link.state is WorkerState.LEAVING}
        core, replicas, config = self._service.core.snapshot(), self._replicas(), self._service.config
        workers = workers_in(core, self._service).values()
        reading = Reading(
            core=core,
            statistics=self._service.statistics(),
            workers=tuple(worker for worker in workers if worker.worker_id not in leaving),
            draft_queue=sum(link.load.queued for link in links if link.up),
            queue_limit=config.max_queued_sequences,
            sessions=len(self._sessions),
            uptime_seconds=time.monotonic() - self._started,
            wanted={} if replicas is None else replicas.wanted,
            certificate=self._certificate,
        )
        families, name = self._service.metrics.families(reading), self._options.vllm_model_name
        return families if name is None else with_vllm_names(families, name)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> None:
        # A coroutine, because a generator that is cancelled while it writes is closed only some time later.
        await self._check_open(context)
        # Sent now, because the first write would send the metadata too: a session that ends during that write could not
        # send its status.
        await context.send_initial_metadata(())
        session = GatewaySession(self._service, self._options.sessions, self._advice)
        self._sessions.append(session)
        try:
            await session.run(request_iterator, context.write)
        except SessionEndedError as error:
            await context.abort(error.code, str(error))
        finally:
            self._sessions.remove(session)

    async def Register(  # noqa: N802
        self, request: scheduler_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.RegisterReply:
        try:
            endpoint = _endpoint(request)
            _check_load(request)
            await self._service.hear_of_epoch(request.highest_scheduler_epoch)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._check_open(context)
        try:
            link = await self._service.workers.register(
                endpoint, request.description, self._options.registry, request.busy_seconds, request.queued
            )
        except ServiceClosedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return scheduler_pb2.RegisterReply(
            scheduler_epoch=self._service.workers.epoch, state=WORKER_STATES.to_wire(link.state), reason=link.reason
        )

    async def Deregister(  # noqa: N802
        self, request: scheduler_pb2.DeregisterRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DeregisterReply:
        remaining = context.time_remaining()
        seconds = _DRAIN_SECONDS if remaining is None else max(remaining - _DRAIN_MARGIN_SECONDS, 0.0)
        if self._service.workers.leaves(request.worker_id, request.worker_epoch):
            await self._service.remove_worker(request.worker_id, seconds)
        return scheduler_pb2.DeregisterReply(scheduler_epoch=self._service.workers.epoch)

    async def Status(  # noqa: N802
        self, request: scheduler_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.StatusReply:
        return self.status()

    async def _check_open(self, context: grpc.aio.ServicerContext) -> None:
        if self._service.closed_because is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._service.closed_because)

    async def _await_close(self) -> None:
        reason = await self._service.wait_closed()
        for session in list(self._sessions):
            session.close(reason)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def tell_load(self) -> None:
        """Of the cell, to all gateways."""
        for session in list(self._sessions):
            session.tell_load()

    async def _sweep(self) -> None:
        """Forgets workers that are gone, and fails sequences that have waited too long for a target. Tells the service
        when the workers of a scheduler before this one have had the time to join."""
        limit, settled = self._options.sessions.fail_without_target_seconds, False
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            if not settled and time.monotonic() - self._started >= _SETTLING_SECONDS:
                settled = True
                self._service.settle()
            await self._service.workers.sweep(self._options.registry)
            if self._service.workers.targetless_seconds > limit:
                for session in list(self._sessions):
                    session.fail_all(f"no target worker has been up for {limit:g} s")

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)


def _check_load(request: scheduler_pb2.RegisterRequest) -> None:
    """Raises ValueError for a time that cannot be one."""
    if not (math.isfinite(request.busy_seconds) and request.busy_seconds >= 0):
        raise ValueError(f"busy_seconds is {request.busy_seconds}, must be at least 0")


def _endpoint(request: scheduler_pb2.RegisterRequest) -> WorkerEndpoint:
    """Raises ValueError naming the field that is wrong."""
    if not request.worker_id:
        raise ValueError("worker_id is empty")
    host, _, port = request.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address is {request.address!r}, must be host:port")
    return WorkerEndpoint(request.worker_id, ROLES.from_wire(request.description.role), request.address)
