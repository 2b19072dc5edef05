"""`spool replay`: computes what receipts say, in passes over many tokens, and compares bit by bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spool.deploy.errors import RunError, UsageError
from spool.deploy.offline.answer_text import compared, logprob_difference, text_difference
from spool.deploy.offline.parting import Parting, logprob_of, parting
from spool.deploy.offline.settings import ReplaySettings
from spool.deploy.progress import Reporter, report
from spool.deploy.workers import worker_devices
from spool.engine.cpu.isa import AUTO, available_isas
from spool.engine.description import EngineDescription
from spool.engine.errors import EngineError
from spool.engine.models.fetching import fetch_tokenizer
from spool.engine.models.source import ModelNotFoundError, resolve_model
from spool.engine.settings import DTYPES, KV_INT8, QUANTIZATIONS, EngineSettings
from spool.scheduler.messages import Role
from spool.services.launch.process_tuning import compute_environment, keep_freed_memory, keep_loaded_objects
from spool.services.receipts.fingerprint import differences, fingerprint_name
from spool.services.receipts.receipt import FoundReceipt, Receipt, ReceiptError, receipts_in
from spool.services.text.tokenizer import ModelTokenizer

# Without shapes that bits depend on, passes are large: they take less time for a token.
_TOKENS_OF_A_PASS = 384
# So likely must a receipt's token be for its log probability to be known where another one comes out.
_TOP_LOGPROBS = 1000


@dataclass(slots=True)
class Verdict:
    """Of one receipt, at its `place`; `reason` says where it is not what the target computes, None if it is, and
    `parting` by how much where another target made it. `logprobs`: of each token of the output. `compared`: what of its
    answer was compared beside tokens and logits, and what was not."""

    place: str
    tokens: int = 0
    reason: str | None = None
    parting: Parting | None = None
    logprobs: Sequence[float | None] | None = None
    compared: str = ""

    @property
    def equal(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A receipt, and the answer that it was found in."""

    verdict: Verdict
    receipt: Receipt
    found: FoundReceipt


def replay_receipts(settings: ReplaySettings) -> int:
    """Exit code 0 if the target computes every receipt again, bit by bit, else 1. Raises `UsageError`, `RunError`."""
    verdicts: list[Verdict] = []
    receipts: list[_Entry] = []
    for place, found in _read(settings.receipts):
        verdicts.append(Verdict(place))
        try:
            receipt = Receipt.from_json(found.data, settings.public_key)
        except ReceiptError as error:
            verdicts[-1].reason = str(error)
        else:
            verdicts[-1].tokens = len(receipt.output)
            receipts.append(_Entry(verdicts[-1], receipt, found))
    seconds = _replay(receipts, settings) if receipts else 0.0
    lines = [
        f"{one.place}: {f'equal, {one.tokens} tokens{one.compared}' if one.equal else one.reason}" for one in verdicts
    ]
    equal, tokens = sum(verdict.equal for verdict in verdicts), sum(verdict.tokens for verdict in verdicts)
    lines.append(f"{equal} of {len(verdicts)} receipts are equal; {tokens} tokens in {seconds:.1f} s")
    as_json = [asdict(verdict) | {"equal": verdict.equal} for verdict in verdicts]
    summary = {"command": "replay", "receipts": as_json, "tokens": tokens, "seconds": seconds}
    report(lines, summary if settings.json_output else None)
    return 0 if equal == len(verdicts) else 1


def _read(files: Iterable[Path]) -> Iterator[tuple[str, FoundReceipt]]:
    """Receipts, or answers that have some: one in a file, or one a line. Each with its place."""
    for file in files:
        try:
            # Lines of bytes: those of texts also end at characters that JSON texts may hold, such as U+2028.
            content = file.read_bytes()
            try:
                entries = [_parsed(content)]
            except ValueError:
                entries = [_parsed(line) for line in content.splitlines() if line.strip()]
            found = receipts_in(entries)
        except _RepeatedKeyError as error:
            raise UsageError(f"{file} {error}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{file} cannot be read as JSON or JSON lines: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            raise UsageError(f"{file} has choices that are no answer's: {error}") from error
        if all(each.data is None for each in found):
            raise UsageError(f"{file} holds no receipt")
        for number, each in enumerate(found, 1):
            yield str(file) if len(found) == 1 else f"{file}, receipt {number}", each


class _RepeatedKeyError(Exception):
    """The message names the key."""


def _parsed(text: bytes) -> Any:
    """JSON. Raises ValueError, RecursionError, _RepeatedKeyError."""

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _RepeatedKeyError(f"has an object with {key!r} twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=as_object)


def _replay(entries: Sequence[_Entry], settings: ReplaySettings) -> float:
    """Completes the verdicts; gives the seconds that it took once the target was loaded."""
    longest = max(len(entry.receipt.prompt) + len(entry.receipt.output) for entry in entries)
    try:
        engine_settings = _engine_settings(entries[0].receipt.fingerprint, settings, longest)
    except ValueError as error:
        raise RunError(
            f"{entries[0].verdict.place}: the fingerprint names no settings of an engine: {error}"
        ) from error
    # Libraries read it when they are imported, as the next lines do.
    os.environ.update(compute_environment(engine_settings.threads, engine_settings.cpu_isa))
    keep_freed_memory()
    from spool.engine.models.loading import load_target_engine
    from spool.engine.replay import KnownOutput, replay

    reporter = Reporter()
    try:
        tokenizer = _tokenizer(settings.target, reporter) if any(entry.found.choices for entry in entries) else None
        engine = load_target_engine(engine_settings, lambda *what: reporter.stage("target", *what))
    except (EngineError, ModelNotFoundError) as error:
        raise RunError(str(error)) from error
    keep_loaded_objects()
    known: dict[int, _Entry] = {}
    outputs = []
    for entry in entries:
        receipt = entry.receipt
        if unlike := differences(receipt.fingerprint, engine.description.fingerprint):
            entry.verdict.reason = f"fingerprint, in the receipt and of this target: {'; '.join(unlike)}"
            if fingerprint_name(receipt.fingerprint) != settings.against:
                continue
        if misfit := _misfit(receipt, engine.description):
            entry.verdict.reason = misfit
            continue
        outputs.append(KnownOutput(receipt.prompt, receipt.output, receipt.sampling, to_the_end=bool(unlike)))
        known[id(outputs[-1])] = entry
    shown = settings.logprobs or any(entry.found.logprobs for entry in entries)
    top = _TOP_LOGPROBS if settings.against else 0 if shown else None
    began = time.perf_counter()
    for done, (output, found) in enumerate(replay(engine, outputs, top), 1):
        entry = known[id(output)]
        verdict, receipt = entry.verdict, entry.receipt
        if settings.logprobs:
            verdict.logprobs = [logprob_of(*each) for each in zip(receipt.output, found.logprobs, strict=False)]
        if output.to_the_end and found.error is None:
            verdict.parting = parting(receipt, found.tokens, found.logits_digests, found.logprobs, entry.found.logprobs)
            verdict.reason = f"{verdict.reason}: {verdict.parting}" if verdict.parting.logits else None
        else:
            verdict.reason = found.error or receipt.difference(found.tokens, found.logits_digests)
        if verdict.reason is None and tokenizer is not None:
            logprobs = [each.logprob for each in found.logprobs]
            verdict.reason = text_difference(entry.found, receipt, tokenizer)
            verdict.reason = verdict.reason or logprob_difference(entry.found, receipt, logprobs, tokenizer)
            verdict.compared = compared(entry.found) if verdict.reason is None else ""
        reporter.run("replay", done, len(outputs), None)
    return time.perf_counter() - began


def _tokenizer(target: str, reporter: Reporter) -> ModelTokenizer:
    source = resolve_model(target, Role.TARGET)
    return ModelTokenizer(fetch_tokenizer(source, lambda *what: reporter.stage("target", *what)))


def _engine_settings(parts: Mapping[str, str], settings: ReplaySettings, longest: int) -> EngineSettings:
    """Those with which the target of a fingerprint computes. Raises ValueError."""
    isa, page_size = parts.get("kernels", "").split(" ")[0], int(parts.get("page_size", 16))
    tokens = int(parts.get("max_num_batched_tokens", _TOKENS_OF_A_PASS))
    # Another target's may be missing here.
    isa = isa if settings.against is None and isa in (each.name for each in available_isas()) else AUTO
    dtype, quantization = parts.get("dtype", AUTO), parts.get("quantization", AUTO)
    return EngineSettings(
        model=settings.target,
        dtype=dtype if dtype in DTYPES else AUTO,
        kv_cache_dtype=KV_INT8 if parts.get("kv_cache_dtype") == KV_INT8 else AUTO,
        quantization=quantization if quantization in QUANTIZATIONS else AUTO,
        device=worker_devices(settings.device, [1])[0],
        cpu_isa=isa,
        numerics="universal" if "numerics" in parts else AUTO,
        threads=int(parts.get("threads", 0)),
        page_size=page_size,
        # Every sequence of a pass but one ends with it, each on a page of its own at least.
        kv_pages=-(-longest // page_size) + tokens,
        max_num_batched_tokens=tokens,
        ignore_tensors=tuple(parts.get("ignore_tensors", "").split()),
        max_model_len=int(parts["max_model_len"]) if parts.get("max_model_len", "None") != "None" else None,
        prefix_cache=False,
    )


def _misfit(receipt: Receipt, target: EngineDescription) -> str | None:
    """What the target cannot compute at all."""
    for name, tokens in (("prompt_token_ids", receipt.prompt), ("output_token_ids", receipt.output)):
        for place, token in enumerate(tokens):
            if token >= target.vocabulary_size:
                return f"{name}[{place}] is {token}, must be below {target.vocabulary_size}"
    if (length := len(receipt.prompt) + len(receipt.output)) > target.max_sequence_length:
        return f"prompt and output have {length} tokens, must have at most {target.max_sequence_length}"
    return None
