"""Scheduler core and step executors in one process, in virtual time: the services' work without gRPC between them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spool.engine.drafting.inside_target import InsideDrafting
from spool.engine.drafting.model_drafting import Draft, ModelDrafting
from spool.engine.drafting.proposer import Lookup, Proposer, Proposers
from spool.engine.target import TargetEngine
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.core import SchedulerCore
from spool.scheduler.messages import (
    EmitTokens,
    Event,
    FailSequence,
    FinishReason,
    FinishSequence,
    SendStep,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    TokenLogprobs,
    WorkerJoined,
    WorkerSpec,
)
from spool.scheduler.sampling import SamplingParameters
from spool.services.rpc.worker_codec import results_from_wire, spec_from_wire, step_to_wire
from spool.services.worker.executor import StepExecutor
from tests.support.core_state import check_state

# Workers live on from run to run; every run is a new scheduler to them.
_scheduler_epochs = itertools.count(1)
_STEP_SECONDS = 0.010


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logits_digests: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of each round."""
    reason: FinishReason | None = None
    error: str | None = None


def requests_of(
    prompts: Iterable[Sequence[int]], max_tokens: int, temperatures: Sequence[float] = (0.0,)
) -> list[SequenceRequest]:
    """For each prompt one with its number as the seed, temperatures in turn, that asks for digests of its logits."""
    samplings = (SamplingParameters(temperature=one, seed=n) for n, one in enumerate(itertools.cycle(temperatures)))
    return [
        SequenceRequest(number, tuple(prompt), max_tokens, sampling=sampling, logits_digests=True)
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=False))
    ]


def executor_of(
    engine: TargetEngine, draft: Draft | None = None, lookup_match: int | None = None, **options: Any
) -> StepExecutor:
    """Of a target that has a `draft` in its process, or prompt lookup, or both; without them its head, if it has one.
    `options` are those of the executor."""
    lookup = None if lookup_match is None else Lookup(lookup_match)
    own: Proposer | None = engine.head
    if draft is not None:
        own = InsideDrafting(ModelDrafting(draft, options.get("prefix_cache", True)))
    if draft is not None or (lookup is not None and own is None):
        engine.drafted_by("draft")
    return StepExecutor(engine, proposer=Proposers(lookup, own), **options)


def run_in_process(
    config: SchedulerConfig, workers: Mapping[str, StepExecutor], requests: Iterable[SequenceRequest]
) -> dict[int, Output]:
    """Runs all requests to their end. Raises RuntimeError if the core comes to a standstill before."""
    core = SchedulerCore(config)
    scheduler_epoch = next(_scheduler_epochs)
    outputs: dict[int, Output] = {}
    running: list[tuple[float, int, StepCompleted]] = []
    free_at = dict.fromkeys(workers, 0.0)

    def handle(now: float, *events: Event) -> None:
        for command in core.handle(events, now):
            match command:
                case SendStep():
                    executor = workers[command.worker_id]
                    reply = executor.execute(step_to_wire(command, executor.worker_epoch, scheduler_epoch), now)()
                    executor.offer()
                    free_at[command.worker_id] = end = max(now, free_at[command.worker_id]) + _STEP_SECONDS
                    results = results_from_wire(command, reply)
                    completed = StepCompleted(command.worker_id, command.step_id, results, _STEP_SECONDS)
                    heapq.heappush(running, (end, command.step_id, completed))
                case EmitTokens():
                    output = outputs[command.sequence_id]
                    output.tokens.extend(command.tokens)
                    output.logits_digests.extend(command.logits_digests)
                    output.logprobs.extend(command.logprobs)
                    output.prompt_logprobs.extend(command.prompt_logprobs)
                    output.cached += command.cached
                    output.rounds.append((command.drafted, command.accepted))
                case FinishSequence():
                    outputs[command.sequence_id].reason = command.reason
                case FailSequence():
                    outputs[command.sequence_id].error = command.error
                case _:
                    raise RuntimeError(f"unexpected {command}")

    for worker_id, executor in workers.items():
        handle(0.0, WorkerJoined(_spec(worker_id, executor)))
    for request in requests:
        outputs[request.sequence_id] = Output()
        handle(0.0, SequenceSubmitted(request))
    while running:
        now, _, completed = heapq.heappop(running)
        handle(now, completed)
    for sequence_id, output in outputs.items():
        if output.reason is None and output.error is None:
            raise RuntimeError(f"standstill: sequence {sequence_id} never ended")
    check_state(core)
    for executor in workers.values():
        executor.check_integrity()
    return outputs


def _spec(worker_id: str, executor: StepExecutor) -> WorkerSpec:
    return spec_from_wire(worker_id, executor.describe())
