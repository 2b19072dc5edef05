"""A trained head as a folder in the format that heads are published in, and as the file from which training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.make_head.head import TrainedHead
from spool.engine.demo.convert import assemble_head
from spool.engine.models.draft_vocabulary import FIELD_NAME
from spool.engine.models.source import DRAFT_VOCABULARY, TRAINED_HEAD

_LEARNT = "learnt"


def save_checkpoint(head: TrainedHead, records: list[dict[str, Any]], vocabulary: list[int], folder: Path) -> None:
    """`records`: of the parts that it has learnt from."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    metadata = {"feature_layers": json.dumps(head.feature_layers), _LEARNT: json.dumps(records)}
    save_file(tensors, folder / TRAINED_HEAD, metadata)
    (folder / DRAFT_VOCABULARY).write_text(json.dumps({FIELD_NAME: vocabulary}, separators=(",", ":")) + "\n")


def load_checkpoint(head: TrainedHead, folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records, and the head's vocabulary."""
    with safe_open(folder / TRAINED_HEAD, "pt") as file:
        head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (no mapping)
        records: list[dict[str, Any]] = json.loads(file.metadata()[_LEARNT])
    return records, json.loads((folder / DRAFT_VOCABULARY).read_text())[FIELD_NAME]


def export(target_folder: Path, checkpoint: Path, folder: Path) -> None:
    """As `--draft` takes it."""
    assemble_head(target_folder, folder, checkpoint)
