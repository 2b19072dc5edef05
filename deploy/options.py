"""The settings of the commands: what each may be, its default and its help, in one place."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from engine.cpu.isa import AUTO, CPU_ISAS, ISA_VARIABLE
from engine.settings import LONGEST_LOOKUP_MATCH, MOST_RANKS, EngineSettings
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from scheduler.sampling import MAX_SEED, SamplingParameters

DEMO = "demo"
NGRAM = "ngram"
NO_DRAFT = "none"


class Dtype(Enum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Reference(Enum):
    GENERATE = "generate"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _option(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, **more)


# What was best with the demo pair (docs/performance.md).
_DEMO_LOOKUP = 2


class ModelSettings(_Frozen):
    """The models and their dtype."""

    target: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model, called target: `demo`, a folder or a hub id.")
    ] = DEMO
    draft: Annotated[
        str | None,
        _option(
            "Draft model: `demo`, a folder, a hub id, `ngram` (prompt lookup) or `none`.",
            show_default="demo for the demo target, else ngram",
        ),
    ] = None
    draft_lookup: Annotated[
        int | None,
        Field(ge=0, le=LONGEST_LOOKUP_MATCH),
        _option(
            "Prompt lookup in addition to the draft model: if at least this many of the last tokens occurred earlier "
            "in the sequence, the tokens that followed there are proposed. 0: off.",
            show_default=f"{_DEMO_LOOKUP} with the demo draft, else 0",
        ),
    ] = None
    dtype: Annotated[
        Dtype, _option("dtype of weights and KV; `auto`: the checkpoint's own where the device computes it well.")
    ] = Dtype.AUTO
    device: Annotated[str, _option("`auto`, `cpu`, `cuda` or `cuda:N`; workers are spread over GPUs.")] = "auto"
    exact: Annotated[
        bool, _option("Logits are bit-equal whatever the batch, by calibrated shapes.", "--exact/--no-exact")
    ] = True

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.draft_lookup and not self.drafts_with_model:
            raise ValueError(f"draft_lookup is {self.draft_lookup}, must be unset where draft is {self.draft_name}")
        return self

    @property
    def draft_name(self) -> str:
        return self.draft if self.draft is not None else DEMO if self.target == DEMO else NGRAM

    @property
    def lookup_match(self) -> int | None:
        """The setting of the draft's engine; None: no lookup."""
        if self.draft_lookup is None:
            return _DEMO_LOOKUP if self.draft_name == DEMO else None
        return self.draft_lookup or None

    @property
    def drafts_with_model(self) -> bool:
        return self.draft_name not in (NGRAM, NO_DRAFT)


class WorkerSettings(_Frozen):
    """How many workers, and their share of the machine."""

    draft_replicas: Annotated[int, Field(ge=1, le=256), _option("Draft workers.")] = 1
    target_replicas: Annotated[int, Field(ge=1, le=256), _option("Target workers.")] = 1
    threads: Annotated[
        int | None, Field(ge=1, le=1024), _option("Threads of each worker.", show_default="an even share of the cores")
    ] = None


class EngineOptions(_Frozen):
    """How engines use memory and form their passes."""

    max_model_len: Annotated[
        int | None,
        Field(ge=1),
        _option("Maximum number of tokens of a sequence, prompt and output together.", show_default="the model's own"),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Field(ge=1, le=MOST_RANKS),
        _option("GPUs of one machine, or processes on its CPU, that compute one copy of the target together."),
    ] = 1
    cpu_isa: Annotated[
        str,
        _option(
            f"Limit of a CPU's instruction set: {', '.join(CPU_ISAS)}. `auto`: that of `{ISA_VARIABLE}`, else the "
            "fastest."
        ),
    ] = AUTO
    page_size: Annotated[int, Field(ge=1, le=1024), _option("Tokens of one KV page.")] = 16
    kv_pages: Annotated[
        int | None, Field(ge=1), _option("Pages of KV of each worker.", show_default="as kv_memory says")
    ] = None
    kv_memory: Annotated[
        ByteSize | None,
        Field(ge=1),
        _option(
            "Memory for KV of each worker, such as `2GiB`.",
            parser=str,
            metavar="SIZE",
            show_default="what gpu_memory_utilization leaves, 1 GiB on a CPU",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Field(gt=0, le=1),
        _option("Share of a GPU's memory that its workers may take together: weights, workspaces and KV."),
    ] = 0.9
    max_num_batched_tokens: Annotated[
        int, Field(ge=8, le=65536), _option("Maximum number of tokens in one forward pass.")
    ] = 192
    prefix_cache: Annotated[
        bool,
        _option(
            "Compute the KV of a common prompt prefix once, and keep it for later requests.",
            "--prefix-cache/--no-prefix-cache",
        ),
    ] = True
    cuda_graphs: Annotated[
        bool,
        _option("On a GPU, compute passes of few tokens as CUDA graphs.", "--cuda-graphs/--no-cuda-graphs"),
    ] = True

    @field_validator("cpu_isa")
    @classmethod
    def _check_isa(cls, value: str) -> str:
        if value not in CPU_ISAS:
            raise ValueError(f"cpu_isa is {value!r}, must be one of {', '.join(CPU_ISAS)}")
        return value

    def ranks(self, role: Role) -> int:
        """Processes that make up one worker."""
        return self.tensor_parallel_size if role is Role.TARGET else 1

    def for_worker(self, **own: Any) -> EngineSettings:
        """Settings of a worker's engine: these, and its `own`, which may replace some of these."""
        common = self.model_dump(exclude={"kv_memory", "tensor_parallel_size"})
        common["kv_memory_bytes"] = None if self.kv_memory is None else int(self.kv_memory)
        return EngineSettings(**common | own)


class SchedulingSettings(_Frozen):
    """How sequences are grouped."""

    batch_size: Annotated[int, _option("Rows of one verify batch.")] = 8
    max_running: Annotated[
        int | None, _option("Sequences worked on at a time, for each target.", show_default="48, at least four batches")
    ] = None
    draft_length: Annotated[int, Field(le=64), _option("Tokens proposed per round; 0 decodes plainly.")] = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config(Policy.AUTO, drafting=True)
        if self.max_running is not None and self.max_running < self.batch_size:
            raise ValueError(
                f"max_running is {self.max_running}, must be at least batch_size, which is {self.batch_size}"
            )
        return self

    def config(self, policy: Policy, drafting: bool) -> SchedulerConfig:
        return SchedulerConfig(
            batch_size=self.batch_size,
            max_running=max(48, 4 * self.batch_size) if self.max_running is None else self.max_running,
            policy=policy,
            draft_length=self.draft_length if drafting else 0,
        )


class SamplingSettings(_Frozen):
    """How tokens are sampled."""

    max_tokens: Annotated[int, Field(ge=1), _option("Maximum number of tokens generated per prompt.")] = 128
    temperature: Annotated[float, _option("0 is greedy.")] = 0.0
    top_k: Annotated[int, _option("Sample from the k most likely tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, _option("Keep the most likely tokens that make up this probability.")] = 1.0
    min_p: Annotated[float, _option("Keep tokens at least this likely, relative to the likeliest.")] = 0.0
    seed: Annotated[int, _option("Seed of the first prompt; prompt i uses seed + i.")] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.parameters(0)
        return self

    def parameters(self, index: int) -> SamplingParameters:
        """For the prompt with this index. Raises ValueError naming field, value and limit."""
        return SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(self.seed + index) % (MAX_SEED + 1) if index else self.seed,
        )


class InputSettings(_Frozen):
    """What is generated from."""

    prompts: Annotated[
        Path | None,
        _option(
            "JSON lines with `prompt` (raw text), `messages` (chat) or `turns` (the first turn is used).",
            show_default="a few built-in ones",
        ),
    ] = None
    limit: Annotated[int | None, Field(ge=1), _option("Use only the first N prompts.", show_default="all")] = None


class RunSettings(_Frozen):
    """Settings that `generate` and `verify` share."""

    models: ModelSettings = ModelSettings()
    workers: WorkerSettings = WorkerSettings()
    engine: EngineOptions = EngineOptions()
    scheduling: SchedulingSettings = SchedulingSettings()
    sampling: SamplingSettings = SamplingSettings()
    inputs: InputSettings = InputSettings()
    json_output: Annotated[bool, _option("Print one JSON object as the last line of standard output.", "--json")] = (
        False
    )

    @property
    def drafting(self) -> bool:
        return self.models.draft_name != NO_DRAFT and self.scheduling.draft_length > 0

    @property
    def shares_prefixes(self) -> bool:
        """Not where the same prompts are decoded again to compare: then nothing is to be left of the time before."""
        return False

    def threads_per_worker(self) -> int:
        """The configured number, or an even share of the cores of this process; prompt lookup hardly needs any.

        One target and one draft each get all cores: with one batch, a worker computes while the other waits for it.
        """
        if self.workers.threads is not None:
            return self.workers.threads
        busy = self.workers.target_replicas * self.engine.ranks(Role.TARGET)
        if self.drafting and self.models.drafts_with_model and (busy, self.workers.draft_replicas) != (1, 1):
            busy += self.workers.draft_replicas
        return max(1, len(os.sched_getaffinity(0)) // busy)

    def engine_settings(self, role: Role, device: str) -> EngineSettings:
        """For a worker that has a model."""
        models = self.models
        return self.engine.for_worker(
            model=models.target if role is Role.TARGET else models.draft_name,
            dtype=models.dtype.value,
            device=device,
            threads=self.threads_per_worker(),
            exact=models.exact,
            lookup_match=models.lookup_match if role is Role.DRAFT else None,
            tensor_parallel_size=self.engine.ranks(role),
            prefix_cache=self.engine.prefix_cache and self.shares_prefixes,
        )


class GenerateSettings(RunSettings):
    """`spool generate`."""

    policy: Annotated[Policy, _option("How verify batches are formed.")] = Policy.AUTO
    output: Annotated[
        Path | None,
        _option(
            "JSON lines file; answers that it has already are kept.", "--output", "-o", show_default="the terminal"
        ),
    ] = None

    @property
    def shares_prefixes(self) -> bool:
        return True


class VerifySettings(RunSettings):
    """`spool verify`."""

    policy: Annotated[
        list[Policy], Field(min_length=1), _option("How verify batches are formed; repeat for several.")
    ] = Field(default_factory=lambda: [Policy.AUTO])
    reference: Annotated[
        Reference | None, _option("`generate` also compares with transformers' own model.generate.")
    ] = None

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.reference is not None and self.sampling.temperature > 0:
            raise ValueError(
                f"temperature is {self.sampling.temperature}, must be 0 with --reference generate: "
                "transformers draws other random numbers"
            )
        return self
