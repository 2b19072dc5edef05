"""A simulated gateway: the real client of the scheduler, and the clients that are connected to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spool.scheduler.messages import TokenLogprobs
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.scheduler_client.cell_link import ClientOptions
from spool.services.scheduler_client.remote import SchedulerClient
from tests.sim.cell.plan import RequestPlan
from tests.sim.cell.process import Process
from tests.support.paged_model import true_output, true_scores

if TYPE_CHECKING:
    from tests.sim.cell.world import World

# Shorter than in service, so that what they wait for happens within a schedule.
CLIENT_OPTIONS = ClientOptions(connect_timeout=1.0, longest_backoff=0.5, watch_interval=0.5)

_SLACK = 1e-3


class SimulatedGateway:
    """One gateway, and the clients that are connected to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.process = Process(world.network, name)
        self.client = SchedulerClient(
            [partial(cell.resolve, self.process) for cell in world.cells],
            security=self.process,  # type: ignore[arg-type]
            options=CLIENT_OPTIONS,
            gateway_id=self.process.name,
        )
        self.process.run(self.client.start)

    def begin(self, plan: RequestPlan) -> None:
        if not self.process.alive:
            return
        call = ClientCall(self.world, self, plan)
        self.world.calls.append(call)
        call.start()


class ClientCall:
    """One request, from a client's submission to its end. `outcome` says how it ended, once it has."""

    def __init__(self, world: World, gateway: SimulatedGateway, plan: RequestPlan) -> None:
        self.world = world
        self.gateway = gateway
        self.plan = plan
        self.outcome: str | None = None
        self.tokens: list[int] = []
        request = plan.request
        most = min(request.max_tokens, world.plan.longest)
        grammar, windows = request.sampling.grammar, world.plan.windows
        self.expected = true_output(request.prompt, most, request.stop_token_ids, grammar, windows)
        if request.draft_length == 5:
            guess = list(self.expected)
            guess[plan.number % len(guess)] ^= plan.number % 3 % 2  # of three guesses one is wrong somewhere
            self.plan = replace(plan, request=replace(request, expected_output=tuple(guess)))
        self.scores: list[TokenLogprobs] = []
        self.expected_scores = [] if request.prompt_logprobs is None else true_scores(request.prompt, windows)
        self._gone = False
        self._stream: Any = None
        self._began = world.loop.now

    def start(self) -> None:
        self._task = self.gateway.process.spawn(self._run())
        if self.plan.cancel_after is not None:
            self.world.loop.call_later(self.plan.cancel_after, self._go_away)

    def _go_away(self) -> None:
        if self.outcome is None and self.gateway.process.alive:
            self._gone = True
            if self.plan.cancel_abruptly or self._stream is None:
                self._task.cancel()
            else:
                self._stream.cancel()

    async def _run(self) -> None:
        try:
            outcome = await self._read()
        except AdmissionRefusedError as error:
            outcome = f"refused {error.cause.value}"
        except DeadlineExceededError:
            outcome = "deadline"
        except BackendUnavailableError as error:
            outcome = f"unavailable: {error}"
        except SequenceFailedError as error:
            outcome = f"failed: {error}"
        except asyncio.CancelledError:
            outcome = "cancelled" if self._gone else "gateway died"
            if self._stream is not None:
                self._stream.cancel()
        except Exception as error:
            self.world.fail(f"request {self.plan.number} ended with {error!r}")
            raise
        self._end(outcome)

    async def _read(self) -> str:
        self._stream = stream = await self.gateway.client.submit(self.plan.request)
        async for delta in stream:
            self.tokens.extend(delta.tokens)
            self.scores.extend(delta.prompt_logprobs)
            if self.scores != self.expected_scores:
                self._fail(f"got {self.scores} of its prompt, must get {self.expected_scores}")
            if self.tokens != self.expected[: len(self.tokens)]:
                self._fail(f"got {self.tokens}, must get {self.expected}")
        return stream.finish_reason.value

    def _end(self, outcome: str) -> None:
        if self.outcome is not None:
            self._fail(f"ended twice: {self.outcome}, {outcome}")
        self.outcome = outcome
        self.world.note("end", self.plan.number, outcome, len(self.tokens))
        self._check(outcome)
        self.world.count_end()

    def _check(self, outcome: str) -> None:
        request, world = self.plan.request, self.world
        took = world.loop.now - self._began
        deadline = request.deadline_seconds
        if deadline is not None and took > deadline + _SLACK and self.gateway.process.alive:
            self._fail(f"took {took:.3f} s, its deadline was {deadline} s")
        kind = outcome.partition(":")[0]
        if kind in ("stop", "length"):
            reason = "stop" if self.expected[-1] in request.stop_token_ids else "length"
            if self.tokens != self.expected or kind != reason:
                self._fail(f"finished by {kind} with {self.tokens}, must be {reason} with {self.expected}")
        elif kind == "cancelled":
            if not self._gone:
                self._fail("was cancelled by nobody")
        elif kind == "deadline":
            if deadline is None or took < deadline - _SLACK:
                self._fail(f"missed a deadline of {deadline} after {took:.3f} s")
        elif kind == "failed":
            too_long = request.max_tokens > world.plan.longest and "need" in outcome
            blamed = "was lost while it computed this sequence, and then" in outcome and world.may_lose(request.prompt)
            if "injected" not in outcome and not too_long and not blamed:
                self._fail(f"failed unprovoked: {outcome}")
        elif kind.startswith("refused"):
            full = kind.endswith("queue_full") and world.plan.config.max_queued_sequences < len(world.plan.requests)
            too_long = kind.endswith("too_long") and request.max_tokens > world.plan.longest
            full = full or (kind.endswith("key_limit") and self._key_is_limited())
            if self.tokens or not (too_long or (full and self._stream is None)):
                self._fail(f"was {outcome} after {len(self.tokens)} tokens")
        elif kind != "gateway died":
            self._fail(f"ended with {outcome}")

    def _key_is_limited(self) -> bool:
        limits = [
            limit
            for key in self.world.plan.config.keys
            if key.name == self.plan.request.key
            for limit in (key.max_waiting, key.tokens_per_minute)
        ]
        return any(limit is not None for limit in limits)

    def _fail(self, text: str) -> None:
        self.world.fail(f"request {self.plan.number} {text}")
