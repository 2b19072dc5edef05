"""The course of a schedule as a person reads it: when, who, what, one event a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from protos import worker_pb2
from scheduler.messages import (
    Command,
    EmitTokens,
    FailSequence,
    FinishSequence,
    KvMoved,
    RefuseSequence,
    SequenceCancelled,
    SequenceSubmitted,
    SuspectSequence,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from scheduler.messages import Event as CoreEvent

Event = tuple[Any, ...]


def transcript(events: Iterable[Event]) -> str:
    """Times are virtual seconds."""
    lines = []
    for time, kind, *details in events:
        who, what = _TELL.get(kind, _other)(kind, *details)
        lines.append(f"{time:9.5f}  {who:<14}  {what}")
    return "\n".join(lines)


def _other(kind: str, *details: Any) -> tuple[str, str]:
    return "-", " ".join([kind, *map(str, details)])


def _fault(_kind: str, what: str, seconds: float, pick: float, strength: float) -> tuple[str, str]:
    return "FAULT", f"{what}, for {seconds:g} s, at {pick:g} of all, strength {strength:g}"


def _step(
    _kind: str, worker: str, epoch: int, step_id: int, rows: tuple[int, ...], status: int, odd: tuple[int, ...]
) -> tuple[str, str]:
    of = f"of sequence {', '.join(map(str, rows))}" if rows else "without rows"
    answer = [_short(worker_pb2.StepStatus.Name(status)), *(_short(worker_pb2.RowStatus.Name(one)) for one in odd)]
    return worker, f"step {step_id} of epoch {epoch} {of}: {', '.join(answer)}"


def _short(name: str) -> str:
    return name.removeprefix("STEP_STATUS_").removeprefix("ROW_STATUS_")


def _named(what: str) -> Callable[..., tuple[str, str]]:
    """For events whose first detail says who."""
    return lambda _kind, who, *details: (str(who), " ".join([what, *map(str, details)]))


_TELL: dict[str, Callable[..., tuple[str, str]]] = {
    "fault": _fault,
    "between": lambda _kind, one, other: ("FAULT", f"between {one} and {other}"),
    "step": _step,
    "end": lambda _kind, number, outcome, tokens: (f"request {number}", f"ends after {tokens} tokens: {outcome}"),
    "hears": _named("hears of"),
    "says": _named("says:"),
    "kv lost": lambda _kind, worker, sequence: (worker, f"forgets sequence {sequence}"),
    "worker starts": _named("starts"),
    "worker dies": _named("dies"),
    "worker hangs": _named("hangs"),
    "scheduler starts": lambda _kind, name: (name, "starts"),
    "scheduler dies": _named("dies"),
    "scheduler closed": _named("closes:"),
    "gateway dies": _named("dies"),
    "BROKEN": lambda _kind, text: ("RULE BROKEN", text),
}


def told(message: CoreEvent | Command) -> str | None:
    """What an event or a command of the core says; None for steps, of which the workers tell."""
    match message:
        case SequenceSubmitted(request):
            again = f" and {len(request.committed_output)} of output" if request.committed_output else ""
            return f"sequence {request.sequence_id}: prompt of {len(request.prompt)} tokens{again}"
        case SequenceCancelled():
            return f"sequence {message.sequence_id}: cancelled"
        case WorkerJoined():
            return f"worker {message.worker.worker_id}: joins"
        case WorkerLost():
            blame = "nobody is to blame" if message.blameless else "what it computed may be to blame"
            return f"worker {message.worker_id}: lost, {blame} ({message.reason})"
        case WorkerDraining():
            return f"worker {message.worker_id}: drains"
        case KvMoved():
            return f"move {message.move_id} of KV: {'done' if message.moved else 'failed'}"
        case EmitTokens():
            return f"sequence {message.sequence_id}: tokens {', '.join(map(str, message.tokens))}"
        case SuspectSequence():
            return f"sequence {message.sequence_id}: suspected, until {message.suspicion.tokens} more tokens came"
        case FinishSequence():
            return f"sequence {message.sequence_id}: finished ({message.reason.value})"
        case FailSequence():
            return f"sequence {message.sequence_id}: failed ({message.error})"
        case RefuseSequence():
            return f"sequence {message.sequence_id}: refused ({message.message})"
    return None
