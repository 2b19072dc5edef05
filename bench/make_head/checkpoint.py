"""The files from which training goes on, and of which a head is made (engine/demo/convert.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from bench.make_head.head import TrainedHead
from spool.engine.models.draft_vocabulary import FIELD_NAME
from spool.engine.models.source import DRAFT_VOCABULARY, TRAINED_HEAD

_LEARNT, _LAYERS = "learnt", "feature_layers"


def save_checkpoint(head: TrainedHead, records: list[dict[str, Any]], vocabulary: list[int], folder: Path) -> None:
    """`records`: of the parts that it has learnt from."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    metadata = {_LAYERS: json.dumps(head.feature_layers), _LEARNT: json.dumps(records)}
    save_file(tensors, folder / TRAINED_HEAD, metadata)
    (folder / DRAFT_VOCABULARY).write_text(json.dumps({FIELD_NAME: vocabulary}, separators=(",", ":")) + "\n")


def load_checkpoint(target: PreTrainedModel, folder: Path) -> tuple[TrainedHead, list[dict[str, Any]], list[int]]:
    """The head, which reads the layers that it was trained with, the records, and the head's vocabulary."""
    with safe_open(folder / TRAINED_HEAD, "pt") as file:
        metadata = file.metadata()
        head = TrainedHead(target, json.loads(metadata[_LAYERS]))
        head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (no mapping)
    return head, json.loads(metadata[_LEARNT]), json.loads((folder / DRAFT_VOCABULARY).read_text())[FIELD_NAME]
