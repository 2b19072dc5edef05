"""The file that `spool plan` reads: traffic, models, devices, prices and service levels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from deploy.config.problems import Problem, problems_of
from deploy.config.section import FieldProblem, Section, described
from deploy.config.yaml_source import YamlSource
from deploy.errors import UsageError
from deploy.planning.hardware import GPU_KINDS, ReplicaKind, replica_kind
from deploy.planning.traces import read_trace
from deploy.planning.traffic import Lengths, PlannedRequest, SharedBeginning, drawn, faster
from scheduler.config import Policy, SchedulerConfig


class SharedSection(Section):
    """Prompts that begin alike, as with a system prompt."""

    share: float = described(..., "Share of the requests whose prompt begins with one of these.", ge=0, le=1)
    count: int = described(1, "How many different beginnings there are, all equally frequent.", ge=1)
    tokens: int = described(..., "Tokens of a beginning, in addition to `prompt_tokens`.", ge=1)


class TrafficSection(Section):
    """Requests: drawn at random from a description, or read from a trace."""

    requests_per_second: float | None = described(None, "Mean rate at which requests arrive, at random.", gt=0)
    prompt_tokens: float = described(500, "Mean tokens of a prompt.", ge=1)
    prompt_variation: float = described(1.0, "Standard deviation of that as a share of the mean.", ge=0)
    output_tokens: float = described(200, "Mean tokens of an answer.", ge=1)
    output_variation: float = described(0.7, "Standard deviation of that as a share of the mean.", ge=0)
    max_tokens: int = described(16384, "The longest prompt, and the longest answer.", ge=1)
    shared_beginnings: SharedSection | None = described(None, "Prompts that begin alike.")
    trace: Path | None = described(None, "Trace of Mooncake, Azure or BurstGPT, in place of a rate.")
    trace_speed: float = described(1.0, "How many times as often requests arrive as in the trace.", gt=0)
    requests: int = described(1000, "Requests to simulate.", ge=50)
    seed: int = described(0, "Another seed draws other requests.")

    def problems(self) -> Iterator[FieldProblem]:
        if (self.requests_per_second is None) == (self.trace is None):
            given = "both are given" if self.trace is not None else "neither is given"
            yield FieldProblem(("requests_per_second",), f"or trace must be given, one of them: {given}")

    def read(self) -> list[PlannedRequest]:
        """Raises `UsageError` for a trace that cannot be read."""
        if self.trace is not None:
            return faster(read_trace(self.trace, self.requests), self.trace_speed)
        shared = self.shared_beginnings
        return drawn(
            self.requests_per_second or 1.0,
            self.requests,
            Lengths(self.prompt_tokens, self.prompt_variation, self.max_tokens),
            Lengths(self.output_tokens, self.output_variation, self.max_tokens),
            SharedBeginning(shared.share, shared.count, shared.tokens) if shared is not None else None,
            self.seed,
        )


class ServiceSection(Section):
    """What requests are promised. A number of replicas is enough if `percentile` of the requests get it."""

    first_token_seconds: float = described(1.0, "From a request's arrival to its first token.", gt=0)
    token_seconds: float = described(0.05, "Mean time of a token after the first one, of each request.", gt=0)
    percentile: float = described(99, "Percentage of the requests for which both must hold.", ge=50, lt=100)


class MeasuredSection(Section):
    """Costs of a model on a device on which they were measured."""

    name: str = described(..., "Name of the device.", min_length=1)
    step_seconds: float = described(..., "Of a pass, whatever it computes.", gt=0)
    token_seconds: float = described(..., "Of each token of a pass.", ge=0)
    block_tokens: int = described(1, "Tokens of a pass are rounded up to a multiple of this.", ge=1, le=1024)
    kv_token_seconds: float = described(0, "Of each token of KV that a pass reads.", ge=0)
    kv_tokens: int = described(1_000_000, "Tokens for whose KV a replica has room.", ge=1024)
    price: float = described(1.0, "Of a replica, for an hour.", ge=0)

    def kind(self) -> ReplicaKind:
        return ReplicaKind(
            self.name,
            self.step_seconds,
            self.token_seconds,
            self.kv_token_seconds,
            self.kv_tokens,
            self.price,
            self.block_tokens,
        )


class ModelSection(Section):
    """A model, and the devices that may serve it: kinds of GPUs by their data sheet, or measured ones."""

    parameters: float | None = described(None, "Parameters that a token takes part in, such as 8e9.", gt=0)
    bytes_per_parameter: float = described(2, "2 for bfloat16.", gt=0)
    kv_bytes_per_token: float | None = described(
        None, "KV of a token: 2 x layers x KV heads x head size x bytes.", gt=0
    )
    gpus: tuple[str, ...] = described((), "Kinds of GPUs to consider.")
    gpus_per_replica: int = described(1, "GPUs that share the model.", ge=1, le=64)
    measured: tuple[MeasuredSection, ...] = described((), "Devices whose costs are known.")

    def problems(self) -> Iterator[FieldProblem]:
        for name in self.gpus:
            if name not in GPU_KINDS:
                yield FieldProblem(("gpus",), f"holds {name!r}, must hold some of {', '.join(GPU_KINDS)}")
        if not self.gpus and not self.measured:
            yield FieldProblem(("gpus",), "and measured are empty; one of them must name a device")
        for name in ("parameters", "kv_bytes_per_token"):
            if self.gpus and getattr(self, name) is None:
                yield FieldProblem((name,), "must be given with gpus")


class HardwareSection(Section):
    """GPUs whose costs come from data sheets."""

    prices: dict[str, float] = described({}, "Price of a GPU of each kind for an hour. Without: 1.")
    bandwidth_share: float = described(0.8, "Share of the memory bandwidth that a pass reaches.", gt=0, le=1)
    operations_share: float = described(0.5, "Share of the arithmetic that a pass reaches.", gt=0, le=1)

    def problems(self) -> Iterator[FieldProblem]:
        for name, price in self.prices.items():
            if name not in GPU_KINDS:
                yield FieldProblem(("prices",), f"names {name!r}, must name some of {', '.join(GPU_KINDS)}")
            elif price < 0:
                yield FieldProblem(("prices", name), f"is {price}, must be at least 0")


class SchedulingSection(Section):
    """The scheduler's settings, as in the configuration; and the time that its process takes itself."""

    batch_size: int = described(64, "Sequences of a verify batch at most.", ge=1)
    draft_length: int = described(6, "Draft tokens of a round at most.", ge=1, le=64)
    draft_ahead: int = described(0, "Outcomes that idle drafts prepare for.", ge=0, le=256)
    prefill_chunk: int = described(512, "Tokens of prompts that one step takes in.", ge=1)
    max_running_per_target: int = described(128, "Running sequences for each target; more wait.", ge=1)
    wire_seconds: float = described(0.0002, "Each way between scheduler and workers.", ge=0)
    step_seconds: float = described(0.0005, "The scheduler's own time for a step, sent and answered.", ge=0)
    row_seconds: float = described(0.00001, "And for each sequence in it.", ge=0)
    gateway_seconds: float = described(
        0, "The gateway's own time for a request, and for each message of an answer. There is one gateway.", ge=0
    )

    def config(self, drafting: bool) -> SchedulerConfig:
        return SchedulerConfig(
            batch_size=self.batch_size,
            max_running=self.max_running_per_target,
            policy=Policy.AUTO,
            draft_length=self.draft_length if drafting else 0,
            draft_ahead=self.draft_ahead if drafting else 0,
            prefill_chunk=self.prefill_chunk,
            max_queued_sequences=1_000_000,
        )


class PlanFile(Section):
    """A question for `spool plan`."""

    traffic: TrafficSection = described(..., "Requests: drawn at random, or read from a trace.")
    service: ServiceSection = described(ServiceSection(), "Service levels.")
    target: ModelSection = described(..., "The target model, and the devices that may serve it.")
    draft: ModelSection = described(..., "The same for the draft model.")
    acceptance: float = described(
        ...,
        "Chance that the target accepts a draft token whose predecessors in the proposal were all accepted, as "
        "`spool bench profile` measures it.",
        ge=0,
        le=1,
    )
    hardware: HardwareSection = described(HardwareSection(), "GPUs whose costs come from data sheets.")
    scheduling: SchedulingSection = described(SchedulingSection(), "The scheduler's settings.")
    max_targets: int = described(64, "The largest number of targets to consider.", ge=1, le=256)

    def problems(self) -> Iterator[FieldProblem]:
        for name in ("target", "draft"):
            try:
                self.kinds(getattr(self, name))
            except ValueError as error:
                yield FieldProblem((name, "gpus"), str(error))

    def kinds(self, model: ModelSection) -> list[ReplicaKind]:
        """The devices that may serve the model, with what it costs there."""
        hardware = self.hardware
        found = [measured.kind() for measured in model.measured]
        for name in model.gpus:
            found.append(
                replica_kind(
                    name,
                    model.parameters or 0.0,
                    model.bytes_per_parameter,
                    model.kv_bytes_per_token or 0.0,
                    model.gpus_per_replica,
                    hardware.prices.get(name, 1.0),
                    hardware.bandwidth_share,
                    hardware.operations_share,
                )
            )
        return found


def read_plan_file(path: Path) -> PlanFile:
    """A trace's path counts from the file's folder. Raises `UsageError` with everything that is wrong."""
    source = YamlSource(path)
    try:
        plan = PlanFile.model_validate(source.data)
    except ValidationError as error:
        problems = sorted(problems_of(source.data, PlanFile, error), key=lambda one: source.line(one.path))
        found = [Problem(f"{path}:{source.line(one.path)}", ".".join(one.path), one.message) for one in problems]
        raise UsageError("; ".join(map(str, found))) from error
    if plan.traffic.trace is None:
        return plan
    traffic = plan.traffic.model_copy(update={"trace": path.parent / plan.traffic.trace})
    return plan.model_copy(update={"traffic": traffic})
