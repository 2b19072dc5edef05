"""The settings of `spool bench offline`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

import typer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bench.offline.grid import GridPoint, System, grid_points
from deploy.options import (
    NO_DRAFT,
    Dtype,
    EngineOptions,
    ModelSettings,
    RunSettings,
    SamplingSettings,
    SchedulingSettings,
    WorkerSettings,
)
from engine.cpu.isa import AUTO, CPU_ISAS


class BenchOfflineSettings(BaseModel):
    """Options that `spool generate` has as well mean the same; several of them can be repeated here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Annotated[str, typer.Option(help="Target model: `demo`, a folder or a hub id.")] = "demo"
    draft: Annotated[
        list[str],
        typer.Option(
            help="Draft: `demo`, a folder, a hub id or `ngram`; repeat for several, each with a target of its own.",
            show_default="demo for the demo target, else ngram",
        ),
    ] = Field(default_factory=list)
    policy: Annotated[
        list[System],
        Field(min_length=1),
        typer.Option(help="plain, eqspec, exspec, ragged or auto; repeat for several.", metavar="POLICY"),
    ] = Field(default_factory=lambda: [System.PLAIN, System.AUTO])
    peer: Annotated[
        list[System],
        typer.Option(help="Other systems: transformers, vllm, vllm-draft, vllm-ngram; repeat.", metavar="SYSTEM"),
    ] = Field(default_factory=list)
    vllm_python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM.")] = None
    batch_size: Annotated[list[int], Field(min_length=1), typer.Option(help="Rows of one batch; repeat.")] = Field(
        default_factory=lambda: [1, 8]
    )
    draft_length: Annotated[
        list[int], Field(min_length=1), typer.Option(help="Tokens proposed per round; repeat for several.")
    ] = Field(default_factory=lambda: [4])
    max_running_batches: Annotated[
        int | None,
        Field(ge=1),
        typer.Option(help="Batches of sequences worked on at a time.", show_default="48 sequences or four batches"),
    ] = None
    dtype: Annotated[Dtype, typer.Option(help="dtype of weights and KV.")] = Dtype.BFLOAT16
    peer_dtype: Annotated[
        Dtype | None, typer.Option(help="The same for other systems.", show_default="as for Spool")
    ] = None
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:N`.")] = "auto"
    cpu_isa: Annotated[
        str,
        typer.Option(
            help=f"Limit of the instruction set, also for torch and oneDNN of other systems: {', '.join(CPU_ISAS)}."
        ),
    ] = AUTO
    exact: Annotated[bool, typer.Option("--exact/--no-exact", help="Exact mode.")] = True
    threads: Annotated[
        int | None, Field(ge=1, le=1024), typer.Option(help="Threads of each worker and peer.", show_default="all")
    ] = None
    sampling: SamplingSettings = SamplingSettings()
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines as for `spool generate`.", show_default="a few built-in ones")
    ] = None
    count: Annotated[int | None, Field(ge=1), typer.Option(help="Take N evenly spaced ones.", show_default="all")] = (
        None
    )
    repeats: Annotated[int, Field(ge=1, le=1000), typer.Option(help="Measurements of each cell.")] = 3
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file for the result.")] = Path(
        "bench-offline.json"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, systems, wanted in (("policy", self.policy, True), ("peer", self.peer, False)):
            for system in systems:
                if system.is_spool is not wanted:
                    allowed = ", ".join(one.value for one in System if one.is_spool is wanted)
                    raise ValueError(f"{name} is {system.value}, must be one of {allowed}")
        if self.peer and self.sampling.temperature > 0:
            raise ValueError(
                f"temperature is {self.sampling.temperature}, must be 0 with --peer: others draw other random numbers"
            )
        for length in self.draft_length:
            if not 1 <= length <= 64:
                raise ValueError(f"draft_length is {length}, must be between 1 and 64")
        for point in self.points:
            self.run_settings(point)
        return self

    @property
    def drafts(self) -> list[str]:
        return list(dict.fromkeys(self.draft or [ModelSettings(target=self.target).draft_name]))

    @property
    def points(self) -> list[GridPoint]:
        return grid_points([*self.policy, *self.peer], self.batch_size, self.drafts, self.draft_length)

    @property
    def threads_per_process(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    def run_settings(self, point: GridPoint) -> RunSettings:
        """The settings with which `spool generate` would decode as this cell says."""
        batches = self.max_running_batches
        return RunSettings(
            models=ModelSettings(
                target=self.target,
                draft=point.draft or NO_DRAFT,
                dtype=self.dtype,
                device=self.device,
                exact=self.exact,
            ),
            workers=WorkerSettings(threads=self.threads_per_process),
            engine=EngineOptions(cpu_isa=self.cpu_isa),
            scheduling=SchedulingSettings(
                batch_size=point.batch_size,
                max_running=None if batches is None else batches * point.batch_size,
                draft_length=point.draft_length,
            ),
            sampling=self.sampling,
        )
