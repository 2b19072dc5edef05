"""The pair, served over HTTP by `spool serve --no-ray`: its start, speed and texts, and what deaths of workers cost.

The checkpoints are made on the device and saved, so that a server loads what any user's would be. Every figure is a
client's: it counts tokens as they arrive.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.decoding import prompts
from bench.gpu.engines import Bench
from bench.gpu.pair import SHAPES, Pair

if TYPE_CHECKING:
    from bench.served import Served

_AGREEMENT = 0.8
_PROMPT_TOKENS = 64
_DEATH_STREAMS = 8
_MEMORY_SECONDS = 0.25
_CALL_SECONDS = 120.0
_GREEDY = {"temperature": 0.0}
# The defaults of Qwen3's checkpoints.
_FILTERED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 7}
_PLAIN = {"spool": {"speculation": False}}
_DRAFTED = {"spool": {"draft_length": 3}}
# On this signal, a process with CUDA reads beyond an array: the device's context is lost.
_DEVICE_ASSERT = """
import signal

def fail(number, frame):
    import torch
    torch.zeros(1, device="cuda")[torch.tensor([1 << 20], device="cuda")]

signal.signal(signal.SIGUSR1, fail)
"""


@dataclass(slots=True)
class Answer:
    """The tokens of a request, and when they came: seconds, and how many. `drafted` and `accepted` is the server's
    count."""

    began: float
    drafted: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_seconds(self) -> float:
        return self.arrivals[0][0] - self.began

    @property
    def longest_gap(self) -> float:
        times = [when for when, _ in self.arrivals]
        return max((after - before for before, after in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many streams and tokens, and how long prompts are."""

    batches: tuple[int, ...]
    tokens: int
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, small: bool) -> Sizes:
        return cls((1, 4), 64, (200, 400)) if small else cls((1, 8, 32, 64, 256), 128, (2048, 8192, 32000))


class PairServer:
    """Serves the pair, and adds what it finds to the findings."""

    def __init__(self, bench: Bench, small: bool, folder: Path) -> None:
        self._bench = bench
        self._folder = folder
        self._sizes = Sizes.of(small)
        self._alone: dict[int, list[int]] = {}
        """Plain, greedy texts by the number of the prompt."""

    def run(self) -> None:
        """Raises what a server raises that does not start, and RuntimeError for an answer that is none."""
        try:
            self._save()
            with self._serving("draft inside", {"draft_in": "targets"}) as served:
                self._speeds(served, "draft inside", plain=True)
                self._sampled(served)
                self._prefill(served)
                self._death(served, "target killed", "target-0", signal.SIGKILL)
            with self._serving("draft worker", {"draft_in": "workers"}) as served:
                self._speeds(served, "draft worker", plain=False)
                self._death(served, "draft killed", "draft-0", signal.SIGKILL)
                if self._bench.is_gpu:
                    self._death(served, "device assert in the target", "target-0", signal.SIGUSR1)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self) -> None:
        """In a process of its own, which leaves nothing on the device."""
        bench, began = self._bench, time.perf_counter()
        bench.drop()
        arguments = bench.shape, str(bench.device), bench.dtype, self._folder
        process = get_context("spawn").Process(target=save_pair, args=arguments)
        process.start()
        try:
            process.join()
        finally:
            process.kill()  # where the time is over
        if process.exitcode:
            raise RuntimeError(f"the pair was not saved: exit code {process.exitcode}")
        size = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        bench.findings.add("pair saved", seconds=time.perf_counter() - began, gigabytes=size / 1e9)

    @contextmanager
    def _serving(self, name: str, models: dict[str, str]) -> Iterator[Served]:
        from bench.served import python_path, serving

        (self._folder / "sitecustomize.py").write_text(_DEVICE_ASSERT, encoding="utf-8")
        pair = {"target": str(self._folder / "target"), "draft": str(self._folder / "draft")}
        settings = {
            "models": {**pair, **models, "device": self._bench.device.type},
            "groups": {"target": {"environment": {"PYTHONPATH": python_path(self._folder)}}},
            "gateway": {"port": 8200, "grpc_port": 8201},
            "metrics": {"scheduler_address": None},
        }
        told: list[tuple[float, str]] = []
        began = time.perf_counter()

        def say(line: str) -> None:
            told.append((time.perf_counter() - began, line.replace(str(self._folder), "pair")))

        with Watch(self._bench.device) as watch, serving(settings, True, say) as served:
            self._bench.findings.add(
                f"started, {name}",
                seconds=served.seconds,
                stages=told,
                logged=_logged(served.log_folder),
                **watch.figures(),
            )
            yield served
            self._bench.findings.add(f"memory of {name}", **watch.figures())

    # --- what is measured ---------------------------------------------------------------------------------------------

    def _speeds(self, served: Served, name: str, plain: bool) -> None:
        """Greedy, by the number of streams: plain, with as many drafted tokens as pay, and with three."""
        modes: dict[str, dict[str, Any]] = {"auto": {}, "3 drafted": _DRAFTED}
        for batch in self._sizes.batches:
            for mode, fields in {**({"plain": _PLAIN} if plain else {}), **modes}.items():
                self._measure(served, f"{mode}, {name}", batch, {**_GREEDY, **fields})

    def _sampled(self, served: Served) -> None:
        for batch in self._sizes.batches[1:3]:
            texts = [
                self._measure(served, f"{mode}, top_k 20 and top_p 0.95", batch, {**_FILTERED, **fields}, greedy=False)
                for mode, fields in (("plain", _PLAIN), ("auto", {}))
            ]
            self._bench.findings.add(
                "top_k 20 and top_p 0.95", batch=batch, equal_texts=sum(map(list.__eq__, *texts)), texts=batch
            )

    def _prefill(self, served: Served) -> None:
        for context in self._sizes.contexts:
            # Seeds of their own, so that none begins with another that is cached.
            (answer,) = self._answers(served, self._prompts(1, context, seed=context), 1, {**_GREEDY, **_PLAIN})
            seconds = answer.first_seconds
            self._bench.findings.add(
                "prefill", context=context, first_token_seconds=seconds, tokens_per_second=context / seconds
            )

    def _death(self, served: Served, name: str, worker: str, number: signal.Signals) -> None:
        """Of a worker, a third into the texts of some streams, for which the draft is in use. All of them go on, with
        the same tokens."""
        tokens, came = self._sizes.tokens, threading.Event()
        died = 0.0

        def kill() -> None:
            nonlocal died
            came.wait(_CALL_SECONDS)
            died = time.perf_counter()
            os.kill(served.process_id(worker), number)

        def heard(place: int) -> None:
            if place >= tokens // 3:
                came.set()

        thread = threading.Thread(target=kill)
        thread.start()
        count = min(_DEATH_STREAMS, self._sizes.batches[-1])
        try:
            answers = self._answers(served, self._prompts(count), tokens, {**_GREEDY, **_DRAFTED}, heard)
        finally:
            came.set()
            thread.join()
        self._bench.findings.add(
            name,
            **self._compared(answers),
            drafted=sum(one.drafted for one in answers),
            longest_gap_seconds=max(one.longest_gap for one in answers),
            seconds_from_death_to_end=time.perf_counter() - died,
        )

    def _measure(
        self, served: Served, name: str, batch: int, fields: dict[str, Any], greedy: bool = True
    ) -> list[list[int]]:
        answers = self._answers(served, self._prompts(batch), self._sizes.tokens, fields)
        first = max(one.arrivals[0][0] for one in answers)
        last = min(one.arrivals[-1][0] for one in answers)
        together = [count for one in answers for when, count in one.arrivals if first < when <= last]
        self._bench.findings.add(
            name,
            batch=batch,
            tokens_per_second=sum(together) / (last - first) if last > first else None,
            first_token_seconds=statistics.median(one.first_seconds for one in answers),
            longest_gap_seconds=max(one.longest_gap for one in answers),
            drafted=sum(one.drafted for one in answers),
            accepted=sum(one.accepted for one in answers),
            **(self._compared(answers) if greedy else {}),
        )
        return [one.tokens for one in answers]

    def _compared(self, answers: Sequence[Answer]) -> dict[str, int]:
        """With the texts that the same prompts had first."""
        for number, one in enumerate(answers):
            self._alone.setdefault(number, one.tokens)
        return {
            "texts": len(answers),
            "equal_texts": sum(one.tokens == self._alone[number] for number, one in enumerate(answers)),
        }

    def _prompts(self, count: int, tokens: int = _PROMPT_TOKENS, seed: int = 6) -> list[list[int]]:
        return prompts(count, tokens, SHAPES[self._bench.shape]().target.vocab_size, seed)

    def _answers(
        self,
        served: Served,
        asked: Sequence[Sequence[int]],
        tokens: int,
        fields: dict[str, Any],
        heard: Callable[[int], None] = lambda place: None,
    ) -> list[Answer]:
        """All at once. `heard` is told how many tokens a stream has, each time that some come."""
        return asyncio.run(_all_answers(served.url, asked, {"max_tokens": tokens, **fields}, heard))


class Watch:
    """How much of the device's memory is in use by all its processes; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def figures(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {"used_gib": (total - free) / 2**30, "peak_gib": self._peak / 2**30, "total_gib": total / 2**30}

    def _look(self) -> None:
        while self._device.type == "cuda" and not self._ended.wait(_MEMORY_SECONDS):
            free, total = torch.cuda.mem_get_info(self._device)
            self._peak = max(self._peak, total - free)


def save_pair(shape: str, device: str, dtype: torch.dtype, folder: Path) -> None:
    """Checkpoints of target and draft, each with a tokenizer of one word for each token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    pair = Pair(SHAPES[shape](), torch.device(device), dtype)
    pair.set_agreement(_AGREEMENT)
    words = {f"w{number}": number for number in range(pair.successor.numel())}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))


async def _all_answers(
    url: str, asked: Sequence[Sequence[int]], fields: dict[str, Any], heard: Callable[[int], None]
) -> list[Answer]:
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_CALL_SECONDS, limits=limits) as http:
        (model,) = (await http.get("/v1/models")).raise_for_status().json()["data"]
        common = {"model": model["id"], "stream": True, "stream_options": {"include_usage": True}}
        common |= {"ignore_eos": True, "return_token_ids": True, **fields}

        async def answer(prompt: Sequence[int]) -> Answer:
            found = Answer(time.perf_counter())
            async with http.stream("POST", "/v1/completions", json={"prompt": list(prompt), **common}) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"in a stream: {event['error']}")
                    if usage := event.get("usage"):
                        found.drafted, found.accepted = usage["spool"]["drafted"], usage["spool"]["accepted"]
                    if tokens := [token for choice in event["choices"] for token in choice["token_ids"] or ()]:
                        found.tokens += tokens
                        found.arrivals.append((time.perf_counter(), len(tokens)))
                        heard(len(found.tokens))
            return found

        return list(await asyncio.gather(*map(answer, asked)))


def _logged(folder: Path) -> list[str]:
    """What workers say of their memory, as they planned it."""
    lines = [line for path in sorted(folder.glob("*.log")) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "MiB" in line]
