"""What transformers itself generates: `python -m engine.models.reference`, a request in JSON on standard input.

Greedy, one prompt at a time, with `model.generate` and its own attention and cache: nothing of Spool's engine.
Answers with one JSON line a prompt: `{"tokens": [...], "margins": [...]}`, the margins being by how much each token's
logit led the next one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.source import GGUF_WEIGHTS


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """`prompts` and `max_tokens` go together. `threads` 0 leaves the number to torch."""

    folder: str
    dtype: str
    device: str
    threads: int
    stop_token_ids: Sequence[int]
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    tokens: list[int]
    margins: list[float]


def transformers_model(folder: Path, dtype: Any) -> Any:
    """The model in `folder` as transformers has it. Weights of a GGUF file are expanded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import engine.models.compatibility  # noqa: F401  (makes types of models known)

    # The file says less of the model than config.json.
    gguf: dict[str, Any] = {"gguf_file": GGUF_WEIGHTS} if (folder / GGUF_WEIGHTS).is_file() else {}
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=own_attention(config), **gguf
    )


def own_attention(config: Any) -> str | None:
    """Which of transformers' attentions computes what the configuration says; None: its default."""
    # SDPA leaves out soft caps.
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def generate_reference(request: ReferenceRequest) -> Iterator[ReferenceOutput]:
    """The continuation of each prompt, in order; the token that ended one is part of it."""
    import torch
    from transformers import GenerationConfig

    if request.threads:
        torch.set_num_threads(request.threads)
    model = transformers_model(Path(request.folder), request.dtype).to(request.device).eval()
    # The model's own settings may sample or penalise repetition.
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=sorted(request.stop_token_ids) or None,
        pad_token_id=min(request.stop_token_ids, default=0),
        return_dict_in_generate=True,
        output_logits=True,
    )
    for prompt, max_tokens in zip(request.prompts, request.max_tokens, strict=True):
        inputs = torch.tensor([prompt], device=request.device)
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_tokens)
        leads = [step[0].float().topk(2).values for step in output.logits]
        yield ReferenceOutput(
            output.sequences[0, len(prompt) :].tolist(), [float(first - second) for first, second in leads]
        )


def main() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for output in generate_reference(ReferenceRequest(**json.load(sys.stdin))):
        print(json.dumps({"tokens": output.tokens, "margins": output.margins}), flush=True)


if __name__ == "__main__":
    main()
