"""The process of another system in `python -m bench.offline`: it answers each line of standard input with one line.

    python bench/offline/peer_process.py transformers|vllm

It needs torch and that system, not Spool. The first line has the fields of `PeerModels` (bench/offline/peers.py),
`draft` and `draft_length`; the answer to it is empty. Each later line is {"batch_size": N}; the answer has `seconds`,
and `tokens`, the greedy output for each prompt up to and including the stop token.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WARM_UP_TOKENS = 8

Generate = Callable[[list[int], int, int], list[list[int]]]
"""The output for the prompts with these numbers, with a batch size and a maximum number of tokens."""


def transformers_generate(models: dict[str, Any]) -> Generate:
    """Batches with left padding, as transformers documents it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(models["threads"])
    folder = Path(models["target"])
    options = {"config": transformers.AutoConfig.from_pretrained(folder), "dtype": models["dtype"]}
    if (folder / "model.gguf").is_file():
        options["gguf_file"] = "model.gguf"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    model = model.to(models["device"]).eval()
    stops: list[int] = models["stop_token_ids"]
    padding = min(stops, default=0)
    # The model's own settings may sample or penalise repetition.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=stops or None, pad_token_id=padding
    )

    def batch(numbers: list[int], limit: int) -> list[list[int]]:
        rows = [models["prompts"][number] for number in numbers]
        limits = [min(models["max_tokens"][number], limit) for number in numbers]
        width = max(map(len, rows))
        inputs = torch.tensor([[padding] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        with torch.inference_mode():
            output = model.generate(inputs, attention_mask=mask, max_new_tokens=max(limits))
        return [until_stop(row[width:].tolist()[:most]) for row, most in zip(output, limits, strict=True)]

    def until_stop(tokens: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(tokens) if token in stops]
        return tokens[: ends[0] + 1] if ends else tokens

    def generate(numbers: list[int], batch_size: int, limit: int) -> list[list[int]]:
        starts = range(0, len(numbers), batch_size)
        return [output for start in starts for output in batch(numbers[start : start + batch_size], limit)]

    return generate


def vllm_generate(models: dict[str, Any]) -> Generate:
    """Keeps up to a batch of prompts in vLLM's engine: a finished one makes room for the next, as in serving."""
    # Which of its libraries vLLM loads depends on what torch says of the processor, not on the limits of torch.
    if os.environ.get("SPOOL_CPU_ISA") == "avx2":
        for question in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            setattr(torch.cpu, question, lambda: False)
    import vllm

    options: dict[str, Any] = {}
    if models["draft"] == "ngram":
        # The lengths of a match that Spool's prompt lookup looks for (deploy/config/models.py, engine/settings.py).
        options["speculative_config"] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 32}
    elif models["draft"]:
        options["speculative_config"] = {"method": "draft_model", "model": models["draft"]}
    if options:
        options["speculative_config"]["num_speculative_tokens"] = models["draft_length"]
    lengths = [len(prompt) + most for prompt, most in zip(models["prompts"], models["max_tokens"], strict=True)]
    engine = vllm.LLM(
        model=models["target"],
        dtype=models["dtype"],
        max_model_len=max(lengths) + models["draft_length"] + 16,
        max_num_seqs=models["max_rows"],
        enable_prefix_caching=False,
        # vLLM's worker processes poll while idle, which would slow down whatever is measured next.
        distributed_executor_backend="uni",
        **options,
    ).llm_engine

    ids = itertools.count()

    def generate(numbers: list[int], batch_size: int, limit: int) -> list[list[int]]:
        waiting = list(reversed(numbers))
        running: dict[str, int] = {}
        finished: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and len(running) < batch_size:
                number, request_id = waiting.pop(), str(next(ids))
                parameters = vllm.SamplingParams(
                    temperature=0,
                    max_tokens=min(models["max_tokens"][number], limit),
                    stop_token_ids=models["stop_token_ids"],
                    ignore_eos=True,
                    detokenize=False,
                )
                engine.add_request(request_id, {"prompt_token_ids": models["prompts"][number]}, parameters)
                running[request_id] = number
            for output in engine.step():
                if output.finished:
                    finished[running.pop(output.request_id)] = list(output.outputs[0].token_ids)
        return [finished[number] for number in numbers]

    return generate


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Libraries log to standard output; their lines must not come between the answers.
    os.dup2(2, 1)
    models = json.loads(sys.stdin.readline())
    generate = {"transformers": transformers_generate, "vllm": vllm_generate}[sys.argv[1]](models)
    numbers = list(range(len(models["prompts"])))
    warm: set[int] = set()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        batch_size = json.loads(line)["batch_size"]
        if batch_size not in warm:
            generate(numbers[:batch_size], batch_size, _WARM_UP_TOKENS)
            warm.add(batch_size)
        started = time.perf_counter()
        tokens = generate(numbers, batch_size, sys.maxsize)
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
