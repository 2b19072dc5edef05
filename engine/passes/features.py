"""Keeps hidden states of a target's passes, for a drafting head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.cpu.fused_layers import KernelDecoder


class Features:
    """What went into some layers in the latest pass, or came out of the last norm: `rows`, `[rows of a pass,
    layers * hidden]`. Written in place, so that CUDA graphs write it as well."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], rows: int) -> None:
        """`layers`: by number; the last norm has that behind all layers. `rows`: of the largest pass. To be made before
        graphs are captured. The model's own bits stay what they are."""
        self._hidden = model.config.hidden_size
        self.rows = torch.zeros(rows, len(layers) * self._hidden, dtype=model.dtype, device=model.device)
        decoder = model.base_model
        for place, layer in enumerate(layers):
            if isinstance(decoder, KernelDecoder):
                decoder.tap(layer, partial(self._keep, place))
            elif layer == len(decoder.layers):
                decoder.register_forward_hook(partial(self._leaving, place))
            else:
                decoder.layers[layer].register_forward_pre_hook(partial(self._entering, place), with_kwargs=True)

    def _entering(self, place: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = getattr(layer, "entering", None)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._keep(place, hidden if entering is None else entering(*args))

    def _leaving(self, place: int, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._keep(place, output.last_hidden_state)

    def _keep(self, place: int, hidden: torch.Tensor) -> None:
        hidden = hidden.reshape(-1, self._hidden)
        self.rows[: len(hidden), place * self._hidden : (place + 1) * self._hidden] = hidden
