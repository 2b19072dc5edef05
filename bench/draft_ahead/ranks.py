"""Where a draft that errs has the token that the target chose: the demo pair's models, by transformers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.draft_ahead.prompts import read_prompts
from engine.models.source import resolve_model
from scheduler.messages import Role

_AGREEMENT = 0.6
"""The draft's surest positions count, as many as make it right in this share: the laws' pairs agree more than these."""
_RANKS = 15


def counted_ranks(questions: Path, count: int, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Of the positions of greedy answers where the draft's first choice is wrong, the share of each later choice."""
    target, draft = (_model(role) for role in (Role.TARGET, Role.DRAFT))
    positions: list[tuple[float, int]] = []
    prompts = read_prompts(questions, count)
    for number, prompt in enumerate(prompts, 1):
        positions += _positions(target, draft, prompt, tokens)
        say(f"{number} of {len(prompts)}: {len(positions)} positions")
    positions.sort(reverse=True)
    surest, right = 0, 0
    for place, (_, rank) in enumerate(positions, 1):
        right += rank == 1
        if right >= _AGREEMENT * place:
            surest = place
    ranks = Counter(rank for _, rank in positions[:surest] if rank > 1)
    missed = ranks.total()
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "positions": len(positions),
        "agreement_of_all": sum(rank == 1 for _, rank in positions) / len(positions),
        "surest": surest,
        "agreement": 1 - missed / surest,
        "missed": missed,
        "ranks": [ranks[rank] / missed for rank in range(2, _RANKS + 1)],
        "later": sum(times for rank, times in ranks.items() if rank > _RANKS) / missed,
    }


@torch.inference_mode()
def _positions(target: Any, draft: Any, prompt: tuple[int, ...], tokens: int) -> list[tuple[float, int]]:
    """Of each position of the answer: how sure the draft is of its choice, and the rank that the target's has there."""
    output = target.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
    logits = draft(output).logits[0, len(prompt) - 1 : -1].float()
    chosen = output[0, len(prompt) :, None]
    ranks = 1 + (logits > logits.gather(1, chosen)).sum(1)
    return list(zip(logits.softmax(1).amax(1).tolist(), ranks.tolist(), strict=True))


def _model(role: Role) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model("demo", role).folder, dtype=torch.float32).eval()
