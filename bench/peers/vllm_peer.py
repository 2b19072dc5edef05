"""vLLM as a peer of `spool bench offline`. Run by a Python that has vLLM and need not have Spool.

Speaks as bench/peers/transformers_peer.py does. Whether it drafts is said once, by `draft` in the first line, for vLLM
loads its draft with the target; the first line also says `most_rows`, the largest batch to come. A batch is kept full:
a prompt that is finished makes room for the next one at once, as in serving.
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

_WARM_UP_TOKENS = 8


def load(request: dict[str, Any]) -> Any:
    """vLLM's engine for what the first line says."""
    from vllm import LLM

    longest = max(len(prompt) + most for prompt, most in zip(request["prompts"], request["max_tokens"], strict=True))
    options: dict[str, Any] = {}
    if request["draft"]:
        options["speculative_config"] = {
            "model": request["draft"],
            "num_speculative_tokens": request["draft_length"],
            "method": "draft_model",
        }
    return LLM(
        model=request["target"],
        dtype=request["dtype"],
        max_model_len=longest + request["draft_length"] + 16,
        max_num_seqs=request["most_rows"],
        enable_prefix_caching=False,
        # Its worker processes poll while they are idle, which would slow down whoever is measured next.
        distributed_executor_backend="uni",
        **options,
    ).llm_engine


class Runner:
    """Keeps up to a batch of prompts in vLLM's engine until all are finished."""

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

    def _run(self, indices: list[int], batch_size: int, most: int | None = None) -> list[list[int]]:
        waiting = list(reversed(indices))
        running: dict[str, int] = {}
        finished: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and len(running) < batch_size:
                index = waiting.pop()
                running[self._enter(index, most)] = index
            for output in self._engine.step():
                if output.finished:
                    finished[running.pop(output.request_id)] = list(output.outputs[0].token_ids)
        return [finished[index] for index in indices]

    def _enter(self, index: int, most: int | None) -> str:
        from vllm import SamplingParams

        request = self._request
        self._ids += 1
        parameters = SamplingParams(
            temperature=0,
            max_tokens=min(request["max_tokens"][index], most or sys.maxsize),
            stop_token_ids=request["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": request["prompts"][index]}
        self._engine.add_request(str(self._ids), prompt, parameters)
        return str(self._ids)


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
    # vLLM logs to standard output; it must not come between the answers.
    os.dup2(2, 1)
    runner: Runner | None = None
    for line in lines_until_parent_ends():
        request = json.loads(line)
        if runner is None:
            import vllm

            runner = Runner(request)
            answer: dict[str, Any] = {"event": "ready", "version": vllm.__version__}
        else:
            answer = {"event": "measured", **runner.measure(**request)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
