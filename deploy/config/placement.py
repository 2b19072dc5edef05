"""Where replicas run, and how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ByteSize, Field

from spool.deploy.config.section import Section, described
from spool.engine.settings import MOST_RANKS

HYSTERESIS = 0.2
"""How far below `utilisation` load must be to remove replicas."""

PositiveFloat = Annotated[float, Field(gt=0, le=1_000_000)]


class Autoscaling(Section):
    """Bounds and pace of a number of replicas that follows the load."""

    min_replicas: int = described(1, "Minimum number of replicas.", ge=1, le=4096)
    max_replicas: int = described(4, "Maximum number of replicas.", ge=1, le=4096)
    upscale_delay_seconds: float = described(10.0, "How long load must stay high before replicas are added.", ge=0)
    downscale_delay_seconds: float = described(300.0, "How long load must stay low before replicas are removed.", ge=0)

    def problems(self) -> Iterator[str]:
        if self.max_replicas < self.min_replicas:
            limit = f"must be at least min_replicas, which is {self.min_replicas}"
            yield f"max_replicas is {self.max_replicas}, {limit}"


class WorkerAutoscaling(Autoscaling):
    """Bounds and pace of a number of workers, which follows the load that the scheduler measures."""

    utilisation: float = described(
        0.85,
        f"Share of the replicas' capacity above which replicas are added; {HYSTERESIS} below it they are removed.",
        gt=HYSTERESIS,
        le=1,
    )


class TargetAutoscaling(WorkerAutoscaling):
    """The same for targets, whose load is the number of sequences that run or wait."""

    sequences_per_replica: int | None = described(None, "Sequences that fill it. Unset: scheduling.max_running.", ge=1)


class GatewayAutoscaling(Autoscaling):
    """The gateway follows the number of open requests."""

    target_ongoing_requests: int = described(256, "Open requests that one gateway replica should have.", ge=1)


class Placement(Section):
    """What a replica needs from its node."""

    num_cpus: float = described(0.1, "CPUs that a replica reserves; by default few, to fit on a laptop.", ge=0, le=4096)
    resources: dict[str, PositiveFloat] = described({}, "Ray resources that a replica reserves, as `large_gpu: 1`.")
    node_labels: dict[str, str] = described({}, "Labels of the node, such as `ray.io/accelerator-type: H200`.")

    def actor_options(self) -> dict[str, Any]:
        """Options of the replica's Ray actor."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.resources:
            options["resources"] = dict(self.resources)
        if self.node_labels:
            options["label_selector"] = dict(self.node_labels)
        return options


class Scaled(Placement):
    """Replicas of one kind: a fixed number, or one within bounds."""

    replicas: int = described(1, "Number of replicas; with autoscaling, at the start.", ge=1, le=4096)
    autoscaling: Autoscaling | None = None

    def problems(self) -> Iterator[str]:
        if not self.fewest <= self.replicas <= self.most:
            yield f"replicas is {self.replicas}, must be between autoscaling's {self.fewest} and {self.most}"

    @property
    def fewest(self) -> int:
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas


class WorkerGroup(Scaled):
    """The replicas that hold one model, drafting or verifying; each holds what it reserves for as long as it serves."""

    autoscaling: WorkerAutoscaling | None = described(None, "Bounds within which replicas follow their busy time.")
    num_gpus: float | None = described(
        None,
        "GPUs that a replica reserves: 1, a share of one, or 0; for targets of several GPUs, "
        "engine.tensor_parallel_size. Unset: as many where models.device and the GPUs that Ray has allow it, targets "
        "first, else 0.",
        ge=0,
        le=MOST_RANKS,
    )
    threads: int | None = described(None, "Threads of a replica. Unset: num_cpus if 1 or more, else a share.", ge=1)
    kv_memory: ByteSize | None = described(None, "Memory for KV of each replica; overrides engine.kv_memory.", ge=1)
    drain_seconds: float = described(60.0, "Time in which a departing replica hands over sequences.", ge=1, le=86400)
    environment: dict[str, str] = described({}, "Environment variables of the replicas.")

    @property
    def is_placed(self) -> bool:
        """Whether anything says how many replicas there are, or where they run."""
        default = WorkerGroup()
        return any(getattr(self, name) != getattr(default, name) for name in (*Scaled.model_fields, "num_gpus"))


class TargetGroup(WorkerGroup):
    """The group of target replicas."""

    autoscaling: TargetAutoscaling | None = described(None, "Bounds within which replicas follow the sequences.")


class Groups(Section):
    """The two groups of workers, and the cells."""

    cells: int = described(
        1,
        "Number of cells. Each has a scheduler and the groups below for itself; gateways spread requests over the "
        "cells, and those of a cell that is lost go on in another.",
        ge=1,
        le=256,
    )
    draft: WorkerGroup = described(
        WorkerGroup(),
        "The draft workers. With `models.draft_in: auto` there are some if fields here set their number or place, if "
        "targets have several ranks, or if there are GPUs for them beside all targets.",
    )
    target: TargetGroup = described(TargetGroup(), "The replicas that verify them.")

    @property
    def cell_numbers(self) -> range:
        return range(1, self.cells + 1)
