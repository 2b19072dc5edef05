"""The settings of `spool bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import typer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bench.offline.options import BenchInputs


class BenchServeSettings(BaseModel):
    """`spool bench serve`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, typer.Option(help="Server, over HTTP.")] = "http://127.0.0.1:8000"
    grpc: Annotated[str | None, typer.Option(help="The same over gRPC, as HOST:PORT.", show_default="HTTP")] = None
    api_key: Annotated[str | None, typer.Option(help="Key to show.", show_default="$SPOOL_API_KEY")] = None
    model: Annotated[str | None, typer.Option(help="Model to ask for.", show_default="the server's")] = None
    inputs: BenchInputs = BenchInputs()
    rate: Annotated[
        list[float], Field(min_length=1), typer.Option(help="Requests a second, on average; repeat for several loads.")
    ] = Field(default_factory=lambda: [1.0])
    seconds: Annotated[float, Field(gt=0), typer.Option(help="For so long requests arrive, at each rate.")] = 60.0
    max_tokens: Annotated[int, Field(ge=1), typer.Option(help="Output tokens of each request.")] = 128
    temperature: Annotated[float, Field(ge=0), typer.Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Field(ge=0), typer.Option(help="Of arrivals; request i is asked with seed + i.")] = 0
    speculation: Annotated[bool, typer.Option("--speculation/--no-speculation", help="Let the server draft.")] = True
    first_token_bound: Annotated[
        float, Field(gt=0), typer.Option(help="Seconds to the first token that a good request takes at most.")
    ] = 2.0
    token_bound: Annotated[
        float, Field(gt=0), typer.Option(help="Seconds for each further token, on average, likewise.")
    ] = 0.2
    timeout: Annotated[float, Field(gt=0), typer.Option(help="Seconds after which a request has failed.")] = 600.0
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON file; loads that it holds are not measured again.")
    ] = Path("bench-serve.json")
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for rate in self.rate:
            if rate <= 0:
                raise ValueError(f"rate is {rate}, must be above 0")
        return self
