"""The settings of `spool bench offline`."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Self

import typer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bench.offline.grid import GridPoint, System
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


def without_place(argument: str) -> str:
    """An absolute path without its folders: where files lie on one machine is no part of a result."""
    return os.path.basename(argument.rstrip("/")) if os.path.isabs(argument) else argument


class Exactness(Enum):
    ON = "on"
    OFF = "off"


class Peer(Enum):
    """Other systems, measured in the same run."""

    TRANSFORMERS = "transformers"
    ASSISTED = "assisted"
    VLLM = "vllm"
    VLLM_DRAFT = "vllm-draft"
    VLLM_NGRAM = "vllm-ngram"


_SPOOL = (System.PLAIN, System.EQSPEC, System.EXSPEC, System.RAGGED, System.AUTO)


# Between a draft model and the least match of prompt lookup beside it.
_LOOKUP = "+lookup="


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BenchModels(_Frozen):
    """What computes. As in `spool generate`, but with several drafts."""

    target: Annotated[str, typer.Option(help="Target model: `demo`, a folder or a hub id.")] = "demo"
    draft: Annotated[
        list[str],
        typer.Option(
            help="Draft: `demo`, a folder, a hub id or `ngram`; a model with prompt lookup as `demo+lookup=3` "
            "(see --draft-lookup of `spool generate`); repeat for several.",
            show_default="demo for the demo target, else ngram",
        ),
    ] = Field(default_factory=list)
    dtype: Annotated[Dtype, typer.Option(help="Number format of weights and KV.")] = Dtype.BFLOAT16
    peer_dtype: Annotated[
        Dtype | None, typer.Option(help="The same for other systems.", show_default="as for Spool")
    ] = None
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:N`.")] = "auto"
    cpu_isa: Annotated[
        str,
        typer.Option(
            help=f"Limit of the instruction set, also for torch and oneDNN of other systems: {', '.join(CPU_ISAS)}.",
            show_default="SPOOL_CPU_ISA, or auto",
        ),
    ] = AUTO
    exact: Annotated[list[Exactness], Field(min_length=1), typer.Option(help="Calibrated shapes; repeat for both.")] = (
        Field(default_factory=lambda: [Exactness.ON])
    )
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024),
        typer.Option(help="Threads of each worker that speculates.", show_default="cores shared out evenly"),
    ] = None
    plain_threads: Annotated[
        int | None,
        Field(ge=1, le=1024),
        typer.Option(help="Threads of plain decoding, and of other systems.", show_default="all cores"),
    ] = None
    draft_workers: Annotated[int, Field(ge=1, le=256), typer.Option(help="Draft worker processes.")] = 1
    target_workers: Annotated[int, Field(ge=1, le=256), typer.Option(help="Target worker processes.")] = 1


class GridSettings(_Frozen):
    """What is varied."""

    policy: Annotated[
        list[System],
        Field(min_length=1),
        typer.Option(help="plain, eqspec, exspec, ragged or auto; repeat for several.", metavar="POLICY"),
    ] = Field(default_factory=lambda: [System.PLAIN, System.AUTO])
    batch_size: Annotated[list[int], Field(min_length=1), typer.Option(help="Rows of one batch; repeat.")] = Field(
        default_factory=lambda: [1, 8]
    )
    draft_length: Annotated[
        list[int], Field(min_length=1), typer.Option(help="Tokens proposed per round; repeat for several.")
    ] = Field(default_factory=lambda: [4])
    max_running: Annotated[
        int | None, Field(ge=1), typer.Option(help="Sequences worked on.", show_default="48, at least four batches")
    ] = None
    max_running_batches: Annotated[
        int | None, Field(ge=1), typer.Option(help="The same in batches; 1 keeps no more sequences than rows.")
    ] = None
    draft_ahead: Annotated[
        int,
        Field(ge=0, le=256),
        typer.Option(help="Outcomes of a verification that an idle draft model prepares for; 0: none."),
    ] = 0
    by_category: Annotated[bool, typer.Option("--by-category", help="Also measure each category on its own.")] = False
    repeats: Annotated[int, Field(ge=1, le=1000), typer.Option(help="Times that each cell is measured.")] = 3

    @model_validator(mode="after")
    def _check(self) -> Self:
        for system in self.policy:
            if system not in _SPOOL:
                raise ValueError(
                    f"policy is {system.value}, must be one of {', '.join(each.value for each in _SPOOL)}; "
                    "other systems are --peer"
                )
        if self.max_running is not None and self.max_running_batches is not None:
            raise ValueError("max_running and max_running_batches are both given, must be one of them")
        for batch_size in self.batch_size:
            for draft_length in self.draft_length:
                if not 1 <= draft_length <= 64:
                    raise ValueError(f"draft_length is {draft_length}, must be between 1 and 64")
                self.scheduling(batch_size, draft_length)
        return self

    def scheduling(self, batch_size: int, draft_length: int) -> SchedulingSettings:
        """Raises ValueError naming field, value and limit."""
        max_running = (
            self.max_running_batches * batch_size if self.max_running_batches is not None else self.max_running
        )
        return SchedulingSettings(batch_size=batch_size, max_running=max_running, draft_length=draft_length)


class BenchInputs(_Frozen):
    """What is decoded."""

    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines as for `spool generate`.", show_default="a few built-in ones")
    ] = None
    count: Annotated[int | None, Field(ge=1), typer.Option(help="Take N evenly spaced ones.", show_default="all")] = (
        None
    )
    category: Annotated[list[str], typer.Option(help="Take lines with this `category`; repeat.")] = Field(
        default_factory=list
    )
    limit_characters: Annotated[int | None, Field(ge=1), typer.Option(help="Cut texts to so many characters.")] = None


class BenchOfflineSettings(_Frozen):
    """`spool bench offline`."""

    models: BenchModels = BenchModels()
    grid: GridSettings = GridSettings()
    inputs: BenchInputs = BenchInputs()
    sampling: SamplingSettings = SamplingSettings()
    peer: Annotated[
        list[Peer], typer.Option(help="Other systems: transformers, assisted, vllm, vllm-draft, vllm-ngram; repeat.")
    ] = Field(default_factory=list)
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM.", show_default="vLLM is left out")
    ] = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON file; what it holds already is not measured again.")
    ] = Path("bench-offline.json")
    trace: Annotated[
        Path | None, typer.Option(help="Chrome trace of the last cell's steps (chrome://tracing, ui.perfetto.dev).")
    ] = None
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.peer and self.sampling.temperature > 0:
            raise ValueError(
                f"temperature is {self.sampling.temperature}, must be 0 with --peer: others draw other random numbers"
            )
        if self.peer and not self.drafts and {Peer.ASSISTED, Peer.VLLM_DRAFT} & set(self.peer):
            raise ValueError("peer holds assisted or vllm-draft, which need a --draft that is a model")
        for draft in self.drafts.values():
            self.model_settings(draft)
        return self

    @property
    def drafts(self) -> dict[str, str]:
        """Each draft by the name it has in results, in the order given. Raises ValueError for two with one name."""
        found: dict[str, str] = {}
        for draft in self.models.draft or [ModelSettings(target=self.models.target).draft_name]:
            if found.setdefault(without_place(draft), draft) != draft:
                raise ValueError(f"draft holds {found[without_place(draft)]} and {draft}, must differ in their names")
        return found

    def run_settings(self, point: GridPoint) -> RunSettings:
        """What `spool generate` would be told to decode as this cell of the grid says.

        Plain decoding has one worker where speculation has several, so on a CPU it gets all threads.
        """
        models = self.models
        return RunSettings(
            models=self.model_settings(self.drafts[point.draft] if point.draft else NO_DRAFT, exact=bool(point.exact)),
            workers=WorkerSettings(
                draft_replicas=models.draft_workers,
                target_replicas=models.target_workers,
                threads=models.threads if point.draft else self.plain_threads,
            ),
            engine=EngineOptions(cpu_isa=models.cpu_isa),
            scheduling=self.grid.scheduling(point.batch_size, point.draft_length),
            sampling=self.sampling,
        )

    def model_settings(self, draft: str, exact: bool = True) -> ModelSettings:
        """With one of the drafts asked for. Raises ValueError naming field, value and limit."""
        name, plus, length = draft.partition(_LOOKUP)
        if plus and not length.isdecimal():
            raise ValueError(f"draft is {draft!r}, must hold a number of tokens after {_LOOKUP}")
        models = self.models
        return ModelSettings(
            target=models.target,
            draft=name,
            draft_lookup=int(length) if plus else 0,
            dtype=models.dtype,
            device=models.device,
            exact=exact,
        )

    @property
    def plain_threads(self) -> int:
        cores = len(os.sched_getaffinity(0))
        return self.models.plain_threads or max(1, cores // self.models.target_workers)
