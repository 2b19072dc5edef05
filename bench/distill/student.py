"""The part of the draft that is trained: a few layers and a norm on top of the target's own first layers.

It reads what the target's layer `kept_layers - 1` puts out and is read by the target's own head; both stay as they are,
and only what is here is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

_NORM = "model.norm."


@dataclass(frozen=True, slots=True)
class StudentShape:
    """How many layers the draft takes from the target and how many it learns."""

    kept_layers: int = 6
    trained_layers: int = 2

    def __post_init__(self) -> None:
        for name, low in (("kept_layers", 0), ("trained_layers", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {low}")


class Student(nn.Module):
    """Float32 layers of the Llama kind, started from the target's last ones."""

    def __init__(self, target: PreTrainedModel, shape: StudentShape) -> None:
        super().__init__()
        decoder = target.get_decoder()
        if shape.kept_layers + shape.trained_layers > len(decoder.layers):
            raise ValueError(
                f"kept_layers and trained_layers are {shape.kept_layers} and {shape.trained_layers}, "
                f"must be at most the target's {len(decoder.layers)} together"
            )
        config = copy.deepcopy(target.config)
        config._attn_implementation = "sdpa"
        self._kept_layers = shape.kept_layers
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(shape.trained_layers)).float()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps).float()
        self._rotary = LlamaRotaryEmbedding(config)
        for layer, last in zip(self.layers, decoder.layers[-shape.trained_layers :], strict=True):
            layer.load_state_dict(last.state_dict())
        self.norm.load_state_dict(decoder.norm.state_dict())
        self.to(target.device)

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, L, H] of positions 0 to L - 1 to final hidden states [B, L, H]."""
        positions = torch.arange(features.shape[1], device=features.device)[None]
        hidden, rotation = features, self._rotary(features, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, attention_mask=None)
        return self.norm(hidden)

    def stored(self) -> dict[str, Tensor]:
        """The tensors under the names they have in the draft, in bfloat16."""
        tensors = {f"{_NORM}{name}": tensor for name, tensor in self.norm.state_dict().items()}
        for index, layer in enumerate(self.layers):
            tensors |= {f"{self._prefix(index)}{name}": tensor for name, tensor in layer.state_dict().items()}
        return {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}

    def start_from(self, path: Path) -> None:
        """Takes over trained layers stored before. Raises `ValueError` if they are of another shape."""
        tensors = load_file(path)
        try:
            for index, layer in enumerate(self.layers):
                layer.load_state_dict(_below(tensors, self._prefix(index)))
            self.norm.load_state_dict(_below(tensors, _NORM))
        except RuntimeError as error:
            raise ValueError(f"{path} does not fit layers {self._prefix(0)} and on: {error}") from error

    def _prefix(self, index: int) -> str:
        return f"model.layers.{self._kept_layers + index}."


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
