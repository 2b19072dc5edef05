"""Transformers as a peer of `spool bench offline`, for peer_main.py: batched `model.generate`, assisted generation."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

_WARM_UP_TOKENS = 8


class Peer:
    """Greedy generation with left padding, as transformers documents it for batches."""

    version: str = transformers.__version__

    def __init__(self, request: dict[str, Any]) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(request["threads"])
        self._request = request
        self._target = self._load(request["target"])
        self._draft = self._load(request["draft"]) if request["draft"] else None
        self._warm: set[tuple[int, bool, int]] = set()

    def measure(self, batch_size: int, prompts: list[int], drafting: bool, draft_length: int) -> dict[str, Any]:
        kind = batch_size, drafting, draft_length
        if kind not in self._warm:
            self._generate(prompts[:batch_size], drafting, draft_length, _WARM_UP_TOKENS)
            self._warm.add(kind)
        started = time.perf_counter()
        tokens: list[list[int]] = []
        for first in range(0, len(prompts), batch_size):
            tokens += self._generate(prompts[first : first + batch_size], drafting, draft_length)
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    def _generate(
        self, indices: list[int], drafting: bool, draft_length: int, limit: int | None = None
    ) -> list[list[int]]:
        request = self._request
        stops = request["stop_token_ids"]
        rows = [request["prompts"][index] for index in indices]
        limits = [min(request["max_tokens"][index], limit or sys.maxsize) for index in indices]
        width = max(map(len, rows))
        padding = min(stops, default=0)
        inputs = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=request["device"])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=request["device"])
        # The model's own settings may sample or penalise repetition.
        self._target.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=stops or None, pad_token_id=padding
        )
        more: dict[str, Any] = {}
        if drafting and self._draft is not None:
            self._draft.generation_config = GenerationConfig(
                do_sample=False,
                eos_token_id=stops or None,
                pad_token_id=padding,
                num_assistant_tokens=draft_length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
            more["assistant_model"] = self._draft
        with torch.inference_mode():
            output = self._target.generate(inputs, attention_mask=mask, max_new_tokens=max(limits), **more)
        return [until_stop(row[width:].tolist()[:limit], stops) for row, limit in zip(output, limits, strict=True)]

    def _load(self, folder: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._request["dtype"])
        return model.to(self._request["device"]).eval()


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """Up to and including the first stop token; the rest is padding."""
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens
