"""The MTP layer that the folder of a target holds: a decoder layer of the target's own family that was trained with it
to predict the token after the next.

Its features are what the target's head multiplies or, from the second proposed token on, what it gives itself. They and
the token's embedding, each normed, go through one product into the layer; another norm, and the target's own head
follow. Of several MTP layers the first is taken, for every token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spool.engine.attention.backends import AttentionPlan, AttentionRule
from spool.engine.attention.paged_step import GroupStep, PagedStep
from spool.engine.cpu.experts import replace_experts
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.cpu.linear import replace_linears
from spool.engine.drafting.head import DraftingHead, HeadWeights
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.kv.paged_kv import LayerKv, PagedKv
from spool.engine.layers.plain_norms import replace_norms
from spool.engine.models.reading import read_config
from spool.engine.models.weights import model_of
from spool.engine.quantization.checkpoints import checkpoint_weights


@dataclass(frozen=True, slots=True)
class _Format:
    """How a family names the tensors of its MTP layer, after `prefix`, which has the number of the target's layers.
    `hidden_first`: the order of what goes through the product. `shared`: those that are the target's once more."""

    prefix: str
    token_norm: str
    hidden_norm: str
    product: str
    last_norm: str
    hidden_first: bool = False
    shared: tuple[str, ...] = ()


_FORMATS = {
    "glm4_moe": _Format(
        *("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        shared=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    "mimo": _Format(
        *("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
    ),
}
"""By the families of the targets."""


class MtpHead(DraftingHead):
    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        vocabulary_size: int,
        kernels: CpuKernels | None,
        ignored: Sequence[str] = (),
    ) -> None:
        """Raises UnsupportedModelError where `folder`, that of `model`, the target, holds none that is known, or one
        with tensors that nothing takes, but those of `ignored`."""
        family, size = model.config.model_type, model.config.hidden_size
        if family not in _FORMATS:
            raise UnsupportedModelError(f"{family} has no MTP layer that is known, must be {' or '.join(_FORMATS)}")
        config = _config_of_layer(model.config)
        super().__init__("mtp", config, model, kernels)
        self.layers = [model.config.num_hidden_layers]
        self._format, self.columns, self._epsilon = _FORMATS[family], vocabulary_size, config.rms_norm_eps
        prefix = self._format.prefix.format(model.config.num_hidden_layers)
        stored: dict[str, Tensor] = {}
        for name, weight in checkpoint_weights(folder, read_config(folder), prefix, ignored):
            stored[name.removeprefix(prefix)] = weight if isinstance(weight, Tensor) else weight.expanded()
        if not stored:
            raise UnsupportedModelError(f"{folder.name} holds no MTP layer, whose tensors begin with {prefix}")
        for name in self._format.shared:
            stored.pop(name, None)
        name = f"the MTP layer of {folder.name}"
        weights = HeadWeights(Path(name), stored, model.dtype, model.device)
        names = (self._format.token_norm, self._format.hidden_norm)
        self._norms = [weights.tensor(f"{one}.weight", size) for one in names]
        self._product = self.made(weights.linear(self._format.product, size, 2 * size))
        last_norm = weights.tensor(f"{self._format.last_norm}.weight", size)
        layer = _model_of_layer(name, config, stored, last_norm, model, ignored)
        self.nbytes = weights.nbytes + sum(parameter.nbytes for parameter in layer.parameters())
        replace_norms(layer)
        if kernels is not None:
            replace_experts(layer, kernels)
            replace_linears(layer, kernels)
        self._layer = layer.base_model

    def features(self, hidden: Tensor) -> Tensor:
        return torch.nan_to_num(hidden)

    def write(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv: PagedKv,
        slots: Tensor,
        plan: AttentionPlan | None = None,
    ) -> None:
        with suppress(_Written):
            self.outputs(tokens, features, positions, kv, slots, _NoPlan())

    def outputs(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: PagedKv, slots: Tensor, plan: AttentionPlan
    ) -> Tensor:
        step = _HeadStep(kv, [GroupStep(slots, plan)])
        pair = self._target.base_model.embed_tokens(tokens), features
        normed = [
            F.rms_norm(rows, norm.shape, norm, self._epsilon) for rows, norm in zip(pair, self._norms, strict=True)
        ]
        joined = torch.cat(normed[::-1] if self._format.hidden_first else normed, -1)
        output = self._layer(
            inputs_embeds=self._product(joined).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=step,
            paged_step=step,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, outputs: Tensor) -> Tensor:
        found: Tensor = self._target.get_output_embeddings()(outputs)[:, : self.columns]
        return found


class _HeadStep(PagedStep):
    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().write(layer, torch.nan_to_num(keys), torch.nan_to_num(values))


class _Written(Exception):  # noqa: N818  (no error)
    """All KV of a pass has been written."""


class _NoPlan:
    """Ends a pass where its layer begins to attend."""

    def attend(self, layer: LayerKv, query: Tensor, rule: AttentionRule) -> NoReturn:
        raise _Written


def _config_of_layer(target: PreTrainedConfig) -> PreTrainedConfig:
    """Of a model of one layer, with experts where the target has any, and without a vocabulary."""
    config = copy.deepcopy(target)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config.num_hidden_layers = config.vocab_size = 1
    config.pad_token_id = config.quantization_config = None
    config.tie_word_embeddings = False
    return config


def _model_of_layer(
    name: str,
    config: PreTrainedConfig,
    layer: dict[str, Tensor],
    last_norm: Tensor,
    target: PreTrainedModel,
    ignored: Sequence[str],
) -> PreTrainedModel:
    """Of weights by their names in the layer, and of the norm behind it."""
    weights = {f"model.layers.0.{one}": tensor for one, tensor in layer.items()} | {"model.norm.weight": last_norm}
    weights |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), torch.zeros(1, config.hidden_size))
    try:
        return model_of(Path(name), config, weights, target.dtype, {}, ignored).to(target.device).eval()
    # Experts that cannot be joined, as one is missing or has another shape.
    except (LookupError, RuntimeError) as error:
        raise UnsupportedModelError(f"{name} cannot be loaded: {one_line(error)}") from error
