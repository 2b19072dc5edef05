"""Models whose weights are quantised: as a checkpoint has them, or rounded when they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from spool.engine.errors import UnsupportedModelError
from spool.engine.models.dtype import EMBEDDING_SCALE
from spool.engine.models.source import weights_path
from spool.engine.models.weights import model_of
from spool.engine.parallel.layers import connect_layers
from spool.engine.parallel.ranks import Ranks
from spool.engine.parallel.shards import part_of, parts_of, whole_model
from spool.engine.quantization.checkpoints import checkpoint_weights, quantization_method
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_model import gguf_weights
from spool.engine.quantization.layers import QuantizedEmbedding, QuantizedLinear
from spool.engine.quantization.rounding import rounded
from spool.engine.quantization.sizes import HEAD_BITS, NOT_QUANTIZED
from spool.engine.quantization.weights import INPUT_MULTIPLE, QuantizedWeight

_ROUTERS = {"gate", "router"}


def open_weights(folder: Path) -> GgufFile | Path:
    """The GGUF file of a model's folder; `folder` itself where it has none. Raises UnsupportedModelError."""
    path = weights_path(folder)
    return folder if path == folder else GgufFile(path)


def stored_quantization(weights: GgufFile | Path, config: PreTrainedConfig) -> str:
    """How weights are quantised, in a word: the commonest type of a GGUF file's, or the method that config.json
    names."""
    if isinstance(weights, GgufFile):
        return weights.commonest_type()
    return quantization_method(config) or NOT_QUANTIZED


def build_model(
    source: GgufFile | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    keep: bool,
    ranks: Ranks | None = None,
    ignored: Sequence[str] = (),
) -> PreTrainedModel:
    """Of what `open_weights` gives. Quantised weights stay so where `keep`; otherwise all are expanded to
    `dtype`. With `ranks`, this rank's part, connected to the others. Tensors of `ignored` may be left over.

    Raises UnsupportedModelError for weights that do not fit `config` or are not finite.
    """
    plain: dict[str, torch.Tensor] = {}
    quantized: dict[str, QuantizedWeight] = {}
    path = source.path if isinstance(source, GgufFile) else source
    if isinstance(source, GgufFile):
        weights = gguf_weights(source, config, ignored)
    else:
        weights = checkpoint_weights(source, config, ignored=ignored)
    if ranks is not None:
        weights = parts_of(weights, whole_model(config), ranks.rank, ranks.size, path.name)
    for name, weight in weights:
        if isinstance(weight, torch.Tensor):
            plain[name] = weight.to(dtype)
        elif keep:
            quantized[name] = weight
            # Zeros without memory stand in for what is placed below.
            plain[name] = torch.zeros(1, dtype=dtype).expand(weight.shape)
        else:
            plain[name] = weight.expanded().to(dtype)
    config.quantization_config = None
    model = model_of(path, config if ranks is None else part_of(config, ranks.size), plain, dtype, {}, ignored)
    _place(model, quantized, plain.keys())
    if ranks is not None:
        connect_layers(model, config.vocab_size, ranks)
    return model


def is_quantized(model: nn.Module) -> bool:
    """Whether a layer of the model has quantised weights, before faster layers take their places."""
    return any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in model.modules())


def round_weights(model: PreTrainedModel, bits: int) -> None:
    """Rounds the weights of linear layers to codes of `bits` bits, in place; those of embedding and head to 8. A layer
    whose inputs are no multiple of 32 stays as it is, and so does what routes rows to experts, whose choice is to stay
    the same. Of a model that ranks share, this rank's part."""
    ends = {id(getattr(end, "part", end)) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    found: dict[str, QuantizedWeight] = {}
    by_storage: dict[int, QuantizedWeight] = {}
    for name, module in model.named_modules():
        if _ROUTERS & {*name.split(".")}:
            continue
        is_embedding = isinstance(module, nn.Embedding) and id(module) in ends
        if not (is_embedding or type(module) is nn.Linear) or module.weight.shape[1] % INPUT_MULTIPLE:
            continue
        address = module.weight.data_ptr()
        if address not in by_storage:
            width = HEAD_BITS if id(module) in ends else bits
            by_storage[address] = rounded(module.weight.detach(), width)
        found[f"{name}.weight"] = by_storage[address]
    _place(model, found)


def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """`model` on `device`, where a head and its embedding still share their codes. In place."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = (getattr(end, "part", end) for end in ends)
    shared = isinstance(head, QuantizedLinear) and head.codes is getattr(embedding, "codes", None)
    model.to(device)
    if shared:
        head.codes, head.scales, head.minimums = embedding.codes, embedding.scales, embedding.minimums
    return model


def _place(model: PreTrainedModel, weights: Mapping[str, QuantizedWeight], stored: Collection[str] = ()) -> None:
    """Replaces the modules of these weights. A head that has its embedding's weight, as it is not among those `stored`
    apart, gets it as well. Raises UnsupportedModelError for a module that computes something else with its weight."""
    embedding = f"{_name_of(model, model.get_input_embeddings())}.weight"
    tied = getattr(model.config, "tie_word_embeddings", False) and embedding in weights
    head = f"{_name_of(model, model.get_output_embeddings())}.weight"
    placed = {**weights, head: weights[embedding]} if tied and head not in {*weights, *stored} else weights
    modules = dict(model.named_modules())
    for name, weight in placed.items():
        path = name.removesuffix(".weight")
        module = modules.get(path)
        scale = getattr(module, EMBEDDING_SCALE, None)
        if type(module) is nn.Embedding or (isinstance(module, nn.Embedding) and scale is not None):
            replacement: nn.Module = QuantizedEmbedding(weight, model.dtype, 1.0 if scale is None else float(scale))
        elif module is not None and type(module) is nn.Linear:
            replacement = QuantizedLinear(weight, module.bias)
        else:
            holder = "no module" if module is None else f"a {type(module).__name__}"
            raise UnsupportedModelError(
                f"{model.config.model_type} has a quantised weight {name} of {holder}, must be of a linear layer or an "
                "embedding: quantization 'none' expands it"
            )
        setattr(modules[path.rpartition(".")[0]], path.rpartition(".")[2], replacement)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
