"""Settings of the commands that decode without a server, in addition to those of models and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from spool.deploy.config.loading import GivenValue, load_configuration
from spool.deploy.config.models import DEMO, NO_DRAFT, Device
from spool.deploy.config.section import Section, described
from spool.deploy.config.spool_config import SpoolConfig
from spool.scheduler.sampling import MAX_SEED, SamplingParameters


class SamplingSettings(Section):
    """How tokens are sampled."""

    max_tokens: int = described(128, "Maximum number of tokens generated per prompt.", ge=1)
    temperature: float = described(0.0, "0 is greedy.")
    top_k: int = described(0, "Sample from the k most likely tokens; 0 keeps all.")
    top_p: float = described(1.0, "Keep the most likely tokens that make up this probability; 0 is greedy.")
    min_p: float = described(0.0, "Keep tokens at least this likely, relative to the likeliest.")
    seed: int = described(0, "Seed of the first prompt; prompt i uses seed + i.")

    def problems(self) -> Iterator[str]:
        self.parameters(0)
        return iter(())

    def parameters(self, index: int) -> SamplingParameters:
        """For the prompt with this index. Raises ValueError naming field, value and limit."""
        seed = (self.seed + index) % (MAX_SEED + 1) if index else self.seed
        return SamplingParameters.given(**self.model_dump(exclude={"max_tokens"}) | {"seed": seed})


class InputSettings(Section):
    """What is generated from, and what is printed of it."""

    prompts: Path | None = described(
        None, "JSON lines with `prompt` (text), `messages` (chat) or `turns` (the first is used). Unset: built-in ones."
    )
    limit: int | None = described(None, "Use only the first N prompts.", ge=1)
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False


class ReplaySettings(Section):
    """`spool replay`."""

    receipts: Annotated[
        list[Path],
        Field(min_length=1),
        typer.Argument(metavar="FILE...", help="Receipts, or answers that have some: one in a file, or one a line."),
    ] = Field(default_factory=list)
    target: str = described(DEMO, "The model that answered: `demo`, a folder, a GGUF file or a hub id.")
    device: Device = described("auto", "`auto`, `cpu` or `cuda`.")
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


def configured(given: Sequence[GivenValue], compares: bool = False) -> SpoolConfig:
    """The configuration of a run. Raises ConfigurationError.

    Where it `compares`, the same prompts are decoded again and must find no KV and no texts of the time before.
    """
    kept = {"prefix_cache": False, "lookup_memory": 0}
    anew = [GivenValue(("engine", name), value, "") for name, value in kept.items()] if compares else []
    config = load_configuration(None, given=[*given, *anew])
    if not config.scheduling.draft_length:
        models = config.models.model_copy(update={"draft": NO_DRAFT})
        config = config.model_copy(update={"models": models})
    return config.on_one_machine()
