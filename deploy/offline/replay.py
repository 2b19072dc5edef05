"""`spool replay`: computes what receipts say, in passes over many tokens, and compares bit by bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import RunError, UsageError
from deploy.options import ReplaySettings
from deploy.progress import Reporter, say
from deploy.workers import worker_devices
from engine.cpu.isa import AUTO, CPU_ISAS
from engine.errors import EngineError
from engine.models.source import ModelNotFoundError
from engine.settings import DTYPES, KV_INT8, QUANTIZATIONS, EngineSettings
from services.launch.process_tuning import compute_environment
from services.receipts.fingerprint import differences
from services.receipts.receipt import Receipt, ReceiptError, receipts_in

# Without shapes that bits depend on, passes are large: they take less time for a token.
_TOKENS_OF_A_PASS = 384


@dataclass(slots=True)
class Verdict:
    """Of one receipt, at its `place`; `reason` says where it is not what the target computes, None if it is.
    `logprobs`: of each token of the output."""

    place: str
    tokens: int = 0
    reason: str | None = None
    logprobs: Sequence[float] | None = None

    @property
    def equal(self) -> bool:
        return self.reason is None


def replay_receipts(settings: ReplaySettings) -> int:
    """Exit code 0 if the target computes every receipt again, bit by bit, else 1. Raises `UsageError`, `RunError`."""
    verdicts: list[Verdict] = []
    receipts: list[tuple[Verdict, Receipt]] = []
    for place, data in _read(settings.receipts):
        verdicts.append(Verdict(place))
        try:
            receipt = Receipt.from_json(data, settings.public_key)
        except ReceiptError as error:
            verdicts[-1].reason = str(error)
        else:
            verdicts[-1].tokens = len(receipt.output)
            receipts.append((verdicts[-1], receipt))
    seconds = _replay(receipts, settings) if receipts else 0.0
    for verdict in verdicts:
        say(f"{verdict.place}: {f'equal, {verdict.tokens} tokens' if verdict.equal else verdict.reason}")
    equal, tokens = sum(verdict.equal for verdict in verdicts), sum(verdict.tokens for verdict in verdicts)
    say(f"{equal} of {len(verdicts)} receipts are equal; {tokens} tokens in {seconds:.1f} s")
    if settings.json_output:
        found = [
            {name: getattr(verdict, name) for name in ("place", "equal", "tokens", "reason", "logprobs")}
            for verdict in verdicts
        ]
        print(json.dumps({"command": "replay", "receipts": found, "tokens": tokens, "seconds": seconds}), flush=True)
    return 0 if equal == len(verdicts) else 1


def _read(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Receipts, or answers that have some: one in a file, or one a line."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            try:
                entries = [json.loads(text)]
            except ValueError:
                entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read as JSON or JSON lines: {error}") from error
        found = [receipt for entry in entries for receipt in receipts_in(entry)]
        if not found:
            raise UsageError(f"{file} holds no receipt")
        for number, data in enumerate(found, 1):
            yield str(file) if len(found) == 1 else f"{file}, receipt {number}", data


def _replay(receipts: Sequence[tuple[Verdict, Receipt]], settings: ReplaySettings) -> float:
    """Completes the verdicts; gives the seconds that it took once the target was loaded."""
    longest = max(len(receipt.prompt) + len(receipt.output) for _, receipt in receipts)
    try:
        engine_settings = _engine_settings(receipts[0][1].fingerprint, settings, longest)
    except ValueError as error:
        raise RunError(f"{receipts[0][0].place}: the fingerprint names no settings of an engine: {error}") from error
    # Libraries read it when they are imported, as the next lines do.
    os.environ.update(compute_environment(engine_settings.threads, engine_settings.cpu_isa))
    from engine.models.loading import load_target_engine
    from engine.replay import KnownOutput, replay

    with Reporter() as reporter:
        try:
            engine = load_target_engine(engine_settings, lambda *what: reporter.stage("target", *what))
        except (EngineError, ModelNotFoundError) as error:
            raise RunError(str(error)) from error
        alike: dict[int, tuple[Verdict, Receipt]] = {}
        outputs = []
        for verdict, receipt in receipts:
            if unlike := differences(receipt.fingerprint, engine.description.fingerprint):
                verdict.reason = f"fingerprint, in the receipt and of this target: {'; '.join(unlike)}"
                continue
            outputs.append(KnownOutput(receipt.prompt, receipt.output, receipt.sampling))
            alike[id(outputs[-1])] = verdict, receipt
        began = time.perf_counter()
        for done, (output, found) in enumerate(replay(engine, outputs, 0 if settings.logprobs else None), 1):
            verdict, receipt = alike[id(output)]
            verdict.reason = found.error or _difference(receipt, found.tokens, found.logits_digests)
            if settings.logprobs:
                verdict.logprobs = [entry.logprob for entry in found.logprobs]
            reporter.run("replay", done, len(outputs), None)
        return time.perf_counter() - began


def _engine_settings(parts: Mapping[str, str], settings: ReplaySettings, longest: int) -> EngineSettings:
    """Those with which the target of a fingerprint computes. Raises ValueError."""
    isa, page_size = parts.get("kernels", "").split(" ")[0], int(parts.get("page_size", 16))
    tokens = int(parts.get("max_num_batched_tokens", _TOKENS_OF_A_PASS))
    dtype, quantization = parts.get("dtype", AUTO), parts.get("quantization", AUTO)
    return EngineSettings(
        model=settings.target,
        dtype=dtype if dtype in DTYPES else AUTO,
        kv_cache_dtype=KV_INT8 if parts.get("kv_cache_dtype") == KV_INT8 else AUTO,
        quantization=quantization if quantization in QUANTIZATIONS else AUTO,
        device=worker_devices(settings.device, [1])[0],
        cpu_isa=isa if isa in CPU_ISAS else AUTO,
        threads=int(parts.get("threads", 0)),
        page_size=page_size,
        # Every sequence of a pass but one ends with it, each on a page of its own at least.
        kv_pages=-(-longest // page_size) + tokens,
        max_num_batched_tokens=tokens,
        max_model_len=int(parts["max_model_len"]) if parts.get("max_model_len", "None") != "None" else None,
        prefix_cache=False,
    )


def _difference(receipt: Receipt, tokens: Sequence[int], digests: Sequence[int]) -> str | None:
    """The first place where something else comes out."""
    for place, (token, digest) in enumerate(zip(tokens, digests, strict=True)):
        known = receipt.output[place], receipt.logits_digests[place]
        if known != (token, digest):
            return (
                f"output token {place} is {known[0]} of logits with the digest {known[1]:016x} in the receipt, and "
                f"{token} of logits with the digest {digest:016x} here"
            )
    return None
