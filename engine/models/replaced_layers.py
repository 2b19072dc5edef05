"""Layers that take the place of a model's own are compared with them, on one prompt, before they serve.

On a CPU each described layer gets what went into the model's own, and has to add the same, so that the layer and the
operation where they part can be named. On a GPU the last hidden states are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from spool.engine.attention.backends import AttentionBackend, AttentionRule
from spool.engine.attention.paged_step import GroupStep, PagedStep
from spool.engine.cpu.fused_layers import KernelDecoder, KernelLayer
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.layers.describing import family_of
from spool.engine.layers.experts import sparse_blocks
from spool.engine.models.compatibility import SeenRules
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.passes.device import current, on_device
from spool.engine.passes.layout import BatchedSequence, TokenBatch
from spool.engine.passes.runner import ModelRunner
from spool.engine.quantization.sizes import NOT_QUANTIZED

_PROMPT_TOKENS = 64
# Relative errors of one layer, at most. Those of several, of the embedding and of the last norm are roundings that know
# nothing of each other: they grow with the square root of their number. SmolLM2-135M in bfloat16 is 0.016 off float32,
# of 0.088 for its 30 layers; small random models reach half of what is allowed, and those with a fault are 0.5 off and
# more (tests/unit/engine/test_replaced_layers.py).
_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-13}
# Of what one operation adds, which may be little beside what it reads.
_OF_OPERATION = 8


def replace_layers(loaded: LoadedModel, page_size: int) -> None:
    """As `LoadedModel.replace_layers`. Raises UnsupportedModelError, which names what computes something else."""
    # Other ranks replace theirs by themselves, and a pass would expand all quantised weights.
    if loaded.lead is not None or loaded.solo is not None or loaded.quantization != NOT_QUANTIZED:
        loaded.replace_layers()
    elif loaded.gpu is None:
        _replace_on_cpu(loaded, page_size)
    elif sparse_blocks(loaded.model):
        # A rounding can choose another expert, whose output is another.
        loaded.replace_layers()
    else:
        _replace_on_gpu(loaded, page_size)


def _replace_on_gpu(loaded: LoadedModel, page_size: int) -> None:
    gpu, model = loaded.gpu, loaded.model
    assert gpu is not None, "the model is on no GPU"
    pool = _pool(page_size)
    runner = loaded.runner(pool, ())
    with _prompt(runner, runner.backend, pool) as prompt:
        own = _hidden_states(model, *prompt)

    def check(what: str) -> None:
        for context in (gpu.made_ahead(), nullcontext()):
            with context, _prompt(runner, runner.backend, pool) as prompt:
                found = _hidden_states(model, *prompt)
        _refuse(model, what, found - own, _tolerance(model) * _norm(own))

    loaded.replace_layers(check)


def _replace_on_cpu(loaded: LoadedModel, page_size: int) -> None:
    model, pool, family = loaded.model, _pool(page_size), family_of(loaded.model)
    if family is None:
        loaded.replace_layers()
        return
    runner = loaded.runner(pool, ())
    seen = SeenRules(runner.backend, runner.kv.layers)
    records = [_Record(layer, getattr(layer, family.attention)) for layer in model.base_model.layers]
    with _prompt(runner, seen, pool) as prompt:
        own = _hidden_states(model, *prompt)
    for record in records:
        record.end()
    loaded.replace_layers()
    decoder = model.base_model
    if not isinstance(decoder, KernelDecoder):
        return
    with _prompt(runner, runner.backend, pool) as (tokens, positions, step):
        _check(model, "the embedding", decoder.embedded(tokens), records[0].entering)
        for record, rule, layer in zip(records, seen.rules, decoder.layers, strict=True):
            _check_layer(model, record, rule, layer, decoder.rotation(layer, positions, len(positions)), step)
        _check(model, "the last norm", decoder.norm(records[-1].leaving), own)


def _pool(page_size: int) -> PagePool:
    return PagePool(-(-_PROMPT_TOKENS // page_size), page_size)


def _tolerance(model: PreTrainedModel) -> float:
    """Of the last hidden states."""
    layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return float(_TOLERANCES[model.dtype] * (layers + 2) ** 0.5)


@contextmanager
def _prompt(
    runner: ModelRunner, backend: AttentionBackend, pool: PagePool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, PagedStep]]:
    """Tokens, their positions, int64 `[tokens]` on the device, and a pass over them."""
    model, kv, device, table = runner.model, runner.kv, runner.model.device, PageTable()
    vocabulary = model.get_input_embeddings().num_embeddings
    prompt = [(place * place * 7919 + place * 13) % vocabulary for place in range(_PROMPT_TOKENS)]
    pool.append(table, len(prompt))
    batch = TokenBatch.of([BatchedSequence(table, prompt, 0)], kv, lambda rows: rows)
    with current(device), torch.inference_mode():
        tokens, positions, *slots = (on_device(part, device) for part in (batch.tokens, batch.positions, *batch.slots))
        plans = [backend.plan(spans, batch.rows) for spans in batch.spans]
        yield tokens, positions, PagedStep(kv, list(map(GroupStep, slots, plans)))
    pool.free(table)


def _hidden_states(
    model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep
) -> torch.Tensor:
    """Those behind the last norm, float32 `[tokens, hidden]`."""
    found = model.base_model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        past_key_values=step,
        paged_step=step,
        use_cache=True,
    )
    hidden: torch.Tensor = found.last_hidden_state[0].float()
    return hidden


def _check_layer(
    model: PreTrainedModel,
    record: _Record,
    rule: AttentionRule,
    layer: KernelLayer,
    rotation: tuple[torch.Tensor, torch.Tensor],
    step: PagedStep,
) -> None:
    """Gives the layer what its predecessor in the model has read, and compares what it adds."""
    place, described = f"layer {layer.description.index}", layer.description.rule
    seen, expected = ((one.scaling, one.window, one.softcap, one.sinks is None) for one in (described, rule))
    if seen != expected:
        raise UnsupportedModelError(
            f"{model.config.model_type}: in {place}, attention has scaling, window, cap and no sinks {seen}, "
            f"must have {expected}"
        )
    residual = record.entering.clone()
    attended = layer.attended(residual, rotation, step)
    _check(model, f"the attention of {place}", attended, record.attended)
    if layer.experts is not None:
        # A rounding can choose another expert, whose output is another.
        return
    layer.add(residual, attended)
    # Sums are rounded as well as what is added.
    rounding = torch.finfo(model.dtype).eps * _norm(record.leaving)
    added = _norm(record.leaving - record.entering)
    limit = _OF_OPERATION * _TOLERANCES[model.dtype] * added + 2 * rounding
    _refuse(model, f"the MLP or the norms of {place}", residual - record.leaving, limit)


def _check(model: PreTrainedModel, what: str, found: torch.Tensor, own: torch.Tensor) -> None:
    _refuse(model, what, found - own, _OF_OPERATION * _TOLERANCES[model.dtype] * _norm(own))


def _norm(numbers: torch.Tensor) -> float:
    """In float32: a norm in float16 is soon infinite."""
    return float(numbers.float().norm())


def _refuse(model: PreTrainedModel, what: str, error: torch.Tensor, limit: float) -> None:
    """Raises UnsupportedModelError where the error's norm is above the limit."""
    if not (norm := _norm(error)) <= limit:
        raise UnsupportedModelError(
            f"{model.config.model_type} computes something else with Spool's layers than with transformers' own: "
            f"{what} is {norm:.2g} off, must be at most {limit:.2g}"
        )


class _Record:
    """Of one layer in a pass, what it reads, what its attention gives, and what it gives, `[tokens, hidden]` in the
    model's dtype."""

    entering: torch.Tensor
    attended: torch.Tensor
    leaving: torch.Tensor

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        self._hooks = (
            layer.register_forward_pre_hook(self._read, with_kwargs=True),
            attention.register_forward_hook(self._attended),
            layer.register_forward_hook(self._left),
        )

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _read(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.entering = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0].clone()

    def _attended(self, module: nn.Module, args: Any, output: Any) -> None:
        self.attended = output[0][0].clone()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self.leaving = (output[0] if isinstance(output, tuple) else output)[0].clone()
