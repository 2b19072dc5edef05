"""One schedule from its seed: the plan, the run, and what came of it."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from spool.services.scheduler import server
from spool.services.scheduler.workers import worker_set
from spool.services.worker.drafting import ahead, batcher, mailbox, remote, stream
from spool.services.worker.drafting.service import DrafterService
from tests.sim.cell.plan import FAULTS, Plan, make_plan
from tests.sim.cell.rpc.network import Listener
from tests.sim.cell.virtual_threads import BlockingThread, Threads, VirtualCondition, VirtualEvent, VirtualQueue
from tests.sim.cell.virtual_time import StandstillError, VirtualLoop
from tests.sim.cell.world import World

_TAIL = 60


class ScheduleError(AssertionError):
    """A schedule that broke a rule. The message has the rule, the seed and the last events."""

    def __init__(self, plan: Plan, failure: str, events: tuple[tuple[Any, ...], ...]) -> None:
        lines = [
            f"seed {plan.seed} with {len(plan.requests)} sequences: {failure}",
            *(f"  {part}" for part in (plan.config, *plan.faults)),
            "last events:",
            *(f"  {time:9.5f}  {'  '.join(map(str, event))}" for time, *event in events[-_TAIL:]),
        ]
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    seed: int
    outcomes: Counter[str]
    faults: Counter[str]
    events: tuple[tuple[Any, ...], ...]
    """Each with its time; equal for two runs of the same seed."""
    tokens: int
    structured: int
    """Sequences with a grammar that finished."""
    reused: int
    """Positions whose KV sequences took over from others."""
    verified: int
    """Proposed tokens that targets have verified."""
    served: int
    """Of these, those that draft workers had proposed."""


@contextmanager
def _quiet(loop: VirtualLoop, threads: Threads) -> Iterator[None]:
    """The services' clocks are the loop's, their threads block in virtual time, their servers listen on the simulated
    network, their logs are off, and nothing is collected at times of its own."""
    modules: list[Any] = [worker_set, server, mailbox, stream, batcher, ahead, remote]
    clock = SimpleNamespace(monotonic=loop.time)
    blocking = SimpleNamespace(
        Condition=partial(VirtualCondition, threads),
        Event=partial(VirtualEvent, threads),
        Thread=partial(BlockingThread, threads),
    )
    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(grpc.aio, "server", Listener)
        for module in modules:
            patch.setattr(module, "time", clock)
        for module in (mailbox, stream):
            patch.setattr(module, "threading", blocking)
        patch.setattr(stream, "SimpleQueue", partial(VirtualQueue, threads))
        patch.setattr(DrafterService, "listen", _listen_to_grpc_alone)
        yield


async def _listen_to_grpc_alone(_service: DrafterService, _host: str) -> None:
    """There are no sockets here."""


def run_schedule(
    seed: int,
    sequences: int = 200,
    kinds: tuple[str, ...] = FAULTS,
    served: bool = False,
    cells: int | None = None,
) -> ScheduleResult:
    """`served` and `cells` as for `make_plan`. Raises ScheduleError."""
    rng = random.Random(seed)
    return run_plan(make_plan(rng, seed, sequences, kinds, served, cells), rng)


def run_plan(plan: Plan, rng: random.Random) -> ScheduleResult:
    """`rng` as `make_plan` has left it. Raises ScheduleError."""
    loop = VirtualLoop()
    threads = Threads(loop)
    with _quiet(loop, threads):
        world = World(loop, threads, plan, rng)

        def loop_error(_loop: object, context: dict[str, Any]) -> None:
            if "owner" in context and (context["owner"] is None or context["owner"].alive):
                world.fail(f"{context.get('message')}: {context.get('exception')!r}")

        loop.set_exception_handler(loop_error)
        try:
            loop.run_until_complete(world.run())
        except StandstillError as error:
            world.fail(str(error))
        finally:
            loop.run_until_complete(world.end())
            loop.close()
    if world.failure is not None:
        raise ScheduleError(plan, world.failure, tuple(world.events))
    return ScheduleResult(
        plan.seed,
        Counter(_kind(call.outcome or "") for call in world.calls),
        world.faults.struck,
        tuple(world.events),
        sum(len(call.tokens) for call in world.calls),
        sum(call.outcome in ("stop", "length") for call in world.calls if call.plan.request.sampling.grammar),
        world.reused,
        world.verified,
        world.served,
    )


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]
