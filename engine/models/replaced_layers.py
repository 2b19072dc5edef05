"""Layers that take the place of a model's own on a GPU are compared with them, on one prompt, before they serve."""

from __future__ import annotations

import torch

from spool.engine.attention.paged_step import GroupStep, PagedStep
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.layers.experts import sparse_blocks
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.passes.device import current, on_device
from spool.engine.passes.layout import BatchedSequence, TokenBatch
from spool.engine.passes.runner import ModelRunner

_PROMPT_TOKENS = 64
# Relative errors of one layer, at most. Those of several, of the embedding and of the last norm are roundings that know
# nothing of each other: they grow with the square root of their number. SmolLM2-135M in bfloat16 is 0.016 off float32,
# of 0.088 for its 30 layers; small random models reach half of what is allowed, and those with a fault are 0.5 off and
# more (tests/unit/engine/test_replaced_layers.py).
_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-13}


def replace_layers(loaded: LoadedModel, page_size: int) -> None:
    """As `LoadedModel.replace_layers`. Raises UnsupportedModelError, which names what computes something else."""
    gpu, model = loaded.gpu, loaded.model
    # Other ranks replace theirs by themselves, and a rounding can choose another expert, whose output is another.
    if gpu is None or loaded.lead is not None or loaded.solo is not None or any(True for _ in sparse_blocks(model)):
        loaded.replace_layers()
        return
    pool = PagePool(-(-_PROMPT_TOKENS // page_size), page_size)
    runner = loaded.runner(pool, ())
    own = _last_hidden_state(runner, pool)
    tolerance = _TOLERANCES[model.dtype] * (model.config.get_text_config(decoder=True).num_hidden_layers + 2) ** 0.5

    def check(what: str) -> None:
        with gpu.made_ahead():
            _last_hidden_state(runner, pool)
        error = float((_last_hidden_state(runner, pool) - own).norm() / own.norm())
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"{model.config.model_type} computes something else with {what} than with transformers' own layers: "
                f"the last hidden state is {error:.2g} off, must be at most {tolerance:.2g}"
            )

    loaded.replace_layers(check)


@torch.inference_mode()
def _last_hidden_state(runner: ModelRunner, pool: PagePool) -> torch.Tensor:
    """Of all tokens of a prompt, float32 `[tokens, hidden]`."""
    model, kv, device, table = runner.model, runner.kv, runner.model.device, PageTable()
    vocabulary = model.get_input_embeddings().num_embeddings
    prompt = [(place * place * 7919 + place * 13) % vocabulary for place in range(_PROMPT_TOKENS)]
    pool.append(table, len(prompt))
    batch = TokenBatch.of([BatchedSequence(table, prompt, 0)], kv, lambda rows: rows)
    with current(device):
        tokens, positions, *slots = (on_device(part, device) for part in (batch.tokens, batch.positions, *batch.slots))
        plans = [runner.backend.plan(spans, batch.rows) for spans in batch.spans]
        step = PagedStep(kv, list(map(GroupStep, slots, plans)))
        found = model.base_model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=step,
            paged_step=step,
            use_cache=True,
        )
        hidden: torch.Tensor = found.last_hidden_state[0].float()
    pool.free(table)
    return hidden
