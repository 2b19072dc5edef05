"""The engines that are measured, made of a pair in memory."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch

from bench.gpu.device import memory_gib, read_bandwidth
from bench.gpu.findings import Findings
from bench.gpu.pair import SHAPES, Pair
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.models.loading import draft_engine_of, target_engine_of
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine

_PAGE_SIZE = 16
# Tokens of KV: a batch of 8 with contexts of 8,192 tokens and what they are continued by.
_KV_TOKENS = {"cpu": 8192, "cuda": 72 << 10}


@dataclass(frozen=True, slots=True)
class Engines:
    """`weight_bytes`: what a pass of the target reads of its weights, all but the embedding."""

    target: TargetEngine
    draft: DraftEngine
    pair: Pair
    weight_bytes: int


@dataclass(slots=True)
class Bench:
    """What the blocks share. One pair of engines is in memory at a time."""

    device: torch.device
    dtype: torch.dtype
    shape: str
    findings: Findings
    _bandwidth: float = 0.0
    _name: str = ""
    _engines: Engines | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def read_bandwidth(self) -> float:
        """Bytes a second, measured once, while no engines take the device's memory."""
        if not self._bandwidth:
            self.drop()
            self._bandwidth = read_bandwidth(self.device)
        return self._bandwidth

    def settings(
        self, kv_tokens: int | None = None, cuda_graphs: bool = True, batched_tokens: int | None = None
    ) -> EngineSettings:
        return EngineSettings(
            "synthetic",
            str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            page_size=_PAGE_SIZE,
            kv_pages=(kv_tokens or _KV_TOKENS[self.device.type]) // _PAGE_SIZE,
            max_num_batched_tokens=batched_tokens,
            cuda_graphs=cuda_graphs,
        )

    def engines(self, name: str, cuda_graphs: bool = True, batched_tokens: int | None = None) -> Engines:
        """The engines of this name; built with a new pair, and all others dropped, if they are not in memory."""
        if self._name == name and self._engines is not None:
            return self._engines
        bandwidth = self.read_bandwidth
        self.drop()
        started = time.perf_counter()
        pair = Pair(SHAPES[self.shape](), self.device, self.dtype)
        weight_bytes = sum(weight.nbytes for weight in pair.target.parameters())
        weight_bytes -= pair.target.get_input_embeddings().weight.nbytes
        self.findings.add(
            f"pair for {name}",
            seconds=time.perf_counter() - started,
            weight_gb=weight_bytes / 1e9,
            read_ms=weight_bytes / bandwidth * 1000,
        )
        target, draft = self._load(name, pair, self.settings(None, cuda_graphs, batched_tokens))
        self._name, self._engines = name, Engines(target, draft, pair, weight_bytes)
        return self._engines

    def drop(self) -> None:
        """Frees the memory of the engines."""
        self._name, self._engines = "", None
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def _load(self, name: str, pair: Pair, settings: EngineSettings) -> tuple[TargetEngine, DraftEngine]:
        messages: list[str] = []
        started = time.perf_counter()
        target = target_engine_of(pair.target, settings, lambda word, _: messages.append(word))
        self._describe(f"target of {name}", target, time.perf_counter() - started, messages)
        started, messages = time.perf_counter(), []
        draft = draft_engine_of(pair.draft, settings, lambda word, _: messages.append(word))
        self._describe(f"draft of {name}", draft, time.perf_counter() - started, messages)
        return target, draft

    def _describe(self, what: str, engine: TargetEngine | DraftEngine, seconds: float, messages: list[str]) -> None:
        described = engine.description
        self.findings.add(
            what,
            seconds=seconds,
            graphed_row_counts=described.graphed_row_counts,
            attention=described.attention,
            exact_row_counts=described.exact_row_counts,
            messages=messages,
            **memory_gib(self.device),
        )
