"""The workers of one scheduler: their links, and the epochs with which the scheduler speaks to them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from protos import worker_pb2
from scheduler.messages import Role, RowResult, SendStep
from services.observability.observer import StepTimings
from services.rpc.channel_security import ChannelSecurity
from services.rpc.supervision import SupervisedTask
from services.scheduler.workers.pairing import check_pairing
from services.scheduler.workers.worker_link import (
    LinkOptions,
    SchedulerFencedError,
    WorkerEndpoint,
    WorkerLink,
    WorkerUnreachableError,
)

logger = logging.getLogger(__name__)


class WorkerSetListener(Protocol):
    """Hears what happens to the workers. All calls come from the event loop and must not block."""

    def worker_up(self, endpoint: WorkerEndpoint, description: worker_pb2.WorkerDescription) -> None: ...

    def worker_lost(self, endpoint: WorkerEndpoint, reason: str, blameless: bool) -> None:
        """`blameless`: what the worker computed is not the reason."""

    def has_suspect(self, endpoint: WorkerEndpoint) -> bool:
        """Whether the worker computes a sequence that will fail if the worker is lost."""

    def step_replied(
        self,
        endpoint: WorkerEndpoint,
        step: SendStep,
        results: tuple[RowResult, ...],
        timings: StepTimings,
    ) -> None: ...

    def link_broken(self, endpoint: WorkerEndpoint, error: BaseException) -> None:
        """A link has ended for good, with SchedulerFencedError or an unexpected error."""


class WorkerSet:
    """Adds and removes workers and keeps their links up.

    `check_open` raises once no worker may be added any more. Every connection gets a higher epoch than all before it.
    """

    def __init__(
        self,
        listener: WorkerSetListener,
        check_open: Callable[[], None],
        options: LinkOptions,
        security: ChannelSecurity,
        scheduler_epoch: int,
    ) -> None:
        self._listener = listener
        self._check_open = check_open
        self._options = options
        self._security = security
        self._epoch = scheduler_epoch
        self._links: dict[str, WorkerLink] = {}
        self._runs: dict[str, SupervisedTask] = {}
        self._up: dict[str, asyncio.Event] = {}
        self._targetless_since: float | None = time.monotonic()

    async def add(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Connects to workers and returns once each of them has answered a first step.

        Raises WorkerUnreachableError, or PairingError where a worker does not fit; then none of them is added. Until
        `remove`, a worker that is lost later is tried again and again.
        """
        self._check_open()
        added: dict[str, WorkerLink] = {}
        for endpoint in endpoints:
            if endpoint.worker_id in self._links or endpoint.worker_id in added:
                raise ValueError(f"worker_id {endpoint.worker_id} is taken")
            added[endpoint.worker_id] = WorkerLink(endpoint, self._options, self._take_epoch, self, self._security)
        try:
            descriptions = dict(
                zip(added, await asyncio.gather(*(link.describe() for link in added.values())), strict=True)
            )
            known = {**self.descriptions, **descriptions}
            for worker_id, description in descriptions.items():
                _check_against(worker_id, description, known)
            self._check_open()
        except BaseException:
            for link in added.values():
                await link.close()
            raise
        self._links |= added
        for worker_id, link in added.items():
            self._up[worker_id] = asyncio.Event()
            self._runs[worker_id] = SupervisedTask(
                link.run(descriptions[worker_id]), f"link to {worker_id}", functools.partial(self._link_ended, link)
            )
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                for worker_id in added:
                    await self._up[worker_id].wait()
        except BaseException as error:
            missing = [worker_id for worker_id in added if not added[worker_id].up]
            for worker_id in added:
                await self.remove(worker_id)
            if isinstance(error, TimeoutError):
                raise WorkerUnreachableError(
                    f"workers without an answer to a first step within {self._options.connect_timeout:g} s: "
                    f"{', '.join(missing)}"
                ) from error
            raise
        self._check_open()

    async def remove(self, worker_id: str, *, dismiss: bool = True, died: bool = False) -> None:
        """Stops using a worker, which drops its sequences; they go on elsewhere. An unknown worker is no error.

        `dismiss=False` is for a worker that need not be told. `died`: the process that the link speaks to is gone, and
        one of its sequences may be the reason.
        """
        link = self._links.pop(worker_id, None)
        if link is None:
            return
        was_up = link.up
        run = self._runs.pop(worker_id)
        self._up.pop(worker_id)
        run.cancel()
        # Before anything is awaited: whoever cancels this call must not leave the core with a worker that is gone.
        if was_up:
            self._lost(link.endpoint, "it was started anew" if died else "it was removed", blameless=not died)
        try:
            await run.stop()
            if isinstance(run.error, SchedulerFencedError):
                # Heard at the very moment at which the worker was given up.
                self._listener.link_broken(link.endpoint, run.error)
            if was_up and dismiss:
                await link.dismiss()
        finally:
            await link.close()

    def find(self, worker_id: str) -> WorkerLink | None:
        """The link of a worker that is up."""
        link = self._links.get(worker_id)
        return link if link is not None and link.up else None

    def retry(self, worker_id: str) -> None:
        """Tries a worker that is down again at once. An unknown worker is no error."""
        if worker_id in self._links:
            self._links[worker_id].retry_now()

    def trouble_of(self, worker_id: str) -> str:
        """Why a worker that was added is not up; empty for an unknown one."""
        return self._links[worker_id].trouble if worker_id in self._links else ""

    def stop(self) -> None:
        """Sends nothing to any worker from now on."""
        for run in self._runs.values():
            run.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*(run.stop() for run in self._runs.values()))
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()
        self._runs.clear()
        self._up.clear()

    @property
    def epoch(self) -> int:
        """The highest epoch that was used."""
        return self._epoch

    def raise_epoch(self, epoch: int) -> None:
        """Connections to come have epochs above this one."""
        self._epoch = max(self._epoch, epoch)

    @property
    def endpoints(self) -> Mapping[str, WorkerEndpoint]:
        """The endpoint of every worker that was added and not removed, up or not."""
        return {worker_id: link.endpoint for worker_id, link in self._links.items()}

    @property
    def descriptions(self) -> Mapping[str, worker_pb2.WorkerDescription]:
        """The description of every worker that has been up, as of the last time that it came up."""
        return {worker_id: link.description for worker_id, link in self._links.items() if link.description is not None}

    @property
    def up(self) -> frozenset[str]:
        return frozenset(worker_id for worker_id, link in self._links.items() if link.up)

    @property
    def targetless_seconds(self) -> float:
        """How long no target worker has been up; 0 while one is."""
        return 0.0 if self._targetless_since is None else time.monotonic() - self._targetless_since

    # LinkListener.

    def check_admission(self, link: WorkerLink, description: worker_pb2.WorkerDescription) -> None:
        _check_against(link.endpoint.worker_id, description, self.descriptions)

    def link_up(self, link: WorkerLink, description: worker_pb2.WorkerDescription) -> None:
        endpoint = link.endpoint
        logger.info("worker %s is up at %s", endpoint.worker_id, endpoint.address)
        if endpoint.worker_id in self._up:
            self._up[endpoint.worker_id].set()
        if endpoint.role is Role.TARGET:
            self._targetless_since = None
        self._listener.worker_up(endpoint, description)

    def has_suspect(self, link: WorkerLink) -> bool:
        return self._listener.has_suspect(link.endpoint)

    def link_down(self, link: WorkerLink, reason: str, blameless: bool) -> None:
        self._lost(link.endpoint, reason, blameless)

    def step_replied(
        self, link: WorkerLink, step: SendStep, results: tuple[RowResult, ...], timings: StepTimings
    ) -> None:
        self._listener.step_replied(link.endpoint, step, results, timings)

    def _lost(self, endpoint: WorkerEndpoint, reason: str, blameless: bool) -> None:
        logger.warning("worker %s left: %s", endpoint.worker_id, reason)
        targets_up = any(link.up and link.endpoint.role is Role.TARGET for link in self._links.values())
        if endpoint.role is Role.TARGET and not targets_up:
            self._targetless_since = time.monotonic()
        self._listener.worker_lost(endpoint, reason, blameless)

    def _link_ended(self, link: WorkerLink, error: Exception) -> None:
        """A link that is not removed goes on for ever; any other end closes the scheduler."""
        trace = None if isinstance(error, SchedulerFencedError) else error
        logger.error("the link to worker %s ended: %s", link.endpoint.worker_id, error, exc_info=trace)
        self._listener.link_broken(link.endpoint, error)

    def _take_epoch(self) -> int:
        self._epoch += 1
        return self._epoch


def _check_against(
    worker_id: str,
    description: worker_pb2.WorkerDescription,
    known: Mapping[str, worker_pb2.WorkerDescription],
) -> None:
    check_pairing(worker_id, description, [(name, other) for name, other in known.items() if name != worker_id])
