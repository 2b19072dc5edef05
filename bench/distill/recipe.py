"""The stages that make a draft, in one folder: write, choose the vocabulary, train, store, look how good it is.

    recipe.json                       what everything below was made with
    shards/                           what the target wrote
    training.pt                       how far training has come
    trained_layers.safetensors        for engine/models/demo_assets
    draft_vocabulary.json             for engine/models/demo_assets
    draft/                            the draft as a Hugging Face folder
    report.json                       agreement on what was held out

Every stage goes on from what it finds in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.distill.chat_frame import special_token_ids
from bench.distill.evaluation import ALL, Score, held_out_matches, score
from bench.distill.shards import Shard, open_shards
from bench.distill.stages import Budget, Progress, Stage
from bench.distill.student import Student, StudentShape
from bench.distill.training import Trainer, TrainingSettings
from bench.distill.vocabulary import choose_vocabulary, count_tokens, store_vocabulary
from bench.distill.writing import Writer, WritingSettings
from engine.models.demo_convert import TRAINED_LAYERS, assemble_draft
from engine.models.draft_vocabulary import FILE_NAME, read_draft_vocabulary

DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what comes out, but for budgets: those may be raised later.

    `start` is a file of trained layers to go on from; without one the student starts from the target's last layers.
    """

    target: str = "demo"
    start: str | None = None
    shape: StudentShape = field(default_factory=StudentShape)
    vocabulary_size: int = 8192
    writing: WritingSettings = field(default_factory=WritingSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        if self.writing.feature_layer != self.shape.kept_layers:
            raise ValueError(
                f"feature_layer is {self.writing.feature_layer}, must be kept_layers, {self.shape.kept_layers}"
            )


class Distillation:
    """One folder. Raises `ValueError` if it was begun with another recipe."""

    def __init__(self, folder: Path, recipe: Recipe, target_folder: Path, device: str) -> None:
        self._folder = folder
        self._recipe = recipe
        self._target_folder = target_folder
        folder.mkdir(parents=True, exist_ok=True)
        _keep_recipe(folder / "recipe.json", recipe)
        self._tokenizer = AutoTokenizer.from_pretrained(target_folder)
        model = AutoModelForCausalLM.from_pretrained(target_folder, dtype="auto")
        self._target: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        self._head = self._target.get_output_embeddings().weight.detach()

    def run(self, writing: Budget, training: Budget, stage: Stage) -> Score:
        """All stages in turn; the score is that of the held-out shard."""
        self.write(writing, stage("writing"))
        self.train(training, stage("training"))
        self.store()
        return self.held_out_score()

    def write(self, budget: Budget, progress: Progress) -> None:
        writer = Writer(self._target, self._tokenizer, self._recipe.writing)
        writer.write(self._folder / "shards", budget, progress)

    def train(self, budget: Budget, progress: Progress) -> None:
        """On all shards but the first, which is held out. The vocabulary stays what it was when training began."""
        _, *shards = self._shards()
        if not (self._folder / FILE_NAME).is_file():
            counts = count_tokens(shards, len(self._head))
            always = special_token_ids(self._tokenizer)
            store_vocabulary(self._folder / FILE_NAME, choose_vocabulary(counts, self._recipe.vocabulary_size, always))
        self._trainer().train(shards, budget, progress)

    def store(self) -> None:
        """The trained layers, and the draft that they make with the target."""
        save_file(self._trained().stored(), self._folder / TRAINED_LAYERS)
        scratch = self._folder / ".draft.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        assemble_draft(self._target_folder, scratch, self._folder)
        shutil.rmtree(self._folder / "draft", ignore_errors=True)
        os.replace(scratch, self._folder / "draft")

    def held_out_score(self) -> Score:
        """Of the trained student on the shard that it did not learn from, with rounds of `DRAFT_LENGTH` tokens."""
        matches = held_out_matches(self._trained(), self._head, self._token_ids(), self._shards()[0])
        return score(matches, DRAFT_LENGTH, None)[ALL]

    def _shards(self) -> list[Shard]:
        return open_shards(self._folder / "shards")

    def _token_ids(self) -> torch.Tensor:
        token_ids = read_draft_vocabulary(self._folder, len(self._head))
        if token_ids is None:
            raise FileNotFoundError(f"{self._folder / FILE_NAME} is gone")
        return token_ids

    def _trainer(self) -> Trainer:
        student = Student(self._target, self._recipe.shape)
        if self._recipe.start is not None:
            student.start_from(Path(self._recipe.start))
        return Trainer(student, self._head, self._token_ids(), self._recipe.training, self._folder / "training.pt")

    def _trained(self) -> Student:
        trainer = self._trainer()
        trainer.load()
        return trainer.student


def _keep_recipe(path: Path, recipe: Recipe) -> None:
    """Writes the recipe of a new folder, compares that of an old one."""
    # What went through JSON once compares like what was read from it.
    wanted = json.loads(json.dumps(asdict(recipe)))
    if not path.is_file():
        path.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    for name, value in _flat(wanted).items():
        if (before := _flat(kept).get(name)) != value:
            raise ValueError(
                f"{path}: {name} was {before} when this folder was begun, is now {value}: take a new folder"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
