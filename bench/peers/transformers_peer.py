"""Transformers as a peer of `spool bench offline`: batched `model.generate`, and assisted generation.

Standard input holds JSON lines, the first with models and prompts, each other one a measurement to make:

    {"target": "...", "draft": null, "dtype": "bfloat16", "device": "cpu", "threads": 2, "draft_length": 4,
     "prompts": [[1, 2]], "max_tokens": [64], "stop_token_ids": [0]}
    {"batch_size": 8, "prompts": [0, 1], "drafting": false, "draft_length": 4}

Standard output answers each: {"event": "ready", "version": "..."}, then {"event": "measured", "seconds": 1.5,
"tokens": [[...]]} with an output for each prompt, up to and with the token that ended it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

_WARM_UP_TOKENS = 8


class Generator:
    """Greedy generation with left padding, as transformers documents it for batches."""

    def __init__(self, request: dict[str, Any]) -> None:
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
        self, indices: list[int], drafting: bool, draft_length: int, most: int | None = None
    ) -> list[list[int]]:
        request = self._request
        stops = request["stop_token_ids"]
        rows = [request["prompts"][index] for index in indices]
        limits = [min(request["max_tokens"][index], most or sys.maxsize) for index in indices]
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
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self._request["dtype"]))
        return model.to(self._request["device"]).eval()


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """Up to and with the first stop token: what follows is padding."""
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def lines_until_parent_ends() -> Iterator[str]:
    """Lines of standard input. Where it ends the parent is gone or wants no more, and with it goes all of this group:
    a measurement under way, and processes that a library started."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        yield lines.get()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What libraries print must not come between the answers.
    os.dup2(2, 1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    generator: Generator | None = None
    for line in lines_until_parent_ends():
        request = json.loads(line)
        if generator is None:
            generator = Generator(request)
            answer: dict[str, Any] = {"event": "ready", "version": transformers.__version__}
        else:
            answer = {"event": "measured", **generator.measure(**request)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
