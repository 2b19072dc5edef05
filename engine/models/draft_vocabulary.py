"""A draft head over the most frequent tokens only (FR-Spec, arXiv 2502.14856).

The head is the largest matrix of a small model, and most of its rows are for tokens that hardly ever come. A draft
that cannot propose those is a little less often right and much cheaper; the output does not change, for the target
decides.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spool.engine.errors import DraftVocabularyError, UnsupportedModelError
from spool.engine.models.source import DRAFT_VOCABULARY
from spool.engine.quantization.layers import QuantizedLinear

# Not safetensors: other servers take every such file in a model's folder for weights.
FIELD_NAME = "token_ids"


def read_draft_vocabulary(folder: Path, vocabulary_size: int) -> Tensor | None:
    """The ids [V], int64 and ascending, of the tokens that the draft in `folder` may propose; None without such a file.

    Raises `DraftVocabularyError` naming file, field, value and limit.
    """
    path = folder / DRAFT_VOCABULARY
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # Besides wrong syntax: bytes that are no UTF-8, a number of thousands of digits, thousands of brackets.
    except (OSError, ValueError, RecursionError) as error:
        raise DraftVocabularyError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DraftVocabularyError(f"{path} holds {reprlib.repr(content)}, must hold an object")
    if set(content) != {FIELD_NAME}:
        raise DraftVocabularyError(f"{path} has the keys {reprlib.repr(sorted(content))}, must have {FIELD_NAME} alone")
    return torch.tensor(_checked(path, content[FIELD_NAME], vocabulary_size), dtype=torch.int64)


def _checked(path: Path, token_ids: object, vocabulary_size: int) -> list[int]:
    if not isinstance(token_ids, list):
        raise DraftVocabularyError(f"{path}: {FIELD_NAME} is {reprlib.repr(token_ids)}, must be a list of integers")
    if not token_ids:
        raise DraftVocabularyError(f"{path}: {FIELD_NAME} is empty, must name at least one token")
    before = -1
    for index, value in enumerate(token_ids):
        # Not isinstance: true and false are no tokens.
        if type(value) is not int:
            limit = "must be an integer"
        elif not 0 <= value < vocabulary_size:
            limit = f"must be at least 0 and below the vocabulary size {vocabulary_size}"
        elif value <= before:
            limit = f"must be above the one before, which is {before}"
        else:
            before = value
            continue
        raise DraftVocabularyError(f"{path}: {FIELD_NAME}[{index}] is {reprlib.repr(value)}, {limit}")
    return token_ids


def restrict_head(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Makes the model's logits those of `token_ids` (int64) alone, in their order. In place.

    Raises `UnsupportedModelError` for a model whose head is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        bias = None if head.bias is None else head.bias.detach()[token_ids]
        model.set_output_embeddings(QuantizedLinear(head.quantized.rows(token_ids), bias))
        return
    if type(head) is not nn.Linear:
        raise UnsupportedModelError(
            f"{model.config.model_type} has a head of type {type(head).__name__}, must be Linear: the draft proposes "
            f"some of its tokens only ({DRAFT_VOCABULARY}, or a vocabulary that is not the target's)"
        )
    with torch.device("meta"):
        restricted = nn.Linear(head.in_features, token_ids.numel(), bias=head.bias is not None)
    # Rows at the end that are left out are not worth a copy.
    leading = torch.equal(token_ids, torch.arange(token_ids.numel(), device=token_ids.device))
    rows = slice(token_ids.numel()) if leading else token_ids
    # The full head may be the embedding itself, which stays as it is.
    restricted.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        restricted.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    model.set_output_embeddings(restricted)


def feed_as(model: PreTrainedModel, fed: Tensor) -> None:
    """From now on the model, whose layers are replaced already, takes the id t for its token `fed[t]`; int64, on the
    model's device. In place."""
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: (fed[given[0]], *given[1:]))
