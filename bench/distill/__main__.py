"""Makes a draft for the demo target out of the target's own text, and says how good a draft is.

python -m bench.distill FOLDER --minutes-writing 60 --minutes-training 60
python -m bench.distill evaluate --draft FOLDER/draft --prompts PROMPTS.jsonl --answers ANSWERS.jsonl --lookup 3
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar
from typer.core import TyperGroup

from bench.distill.answers import AnswersError, read_answers
from bench.distill.evaluation import ALL, Score, draft_matches, score
from bench.distill.recipe import DRAFT_LENGTH, Distillation, Recipe
from bench.distill.stages import Budget, showing
from bench.distill.student import StudentShape
from bench.distill.training import TrainingSettings
from bench.distill.writing import WritingSettings
from bench.record import write_result
from deploy.errors import UsageError
from engine.errors import EngineError
from engine.models.draft_vocabulary import read_draft_vocabulary, restrict_head
from engine.models.fetching import fetch_model
from engine.models.source import ModelNotFoundError, resolve_model
from engine.settings import LONGEST_LOOKUP_MATCH
from scheduler.messages import Role
from services.text.tokenizer import ModelTokenizer, TokenizerError

_EXPECTED = (AnswersError, UsageError, EngineError, ModelNotFoundError, TokenizerError, ValueError, OSError)
# A GPU decodes many more rows at once in the same time.
_SHARD_TOKENS = {"cpu": 128 * 512, "cuda": 1024 * 512}


class _MakeByDefault(TyperGroup):
    """A first argument that is no command is the folder of `make`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_MakeByDefault,
    help="Makes a draft out of the target's own text, and says how good a draft is. FOLDER alone means make FOLDER.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_Threads = Annotated[int, typer.Option(min=0, help="Threads on a CPU; 0 leaves the number to torch.")]
_DraftLength = Annotated[int, typer.Option("--draft-length", min=1, help="Tokens proposed per round.")]


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where everything goes; stages found there go on.")],
    minutes_writing: Annotated[float, typer.Option(help="Time for the target to write.")] = 60,
    minutes_training: Annotated[float, typer.Option(help="Time for training.")] = 60,
    threads: _Threads = 0,
    target: Annotated[
        str, typer.Option(help="`demo`, a folder or a hub id; a Llama model with a chat template.")
    ] = "demo",
    start: Annotated[
        Path | None, typer.Option(help="Trained layers to start from.", show_default="the target's last layers")
    ] = None,
    kept_layers: Annotated[int, typer.Option(help="The target's own first layers in the draft.")] = 6,
    trained_layers: Annotated[int, typer.Option(help="Layers that are trained on top.")] = 2,
    vocabulary: Annotated[int, typer.Option(help="Tokens that the draft may propose, special ones aside.")] = 8192,
    shard_tokens: Annotated[
        int | None, typer.Option(help="Tokens written at once.", show_default="65536, with a GPU 524288")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = TrainingSettings().learning_rate,
    seed: Annotated[int, typer.Option(help="Of writing and training.")] = 0,
) -> None:
    """Writes, trains and stores a draft, and measures it on text held out."""
    device = _prepare(threads)
    try:
        recipe = Recipe(
            target=target,
            start=str(start) if start is not None else None,
            shape=StudentShape(kept_layers, trained_layers),
            vocabulary_size=vocabulary,
            writing=WritingSettings(seed=seed, feature_layer=kept_layers, tokens=shard_tokens or _SHARD_TOKENS[device]),
            training=TrainingSettings(seed=seed, learning_rate=learning_rate),
        )
        budgets = Budget(minutes=minutes_writing), Budget(minutes=minutes_training)
        with showing(Console(stderr=True)) as stage:
            distillation = Distillation(folder, recipe, _fetch(target, Role.TARGET), device)
            found = distillation.run(*budgets, stage)
    except _EXPECTED as error:
        raise _failed(error) from error
    _report({"held out": found}, {"draft_length": DRAFT_LENGTH}, folder / "report.json")


@app.command()
def evaluate(
    draft: Annotated[str, typer.Option(help="`demo`, a folder or a hub id.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines as for `spool generate`, with `category` where known.")],
    answers: Annotated[Path, typer.Option(help="What `spool generate` wrote for them, greedily.")],
    draft_length: _DraftLength = DRAFT_LENGTH,
    lookup: Annotated[
        int | None,
        typer.Option(
            min=1, max=LONGEST_LOOKUP_MATCH, help="Also with prompt lookup where N tokens match.", metavar="N"
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Take each N-th answer only.", metavar="N")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the JSON object.")] = None,
    threads: _Threads = 0,
) -> None:
    """Agreement and tokens per round by category. One JSON object is the last line of standard output."""
    device = _prepare(threads)
    try:
        folder = _fetch(draft, Role.DRAFT)
        wanted = read_answers(answers, prompts, ModelTokenizer(folder))[::every]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
        token_ids = read_draft_vocabulary(folder, model.get_input_embeddings().num_embeddings)
        if token_ids is not None:
            restrict_head(model, token_ids.to(device))
        with showing(Console(stderr=True)) as stage:
            progress = stage("evaluating")

            def matched(index: int) -> list[bool]:
                matches = draft_matches(model, token_ids, wanted[index])
                progress((index + 1) / len(wanted), f"{index + 1} of {len(wanted)} answers")
                return matches

            found = score(((answer, matched(index)) for index, answer in enumerate(wanted)), draft_length, lookup)
    except _EXPECTED as error:
        raise _failed(error) from error
    _report(found, {"draft": draft, "draft_length": draft_length, "lookup_match": lookup}, output)


def _prepare(threads: int) -> str:
    """The device to work on."""
    disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _fetch(name: str, role: Role) -> Path:
    console = Console(stderr=True)
    return fetch_model(resolve_model(name, role), lambda stage, share: console.print(stage) if not share else None)


def _report(found: Mapping[str, Score], asked: Mapping[str, object], file: Path | None) -> None:
    """A table on standard error, JSON on standard output, and in `file` with command and machine."""
    Console(stderr=True).print(_table(found))
    result = {**asked, "categories": {name: score.summary() for name, score in found.items()}}
    if file is not None:
        write_result(file, " ".join(["python -m bench.distill", *sys.argv[1:]]), result)
    print(json.dumps(result))


def _table(found: Mapping[str, Score]) -> Table:
    table = Table("category", title="agreement, and tokens per round by who proposes", title_style="")
    looked_up = next(iter(found.values())).lookup is not None
    for column in ("answers", "tokens", "agreement", "draft", *(("lookup", "combined") if looked_up else ())):
        table.add_column(column, justify="right")
    for name, figures in found.items():
        rounds = [figures.draft, *(part for part in (figures.lookup, figures.combined) if part is not None)]
        if name == ALL:
            table.add_section()
        table.add_row(
            name,
            str(figures.answers),
            str(figures.positions),
            f"{figures.agreement:.3f}",
            *(f"{part.tokens_per_round:.3f}" for part in rounds),
        )
    return table


def _failed(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(2)


if __name__ == "__main__":
    app()
