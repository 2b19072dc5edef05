"""`spool bench offline` and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from bench.offline.grid import System
from deploy.cli.command_options import DECODING, takes_options
from deploy.config.loading import GivenValue
from deploy.config.models import Dtype
from deploy.config.section import Section, described
from deploy.offline.settings import SamplingSettings, configured

bench_app = typer.Typer(help="Measures speed.")

_OWN = ("batch_size", "draft_length", "max_running")
_SHARED = {name: paths for name, paths in DECODING.items() if name not in _OWN}
"""Options that mean the same as with `spool generate`."""


class BenchSettings(Section):
    """What is measured."""

    policy: Annotated[
        list[System],
        Field(min_length=1),
        typer.Option(help="plain, eqspec, exspec, ragged or auto; repeat for several.", metavar="POLICY"),
    ] = Field(default_factory=lambda: [System.PLAIN, System.AUTO])
    peer: Annotated[
        list[System],
        typer.Option(help="Other systems: transformers, vllm, vllm-draft, vllm-ngram; repeat.", metavar="SYSTEM"),
    ] = Field(default_factory=list)
    vllm_python: Path | None = described(None, "Python of an environment with vLLM.")
    peer_dtype: Dtype | None = described(None, "dtype of other systems. Unset: as for Spool.")
    batch_size: list[int] = described([1, 8], "Rows of one batch; repeat for several.", min_length=1)
    draft_length: list[int] = described([4], "Tokens proposed per round; repeat for several.", min_length=1)
    max_running_batches: int | None = described(
        None, "Batches of sequences worked on at a time. Unset: 48 sequences or four batches.", ge=1
    )
    prompts: Path | None = described(None, "JSON lines as for `spool generate`. Unset: a few built-in ones.")
    count: int | None = described(None, "Take N evenly spaced ones. Unset: all.", ge=1)
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


@bench_app.command("offline")
@takes_options(_SHARED)
def offline_command(given: list[GivenValue], settings: BenchSettings, sampling: SamplingSettings) -> int:
    """Decodes prompts with several policies, batch sizes and draft lengths in turn, and compares with plain decoding.

    Batches and memory are those of `spool generate`; every measurement computes everything.
    """
    from bench.offline.run import bench_offline

    return bench_offline(configured(given, compares=True), settings, sampling)
