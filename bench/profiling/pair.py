"""The target and the draft of a configuration, each on cores of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deploy.config.spool_config import SpoolConfig
from deploy.errors import UsageError
from deploy.processes.workers import PlannedWorker, planned_workers
from services.launch.launcher import WorkerLaunch


def check_pair(config: SpoolConfig) -> None:
    """Raises UsageError for a configuration without a draft model, or one that never drafts."""
    models, scheduling = config.models, config.scheduling
    if not models.drafts_with_model:
        raise UsageError(f"models.draft is {models.draft_name!r}, must be a model: it is one of the two to measure")
    if scheduling.draft_length < 1:
        raise UsageError(f"scheduling.draft_length is {scheduling.draft_length}, must be at least 1")


def pair_launches(config: SpoolConfig) -> list[WorkerLaunch]:
    """The target first. They find no prefixes of earlier prompts, so that every step computes what it is sent, and no
    step uses the other's cores. Raises UsageError for a device that is not there."""
    workers = planned_workers(config.without_replicas())
    cores = _cores(workers, sorted(os.sched_getaffinity(0)))
    return [
        WorkerLaunch(
            worker.role,
            {**worker.engine, "prefix_cache": False},
            threads=worker.threads,
            cpus=own,
        )
        for worker, own in zip(workers, cores, strict=True)
    ]


def _cores(workers: Sequence[PlannedWorker], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """One for each thread of workers on a CPU; none named where there are not enough, and for workers on GPUs."""
    wanted = [worker.threads * worker.engine["tensor_parallel_size"] for worker in workers]
    if any(worker.engine["device"] != "cpu" for worker in workers) or sum(wanted) > len(cores):
        return [()] * len(workers)
    ends = [sum(wanted[: place + 1]) for place in range(len(wanted))]
    return [tuple(cores[end - count : end]) for end, count in zip(ends, wanted, strict=True)]
