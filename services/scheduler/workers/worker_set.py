"""The workers of one scheduler: added, registering, leaving, forgotten; and the epochs with which it speaks to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spool.protos import worker_pb2
from spool.scheduler.messages import Role
from spool.services.receipts.fingerprint import differences
from spool.services.rpc.backoff import require_positive
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.supervision import SupervisedTask
from spool.services.scheduler.workers.pairing import check_pairing
from spool.services.scheduler.workers.worker_link import (
    LinkOptions,
    SchedulerFencedError,
    WorkerEndpoint,
    WorkerLink,
    WorkerListener,
    WorkerState,
    WorkerUnreachableError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """Times in seconds. A worker that was refused or not reached is tried again at its first registration that comes
    `retry_seconds` later. A worker that is down and has not registered for `forget_seconds` is forgotten. A
    registration is answered after `answer_seconds` at the latest, whether or not the connection has been made.
    """

    retry_seconds: float = 2.0
    forget_seconds: float = 15.0
    answer_seconds: float = 2.0

    def __post_init__(self) -> None:
        require_positive(self, "retry_seconds", "forget_seconds", "answer_seconds")


class WorkerSet:
    """Keeps the links of all workers up, and gives every connection a higher epoch than all before it.

    Workers come in two ways: `add` takes given ones, `register` those that announce themselves again and again. A
    registration with the same id, address and role comes from the same worker, perhaps from another start of it: the
    link finds out by itself to which it speaks. One with only the id in common replaces the worker. `sweep` is to be
    called now and then. `check_open` raises once no worker may be added any more.
    """

    def __init__(
        self,
        listener: WorkerListener,
        check_open: Callable[[], None],
        options: LinkOptions,
        security: ChannelSecurity,
        scheduler_epoch: int,
    ) -> None:
        self.links: dict[str, WorkerLink] = {}
        """By worker id, up or not."""
        self.clock = lambda: time.monotonic()  # noqa: PLW0108  (simulations put another in the place of the module's)
        """Monotonic seconds."""
        self._left: dict[str, WorkerLink] = {}
        """Workers that have left, and may still register until they have heard of it."""
        self._listener = listener
        self._check_open = check_open
        self._options = options
        self._security = security
        self._epoch = scheduler_epoch
        self._targetless_since: float | None = self.clock()

    async def add(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """Connects to workers and returns once each of them has answered a first step.

        Raises WorkerUnreachableError, or PairingError where a worker does not fit; then none of them is added. Until
        `remove`, a worker that is lost later is tried again and again.
        """
        self._check_open()
        names = [endpoint.worker_id for endpoint in endpoints]
        for name in names:
            if name in self.links or names.count(name) > 1:
                raise ValueError(f"worker_id {name} is taken")
        added = [self._start(endpoint) for endpoint in endpoints]
        try:
            async with asyncio.timeout(2 * self._options.connect_timeout):
                for link in added:
                    await link.attempted.wait()
            for link in added:
                if link.error is not None:
                    raise link.error
            self._check_open()
        except BaseException as error:
            late = [link.endpoint.worker_id for link in added if not link.attempted.is_set()]
            for link in added:
                await self.remove(link.endpoint.worker_id)
            if isinstance(error, TimeoutError):
                message = f"workers without an answer to a first step: {', '.join(late)}"
                raise WorkerUnreachableError(message) from error
            raise

    async def register(
        self,
        endpoint: WorkerEndpoint,
        description: worker_pb2.WorkerDescription,
        options: RegistryOptions,
        busy_seconds: float = 0.0,
        queued: int = 0,
    ) -> WorkerLink:
        """Handles one registration of a worker; the link says how the worker is. A draft worker tells how long it has
        computed since its start, and how many sequences wait for it."""
        self._check_open()
        worker_id, epoch = endpoint.worker_id, description.worker_epoch
        left = self._left.get(worker_id)
        if left is not None and left.leaving == epoch and left.endpoint == endpoint:
            left.heard = self.clock()
            return left
        link = self.links.get(worker_id)
        if link is not None and (link.endpoint != endpoint or link.leaving not in (None, epoch)):
            died = link.description is not None and link.description.worker_epoch != epoch
            await self.remove(worker_id, dismiss=False, died=died)
            self._check_open()
            link = self.links.get(worker_id)
        if link is None:
            link = self._start(endpoint)
            link.tried = self.clock()
        now = self.clock()
        restarted = link.registered is not None and link.registered.worker_epoch != epoch
        link.heard, link.registered = now, description
        if endpoint.role is Role.DRAFT:
            self._listener.draft_registered(endpoint, *link.load.hear(epoch, busy_seconds, queued, now))
        if link.error is not None and (restarted or now - link.tried >= options.retry_seconds):
            link.tried = now
            link.retry_now()
        try:
            async with asyncio.timeout(options.answer_seconds):
                await link.attempted.wait()
        except TimeoutError:
            logger.debug("worker %s is not connected yet", worker_id)
        return link

    def leaves(self, worker_id: str, worker_epoch: int) -> bool:
        """A worker asks to be removed, which the caller is to do. False where it is unknown, or another start of it."""
        link = self.links.get(worker_id)
        if link is None or link.epoch != worker_epoch:
            return False
        link.leaving = worker_epoch
        return True

    async def remove(self, worker_id: str, *, dismiss: bool = True, died: bool = False) -> None:
        """Stops using a worker, which drops its sequences; they go on elsewhere. An unknown worker is no error.

        `dismiss=False` does not tell the worker. `died`: the process that the link speaks to is gone, and one of its
        sequences may be the reason.
        """
        link = self.links.pop(worker_id, None)
        if link is None or link.task is None:
            return
        was_up = link.up
        link.task.cancel()
        if link.leaving is not None:
            link.heard = self.clock()
            self._left[worker_id] = link
        # Before anything is awaited: whoever cancels this call must not leave the core with a worker that is gone.
        if was_up:
            self.went_down(link, "it was restarted" if died else "it was removed", blameless=not died)
        try:
            await link.task.stop()
            if isinstance(link.task.error, SchedulerFencedError):
                # Heard at the very moment at which the worker was given up.
                self._listener.link_broken(link.endpoint, link.task.error)
            if was_up and dismiss:
                await link.dismiss()
        finally:
            await link.close()

    async def sweep(self, options: RegistryOptions) -> None:
        """Forgets workers that are not in use and have not registered for `forget_seconds`, at this sweep and the last.

        A process that was stopped finds all workers silent at once. By the next sweep the links know more: perhaps that
        another scheduler has taken over.
        """
        oldest = self.clock() - options.forget_seconds
        for link in self.known():
            worker_id, draining = link.endpoint.worker_id, link.leaving is not None and link.up
            unused = link.registered is not None and link.state is not WorkerState.IN_USE
            before, link.silent = link.silent, unused and link.heard < oldest
            if before and link.silent and not draining:
                logger.info("worker %s is forgotten: %s", worker_id, link.reason)
                if self.links.get(worker_id) is link:
                    await self.remove(worker_id, dismiss=False)
                self._left.pop(worker_id, None)

    def known(self) -> list[WorkerLink]:
        """Those that were added or have registered, and those that have left lately."""
        return [*self.links.values(), *self._left.values()]

    def find(self, worker_id: str) -> WorkerLink | None:
        """The link of a worker that is up."""
        link = self.links.get(worker_id)
        return link if link is not None and link.up else None

    def stop(self) -> None:
        """Sends nothing to any worker from now on."""
        for link in self.links.values():
            if link.task is not None:
                link.task.cancel()

    async def close(self) -> None:
        self.stop()
        links = list(self.links.values())
        await asyncio.gather(*(link.task.stop() for link in links if link.task is not None))
        await asyncio.gather(*(link.close() for link in links))
        self.links.clear()

    @property
    def epoch(self) -> int:
        """The highest epoch that was used."""
        return self._epoch

    def raise_epoch(self, epoch: int) -> None:
        """Connections to come have epochs above this one."""
        self._epoch = max(self._epoch, epoch)

    def _warn_of_differences(self, link: WorkerLink) -> None:
        """Targets that are not alike may give the same request different tokens."""
        name, others = link.endpoint.worker_id, self.descriptions
        own = others.pop(name, worker_pb2.WorkerDescription()).fingerprint
        for other, description in others.items():
            if other in self.up and description.role == worker_pb2.ROLE_TARGET:
                if found := differences(own, description.fingerprint):
                    logger.warning("targets %s and %s may give other bits: %s", name, other, "; ".join(found))
                return

    @property
    def descriptions(self) -> dict[str, worker_pb2.WorkerDescription]:
        """The description of every worker that has been up, as of the last time that it came up."""
        return {worker_id: link.description for worker_id, link in self.links.items() if link.description is not None}

    @property
    def up(self) -> frozenset[str]:
        return frozenset(worker_id for worker_id, link in self.links.items() if link.up)

    @property
    def draft_busy(self) -> list[float]:
        """Of each draft worker that is up, the part of the last seconds in which it computed."""
        return [one.load.busy_share for one in self.links.values() if one.up and one.endpoint.role is Role.DRAFT]

    @property
    def targetless_seconds(self) -> float:
        """How long no target worker has been up; 0 while one is."""
        return 0.0 if self._targetless_since is None else self.clock() - self._targetless_since

    # LinkOwner.

    def check_admission(self, link: WorkerLink, description: worker_pb2.WorkerDescription) -> None:
        name = link.endpoint.worker_id
        check_pairing(
            name, description, [(other, known) for other, known in self.descriptions.items() if other != name]
        )

    def take_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def went_up(self, link: WorkerLink) -> None:
        endpoint = link.endpoint
        logger.info("worker %s is up at %s", endpoint.worker_id, endpoint.address)
        if endpoint.role is Role.TARGET:
            self._targetless_since = None
            self._warn_of_differences(link)
        if link.description is not None:
            self._listener.worker_up(endpoint, link.description)

    def went_down(self, link: WorkerLink, reason: str, blameless: bool) -> None:
        endpoint = link.endpoint
        logger.warning("worker %s left: %s", endpoint.worker_id, reason)
        targets_up = any(other.up and other.endpoint.role is Role.TARGET for other in self.links.values())
        if endpoint.role is Role.TARGET and not targets_up:
            self._targetless_since = self.clock()
        self._listener.worker_lost(endpoint, reason, blameless)

    def _start(self, endpoint: WorkerEndpoint) -> WorkerLink:
        link = WorkerLink(endpoint, self._options, self, self._listener, self._security)
        link.task = SupervisedTask(
            link.run(), f"link to {endpoint.worker_id}", lambda error: self._link_ended(link, error)
        )
        self._left.pop(endpoint.worker_id, None)
        self.links[endpoint.worker_id] = link
        return link

    def _link_ended(self, link: WorkerLink, error: Exception) -> None:
        """A link that is not removed goes on for ever; any other end closes the scheduler."""
        trace = None if isinstance(error, SchedulerFencedError) else error
        logger.error("the link to worker %s ended: %s", link.endpoint.worker_id, error, exc_info=trace)
        self._listener.link_broken(link.endpoint, error)
