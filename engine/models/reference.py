"""Models as transformers has them, without Spool's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spool.engine.errors import UnsupportedModelError
from spool.engine.models.source import GGUF_WEIGHTS, weights_path
from spool.engine.quantization.gguf_file import part_paths


def transformers_model(folder: Path, dtype: Any) -> Any:
    """The model in `folder` as transformers has it. Weights of a GGUF file are expanded. Raises UnsupportedModelError
    for a file in parts, of which transformers would read the first alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import spool.engine.models.compatibility  # noqa: F401  (makes types of models known)

    path = weights_path(folder)
    if len(part_paths(path)) > 1:
        raise UnsupportedModelError(f"{path.name} is a GGUF file in parts, which transformers does not read")
    # The file says less of the model than config.json.
    gguf: dict[str, Any] = {"gguf_file": GGUF_WEIGHTS} if path != folder else {}
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=own_attention(config), **gguf
    )


def own_attention(config: Any) -> str | None:
    """Which of transformers' attentions computes what the configuration says; None: its default."""
    # SDPA leaves out soft caps.
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None
