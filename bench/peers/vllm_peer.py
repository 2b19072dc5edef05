"""vLLM as a peer of `spool bench offline`, for peer_main.py and a Python that has vLLM and need not have Spool.

vLLM loads its draft with the target, so `draft` in the first request decides whether it drafts. A batch is kept full:
a finished prompt makes room for the next one at once, as in serving.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

# Which of its libraries vLLM loads depends on what torch says of the processor, whatever limits torch's own kernels.
_SETS_THAT_HAVE = {
    "_is_avx512_supported": ("amx", "avx512"),
    "_is_avx512_bf16_supported": ("amx", "avx512"),
    "_is_amx_tile_supported": ("amx",),
}
for _question, _sets in _SETS_THAT_HAVE.items():
    if os.environ.get("SPOOL_CPU_ISA", _sets[0]) not in _sets:
        setattr(torch.cpu, _question, lambda: False)

import vllm  # noqa: E402

_WARM_UP_TOKENS = 8
# The lengths of a match that Spool's prompt lookup looks for (engine/drafting/ngram_engine.py).
_NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 32}


def load(request: dict[str, Any]) -> Any:
    """vLLM's engine for the models of the first request."""
    longest = max(len(prompt) + most for prompt, most in zip(request["prompts"], request["max_tokens"], strict=True))
    options: dict[str, Any] = {}
    if request["draft"]:
        draft = {"method": "draft_model", "model": request["draft"]} if request["draft"] != "ngram" else _NGRAM
        options["speculative_config"] = draft | {"num_speculative_tokens": request["draft_length"]}
    return vllm.LLM(
        model=request["target"],
        dtype=request["dtype"],
        max_model_len=longest + request["draft_length"] + 16,
        max_num_seqs=request["max_rows"],
        enable_prefix_caching=False,
        # vLLM's worker processes poll while they are idle, which would slow down whatever is measured next.
        distributed_executor_backend="uni",
        **options,
    ).llm_engine


class Peer:
    """Keeps up to a batch of prompts in vLLM's engine until all are finished."""

    version = vllm.__version__

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._engine = load(request)
        self._ids = 0
        self._warm: set[int] = set()

    def measure(self, batch_size: int, prompts: list[int], **_: Any) -> dict[str, Any]:
        if batch_size not in self._warm:
            self._run(prompts[:batch_size], batch_size, _WARM_UP_TOKENS)
            self._warm.add(batch_size)
        started = time.perf_counter()
        tokens = self._run(prompts, batch_size)
        return {"seconds": time.perf_counter() - started, "tokens": tokens}

    def _run(self, indices: list[int], batch_size: int, limit: int | None = None) -> list[list[int]]:
        waiting = list(reversed(indices))
        running: dict[str, int] = {}
        finished: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and len(running) < batch_size:
                index = waiting.pop()
                running[self._enter(index, limit)] = index
            for output in self._engine.step():
                if output.finished:
                    finished[running.pop(output.request_id)] = list(output.outputs[0].token_ids)
        return [finished[index] for index in indices]

    def _enter(self, index: int, limit: int | None) -> str:
        request = self._request
        self._ids += 1
        parameters = vllm.SamplingParams(
            temperature=0,
            max_tokens=min(request["max_tokens"][index], limit or sys.maxsize),
            stop_token_ids=request["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": request["prompts"][index]}
        self._engine.add_request(str(self._ids), prompt, parameters)
        return str(self._ids)
