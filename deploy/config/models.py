"""What workers load, and how their engines compute it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ByteSize, field_validator

from spool.deploy.config.section import Section, described
from spool.deploy.errors import UsageError
from spool.engine.cpu.isa import AUTO, CPU_ISAS, ISA_VARIABLE
from spool.engine.drafting.lookup.text_store import MOST_SCOPES, TOKEN_BYTES
from spool.engine.models.drafting_head import is_drafting_head
from spool.engine.settings import (
    BATCHED_TOKENS_ON_CPU,
    BATCHED_TOKENS_ON_GPU,
    LEAST_LOOKUP_MEMORY,
    LONGEST_LOOKUP_MATCH,
    LOOKUP_MEMORY,
    MOST_LOOKUP_MEMORY,
    MOST_RANKS,
    EngineSettings,
)
from spool.scheduler.messages import Role
from spool.services.gateway.settings import NodeFile

DEMO = "demo"
NGRAM = "ngram"
NO_DRAFT = "none"

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KvCacheDtype = Literal["auto", "int8"]
Quantization = Literal["auto", "none", "int8", "int4"]
Device = Literal["auto", "cpu", "cuda"]

# What was best with the demo pair (docs/performance.md).
_DEMO_LOOKUP = 2
# A single token that stood before is seldom followed by the same again, less often than pays for a row of a full batch.
_NGRAM_LOOKUP = 2


class ModelsSection(Section):
    """The models, their dtype and quantisation, and their name in the APIs."""

    target: Annotated[str, typer.Argument(metavar="MODEL")] = described(
        DEMO, "The model, called target: `demo`, a folder, a GGUF file or a hub id."
    )
    draft: str | None = described(
        None,
        "Draft: `demo` (for the demo target a head, in draft workers a model), a folder, a GGUF file, a hub id, `mtp` "
        "(the target's MTP layer), `ngram` (prompt lookup) or `none`. Unset: demo for the demo target, else ngram.",
    )
    draft_kind: Literal["auto", "model", "head"] = described(
        "auto", "`head`: a drafting head, which runs in the targets; `auto`: as a config.json here says."
    )
    draft_in: Literal["auto", "workers", "targets"] = described(
        "auto",
        "Where a draft model runs: in draft `workers`, or in the workers of `targets`. `auto`: in targets if it shares "
        "their device.",
    )
    draft_ahead: Literal["auto", "always", "never"] = described(
        "auto",
        "Whether draft workers propose for likely verdicts while targets verify. `auto`: if they have a GPU to "
        "themselves.",
    )
    draft_lookup: int | None = described(
        None,
        "Prompt lookup in addition to the draft: if at least this many of the last tokens occurred earlier in the "
        "sequence, the tokens that followed there are proposed, and in targets what followed in other texts "
        f"(`engine.lookup_memory`). 0: off. Unset: {_DEMO_LOOKUP} with the demo draft, "
        "else 0.",
        ge=0,
        le=LONGEST_LOOKUP_MATCH,
    )
    dtype: Dtype = described("auto", "dtype of weights and KV; `auto`: the checkpoint's if the device suits it.")
    kv_cache_dtype: KvCacheDtype = described(
        "auto", "KV in dtype (`auto`), or in 8 bits with a scale for each position and KV head."
    )
    quantization: Quantization = described(
        "auto", "Weights: as the checkpoint has them, expanded to dtype (`none`), or those of a plain one rounded."
    )
    device: Device = described("auto", "`cpu`, `cuda`, or `auto`: GPUs for the groups that get some, else the CPU.")
    chat_template: Annotated[NodeFile | None, typer.Option(parser=Path, metavar="FILE")] = described(
        None, "File with a chat template, Jinja, in place of the target's own; on every node of a gateway."
    )
    exact: bool = described(True, "Logits are bit-equal whatever the batch.")
    ignore_tensors: tuple[str, ...] = described(
        (),
        "Tensors of the models' files, and keys of GGUF files, that may be left out although nothing says that they "
        "change no token; names, or patterns such as `model.vision.*`.",
    )
    served_model_name: str | None = described(None, "Name in the APIs. Unset: models.target.", min_length=1)

    def problems(self) -> Iterator[str]:
        for name in ("target", "draft"):
            if getattr(self, name) == "":
                yield f"{name} is empty, must name a model"
        if self.target in (NGRAM, NO_DRAFT):
            yield f"target is {self.target!r}, must be a model: that is a way to draft"
        if self.draft_kind == "head" and self.draft_name in (NGRAM, NO_DRAFT):
            yield f"draft_kind is head, must be auto where draft is {self.draft_name}"
        elif self.draft_lookup and self.draft_name in (NGRAM, NO_DRAFT):
            yield f"draft_lookup is {self.draft_lookup}, must be unset where draft is {self.draft_name}"

    def template_text(self) -> str | None:
        """The text of `chat_template`. Raises UsageError."""
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"models.chat_template is {self.chat_template}: {reason}") from error

    @property
    def draft_name(self) -> str:
        return self.draft if self.draft is not None else DEMO if self.target == DEMO else NGRAM

    @property
    def drafts(self) -> bool:
        return self.draft_name != NO_DRAFT

    @property
    def lookup_match(self) -> int | None:
        """Of the engine that looks up; None: no lookup."""
        if self.draft_lookup is None:
            return {DEMO: _DEMO_LOOKUP, NGRAM: _NGRAM_LOOKUP}.get(self.draft_name)
        return self.draft_lookup or None

    @property
    def drafts_with_head(self) -> bool:
        """Whether the draft is a drafting head, which runs in the targets' workers. The demo's draft is one, too, where
        it has no workers: `SpoolConfig.draft_head`."""
        if self.draft_kind != "auto":
            return self.draft_kind == "head"
        return self.draft_name not in (DEMO, NGRAM, NO_DRAFT) and is_drafting_head(self.draft_name)

    @property
    def drafts_with_model(self) -> bool:
        return self.draft_name not in (NGRAM, NO_DRAFT) and not self.drafts_with_head


class EngineSection(Section):
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
    numerics: Literal["auto", "universal"] = described(
        "auto",
        "`universal`: targets on a CPU compute the same bits on every processor, also with weights in 16 bits, or are "
        "refused. `auto`: with quantised weights.",
    )
    kv_memory: Annotated[ByteSize | None, typer.Option(parser=str, metavar="SIZE")] = described(
        None,
        "Memory for KV of each worker, such as `2GiB`. Unset: what gpu_memory_utilization leaves, 1 GiB on a CPU.",
        ge=1,
    )
    gpu_memory_utilization: float = described(0.9, "Share of a GPU's memory that its workers may take.", gt=0, le=1)
    max_num_batched_tokens: int | None = described(
        None,
        f"Tokens of one forward pass, at most. Unset: {BATCHED_TOKENS_ON_GPU} on a GPU, else {BATCHED_TOKENS_ON_CPU}.",
        ge=8,
        le=65536,
    )
    lookup_memory: ByteSize | None = described(
        None,
        "Memory of each target for earlier prompts and outputs of the same API key and `cache_salt`, in which prompt "
        f"lookup looks, too. Each of up to {MOST_SCOPES} such pairs has an equal part; a token takes {TOKEN_BYTES} "
        f"bytes. 0: none. Unset: {LOOKUP_MEMORY >> 20} MiB.",
        ge=0,
        le=MOST_LOOKUP_MEMORY,
    )
    prefix_cache: bool = described(True, "Compute the KV of a common prompt prefix once, for later requests too.")
    cuda_graphs: bool = described(True, "On a GPU, compute passes of few tokens as CUDA graphs.")

    @field_validator("lookup_memory")
    @classmethod
    def _check_lookup_memory(cls, value: ByteSize | None) -> ByteSize | None:
        if value and value < LEAST_LOOKUP_MEMORY:
            raise ValueError(f"lookup_memory is {value}, must be 0 or at least {LEAST_LOOKUP_MEMORY}")
        return value

    @field_validator("cpu_isa")
    @classmethod
    def _check_isa(cls, value: str) -> str:
        if value not in CPU_ISAS:
            raise ValueError(f"cpu_isa is {value!r}, must be one of {', '.join(CPU_ISAS)}")
        return value

    def ranks(self, role: Role) -> int:
        """Processes that make up one worker."""
        return self.tensor_parallel_size if role is Role.TARGET else 1

    def for_worker(
        self,
        models: ModelsSection,
        role: Role,
        device: str,
        threads: int,
        kv_memory: int | None,
        draft_head: str | None,
    ) -> EngineSettings:
        """Settings of a worker's engine that loads one of `models`."""
        is_draft = role is Role.DRAFT
        settings = self.model_dump(exclude={"kv_memory", "tensor_parallel_size"}) | {
            "kv_memory_bytes": kv_memory,
            "lookup_memory": LOOKUP_MEMORY if self.lookup_memory is None else self.lookup_memory,
            "model": models.draft_name if is_draft else models.target,
            "dtype": models.dtype,
            "kv_cache_dtype": models.kv_cache_dtype,
            "quantization": models.quantization,
            "device": device,
            "threads": threads,
            "exact": models.exact,
            "target": models.target if is_draft else None,
            "ignore_tensors": models.ignore_tensors,
            "draft_head": None if is_draft else draft_head,
            "draft_ahead": models.draft_ahead,
            "tensor_parallel_size": self.ranks(role),
        }
        return EngineSettings(**settings)
