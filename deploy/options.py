"""The settings of the commands: what each may be, its default and its help, in one place."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from deploy.config.section import described
from engine.cpu.isa import AUTO, CPU_ISAS, ISA_VARIABLE
from engine.models.drafting_head import is_drafting_head
from engine.settings import (
    BATCHED_TOKENS_ON_CPU,
    BATCHED_TOKENS_ON_GPU,
    LONGEST_LOOKUP_MATCH,
    MOST_RANKS,
    EngineSettings,
)
from scheduler.config import MOST_RUNNING, Policy, SchedulerConfig
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


class KvCacheDtype(Enum):
    AUTO = "auto"
    INT8 = "int8"


class Quantization(Enum):
    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class DraftKind(Enum):
    AUTO = "auto"
    MODEL = "model"
    HEAD = "head"


class Reference(Enum):
    GENERATE = "generate"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# What was best with the demo pair (docs/performance.md).
_DEMO_LOOKUP = 2


class ModelSettings(_Frozen):
    """The models, their dtype and quantisation."""

    target: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="The model, called target: `demo`, a folder, a GGUF file or a hub id."),
    ] = DEMO
    draft: str | None = described(
        None,
        "Draft model: `demo`, a folder, a GGUF file, a hub id, `mtp` (the target's MTP layer), `ngram` (prompt lookup) "
        "or `none`. Unset: demo for the demo target, else ngram.",
    )
    draft_kind: DraftKind = described(
        DraftKind.AUTO, "`head`: an EAGLE-3 head, which runs in the targets; `auto`: as a config.json here says."
    )
    draft_lookup: int | None = described(
        None,
        "Prompt lookup in addition to the draft model: if at least this many of the last tokens occurred earlier in "
        f"the sequence, the tokens that followed there are proposed. 0: off. Unset: {_DEMO_LOOKUP} with the demo "
        "draft, else 0.",
        ge=0,
        le=LONGEST_LOOKUP_MATCH,
    )
    dtype: Dtype = described(Dtype.AUTO, "dtype of weights and KV; `auto`: the checkpoint's if the device suits it.")
    kv_cache_dtype: KvCacheDtype = described(
        KvCacheDtype.AUTO, "KV in dtype (`auto`), or in 8 bits with a scale for each position and KV head."
    )
    quantization: Quantization = described(
        Quantization.AUTO,
        "Weights: as the checkpoint has them, expanded to dtype (`none`), or those of a plain one rounded.",
    )
    device: str = described("auto", "`auto`, `cpu`, `cuda` or `cuda:N`; workers are spread over GPUs.")
    exact: bool = described(True, "Logits are bit-equal whatever the batch, by calibrated shapes.")

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.draft_kind is DraftKind.HEAD and self.draft_name in (DEMO, NGRAM, NO_DRAFT):
            raise ValueError(f"draft_kind is head, must be auto where draft is {self.draft_name}")
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
    def drafts_with_head(self) -> bool:
        """Whether the draft is a drafting head, so that the targets propose, and there are no draft workers."""
        if self.draft_kind is not DraftKind.AUTO:
            return self.draft_kind is DraftKind.HEAD
        return self.draft_name not in (DEMO, NGRAM, NO_DRAFT) and is_drafting_head(self.draft_name)

    @property
    def drafts_with_model(self) -> bool:
        return self.draft_name not in (NGRAM, NO_DRAFT) and not self.drafts_with_head

    def head_conflict(self, draft_replicas: str | None, ranks: int) -> str | None:
        """Why the workers cannot be as asked for, since the draft is a head; `draft_replicas`: what asks for some."""
        if not self.drafts_with_head:
            return None
        if draft_replicas is not None:
            return (
                f"{draft_replicas}, must be unset: the draft {self.draft_name} is a drafting head, which runs in the "
                "target's workers and cannot be a draft worker"
            )
        if ranks > 1:
            return f"tensor_parallel_size is {ranks}, must be 1: the head {self.draft_name} runs beside a whole target"
        return None


class WorkerSettings(_Frozen):
    """How many workers, and their share of the machine."""

    draft_replicas: int = described(1, "Draft workers.", ge=1, le=256)
    target_replicas: int = described(1, "Target workers.", ge=1, le=256)
    threads: int | None = described(None, "Threads of each worker. Unset: a share of the cores.", ge=1, le=1024)


class EngineOptions(_Frozen):
    """How engines use memory and form their passes."""

    max_model_len: int | None = described(
        None, "Maximum number of tokens of a sequence, prompt and output together. Unset: the model's own.", ge=1
    )
    tensor_parallel_size: int = described(
        1,
        "GPUs of one machine, or processes on its CPU, that compute one copy of the target together.",
        ge=1,
        le=MOST_RANKS,
    )
    cpu_isa: str = described(
        AUTO,
        f"Limit of a CPU's instruction set: {', '.join(CPU_ISAS)}. `auto`: that of `{ISA_VARIABLE}`, else the fastest.",
    )
    page_size: int = described(16, "Tokens of one KV page.", ge=1, le=1024)
    kv_pages: int | None = described(None, "Pages of KV of each worker. Unset: as kv_memory says.", ge=1)
    kv_memory: Annotated[
        ByteSize | None,
        Field(ge=1),
        typer.Option(
            help="Memory for KV of each worker, such as `2GiB`.",
            parser=str,
            metavar="SIZE",
            show_default="what gpu_memory_utilization leaves, 1 GiB on a CPU",
        ),
    ] = None
    gpu_memory_utilization: float = described(0.9, "Share of a GPU's memory that its workers may take.", gt=0, le=1)
    max_num_batched_tokens: int | None = described(
        None,
        f"Tokens of one forward pass, at most. Unset: {BATCHED_TOKENS_ON_GPU} on a GPU, else {BATCHED_TOKENS_ON_CPU}.",
        ge=8,
        le=65536,
    )
    prefix_cache: bool = described(True, "Compute the KV of a common prompt prefix once, for later requests too.")
    cuda_graphs: bool = described(True, "On a GPU, compute passes of few tokens as CUDA graphs.")

    @field_validator("cpu_isa")
    @classmethod
    def _check_isa(cls, value: str) -> str:
        if value not in CPU_ISAS:
            raise ValueError(f"cpu_isa is {value!r}, must be one of {', '.join(CPU_ISAS)}")
        return value

    def ranks(self, role: Role) -> int:
        """Processes that make up one worker."""
        return self.tensor_parallel_size if role is Role.TARGET else 1

    def for_worker(self, models: ModelSettings, role: Role, device: str, threads: int, **own: Any) -> EngineSettings:
        """Settings of a worker's engine that loads one of `models`: these, and its `own`, which replace some."""
        is_draft = role is Role.DRAFT
        common = self.model_dump(exclude={"kv_memory", "tensor_parallel_size"}) | {
            "kv_memory_bytes": None if self.kv_memory is None else int(self.kv_memory),
            "model": models.draft_name if is_draft else models.target,
            "dtype": models.dtype.value,
            "kv_cache_dtype": models.kv_cache_dtype.value,
            "quantization": models.quantization.value,
            "device": device,
            "threads": threads,
            "exact": models.exact,
            "lookup_match": models.lookup_match if is_draft else None,
            "target": models.target if is_draft else None,
            "draft_head": models.draft_name if not is_draft and models.drafts_with_head else None,
            "tensor_parallel_size": self.ranks(role),
        }
        return EngineSettings(**common | own)


# More rows rarely have one length.
_EQUAL_ROWS = 8
_FEWEST_RUNNING = 48


class SchedulingSettings(_Frozen):
    """How sequences are grouped."""

    batch_size: int | None = described(
        None,
        f"Rows of one verify batch. Unset: {_EQUAL_ROWS} with the policies `eqspec` and `exspec`, with others all that "
        "run.",
    )
    max_running: int | None = described(
        None,
        "Sequences worked on at a time, for each target. Unset: a quarter of its `max_num_batched_tokens`, at most "
        f"{MOST_RUNNING}; with `batch_size`, four batches or {_FEWEST_RUNNING}.",
    )
    draft_length: int = described(4, "Tokens proposed per round; 0 decodes plainly.", le=64)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config(Policy.AUTO, drafting=True)
        if self.max_running is not None and self.batch_size is not None and self.max_running < self.batch_size:
            raise ValueError(
                f"max_running is {self.max_running}, must be at least batch_size, which is {self.batch_size}"
            )
        return self

    def config(self, policy: Policy, drafting: bool) -> SchedulerConfig:
        running = self.max_running
        if running is None and self.batch_size is not None:
            running = max(_FEWEST_RUNNING, 4 * self.batch_size)
        rows = MOST_RUNNING if running is None else running
        if policy in (Policy.EQSPEC, Policy.EXSPEC):
            rows = min(_EQUAL_ROWS, rows)
        return SchedulerConfig(
            batch_size=rows if self.batch_size is None else self.batch_size,
            max_running=running,
            policy=policy,
            draft_length=self.draft_length if drafting else 0,
        )


class SamplingSettings(_Frozen):
    """How tokens are sampled."""

    max_tokens: int = described(128, "Maximum number of tokens generated per prompt.", ge=1)
    temperature: float = described(0.0, "0 is greedy.")
    top_k: int = described(0, "Sample from the k most likely tokens; 0 keeps all.")
    top_p: float = described(1.0, "Keep the most likely tokens that make up this probability.")
    min_p: float = described(0.0, "Keep tokens at least this likely, relative to the likeliest.")
    seed: int = described(0, "Seed of the first prompt; prompt i uses seed + i.")

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

    prompts: Path | None = described(
        None, "JSON lines with `prompt` (text), `messages` (chat) or `turns` (the first is used). Unset: built-in ones."
    )
    limit: int | None = described(None, "Use only the first N prompts.", ge=1)


class RunSettings(_Frozen):
    """Settings that `generate` and `verify` share."""

    models: ModelSettings = ModelSettings()
    workers: WorkerSettings = WorkerSettings()
    engine: EngineOptions = EngineOptions()
    scheduling: SchedulingSettings = SchedulingSettings()
    sampling: SamplingSettings = SamplingSettings()
    inputs: InputSettings = InputSettings()
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False

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
        prefix_cache = self.engine.prefix_cache and self.shares_prefixes
        return self.engine.for_worker(self.models, role, device, self.threads_per_worker(), prefix_cache=prefix_cache)


class GenerateSettings(RunSettings):
    """`spool generate`."""

    policy: Policy = described(Policy.AUTO, "How verify batches are formed.")
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON lines file; answers that it has already are kept.")
    ] = None

    @property
    def shares_prefixes(self) -> bool:
        return True


class VerifySettings(RunSettings):
    """`spool verify`."""

    policy: list[Policy] = described([Policy.AUTO], "How verify batches are formed; repeat for several.", min_length=1)
    reference: Reference | None = described(None, "`generate` also compares with transformers' own model.generate.")

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.reference is not None and self.sampling.temperature > 0:
            raise ValueError(
                f"temperature is {self.sampling.temperature}, must be 0 with --reference generate: "
                "transformers draws other random numbers"
            )
        if self.reference is not None and self.models.quantization in (Quantization.INT8, Quantization.INT4):
            raise ValueError(
                f"quantization is {self.models.quantization.value}, must be auto or none with --reference "
                "generate: transformers does not round weights"
            )
        if self.reference is not None and self.models.kv_cache_dtype is not KvCacheDtype.AUTO:
            raise ValueError(
                f"kv_cache_dtype is {self.models.kv_cache_dtype.value}, must be auto with --reference generate: "
                "transformers does not round KV"
            )
        return self


class ReplaySettings(_Frozen):
    """`spool replay`."""

    receipts: Annotated[
        list[Path],
        Field(min_length=1),
        typer.Argument(metavar="FILE...", help="Receipts, or answers that have some: one in a file, or one a line."),
    ] = Field(default_factory=list)
    target: str = described(DEMO, "The model that answered: `demo`, a folder, a GGUF file or a hub id.")
    device: str = described("auto", "`auto`, `cpu`, `cuda` or `cuda:N`.")
    public_key: str | None = described(
        None,
        "Ed25519 public key that must have signed them, 64 hexadecimal digits. Unset: any, or none.",
        pattern="^[0-9a-f]{64}$",
    )
    against: str | None = described(
        None,
        "Fingerprint of receipts that another target made: compute them all the same, and say where and by how much "
        "this target parts from it.",
        pattern="^fp_[0-9a-f]{16}$",
    )
    logprobs: bool = described(False, "With --json, also give the log probability of every token.")
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False
