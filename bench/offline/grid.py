"""What `python -m bench.offline` measures: systems, batch sizes and drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from spool.deploy.config.models import Dtype
from spool.deploy.config.section import Section, described
from spool.scheduler.sampling import SamplingParameters


class System(StrEnum):
    """Spool's policies and other systems."""

    PLAIN = "plain"
    EQSPEC = "eqspec"
    EXSPEC = "exspec"
    RAGGED = "ragged"
    AUTO = "auto"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    VLLM_DRAFT = "vllm-draft"
    VLLM_NGRAM = "vllm-ngram"

    @property
    def plain(self) -> System:
        """Plain decoding by the same software."""
        if self is System.TRANSFORMERS:
            return self
        return System.VLLM if self in (System.VLLM, System.VLLM_DRAFT, System.VLLM_NGRAM) else System.PLAIN

    @property
    def is_spool(self) -> bool:
        return self.plain is System.PLAIN

    @property
    def drafts(self) -> bool:
        return self is not self.plain


class BenchSettings(Section):
    """What is measured."""

    policy: Annotated[
        list[System],
        Field(min_length=1),
        typer.Option(help="eqspec, exspec, ragged or auto; repeat for several. Plain always is.", metavar="POLICY"),
    ] = Field(default_factory=lambda: [System.PLAIN, System.AUTO])
    peer: Annotated[
        list[System],
        typer.Option(help="Other systems: transformers, vllm, vllm-draft, vllm-ngram; repeat.", metavar="SYSTEM"),
    ] = Field(default_factory=list)
    vllm_python: Path | None = described(None, "Python of an environment with vLLM.")
    peer_dtype: Dtype | None = described(None, "dtype of other systems. Unset: as for Spool.")
    batch_size: list[int] = described([1, 8], "Rows of one batch; repeat for several.", min_length=1)
    draft_length: list[int] = described([4], "Tokens proposed per round; repeat for several.", min_length=1)
    temperatures: list[float] = described([], "Temperatures in one run; repeat for several. Unset: --temperature.")
    max_running_batches: int | None = described(
        None, "Batches of sequences worked on at a time. Unset: 48 sequences or four batches.", ge=1
    )
    prompts: Path | None = described(None, "JSON lines as for `spool generate`. Unset: a few built-in ones.")
    count: int | None = described(None, "Take N evenly spaced ones. Unset: all.", ge=1)
    seen_before: bool = described(
        False, "Decode all prompts once before each measurement, sampled ones with other seeds: as rollouts do."
    )
    repeats: int = described(3, "Measurements of each cell.", ge=1, le=1000)
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file for the result.")] = Path(
        "bench-offline.json"
    )

    def problems(self) -> Iterator[str]:
        for name, systems, wanted in (("policy", self.policy, True), ("peer", self.peer, False)):
            for system in systems:
                if system.is_spool is not wanted:
                    allowed = ", ".join(one.value for one in System if one.is_spool is wanted)
                    yield f"{name} is {system.value}, must be one of {allowed}"
        for length in self.draft_length:
            if not 1 <= length <= 64:
                yield f"draft_length is {length}, must be between 1 and 64"
        for temperature in self.temperatures:
            SamplingParameters.given(temperature=temperature)


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One cell of the grid. `draft` is None and `draft_length` 0 for plain decoding."""

    system: System
    batch_size: int
    draft: str | None = None
    draft_length: int = 0
    temperature: float = 0.0

    def __str__(self) -> str:
        draft = "" if self.draft is None else f", {self.draft} x {self.draft_length}"
        temperature = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.system.value}, batch {self.batch_size}{draft}{temperature}"

    @property
    def reference(self) -> GridPoint:
        """Plain decoding at batch 1 by the same software; its output is what this cell's output should be."""
        return GridPoint(self.system.plain, 1, temperature=self.temperature)

    @property
    def baseline(self) -> GridPoint:
        """Spool's plain decoding at the same batch size, with which the speed is compared."""
        return GridPoint(System.PLAIN, self.batch_size, temperature=self.temperature)


def grid_points(
    systems: Sequence[System],
    batch_sizes: Sequence[int],
    draft: str,
    draft_lengths: Sequence[int],
    temperatures: Sequence[float] = (0.0,),
) -> list[GridPoint]:
    """Every combination once, and Spool's plain decoding; references first, then by batch size, plain decoding first.

    Of other systems, one uses prompt lookup and the others use a draft that is a model.
    """
    points = []
    for batch_size in batch_sizes:
        for system in dict.fromkeys((System.PLAIN, *systems)):
            if not system.drafts:
                points.append(GridPoint(system, batch_size))
            elif system is not System.VLLM_DRAFT or draft != "ngram":
                used = "ngram" if system is System.VLLM_NGRAM else draft
                points += [GridPoint(system, batch_size, used, length) for length in draft_lengths]
    points = [replace(point, temperature=temperature) for point in points for temperature in temperatures]
    return sorted(dict.fromkeys(points), key=lambda point: point != point.reference)
