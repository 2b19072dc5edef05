"""Blocks about speed: plain decoding, speculation, long contexts, sampling and prefill."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.gpu.decoding import GREEDY, Rounds, Stream, decode, free, prefill, prompts
from bench.gpu.device import wait_for
from bench.gpu.engines import Bench, Engines
from spool.engine.drafting.inside_target import InsideDrafting
from spool.engine.drafting.model_drafting import ModelDrafting
from spool.scheduler.sampling import SamplingParameters

_PROMPT_TOKENS = 64
_WARM_UP = 4


def run_rounds(
    bench: Bench,
    engines: Engines,
    batch: int,
    rounds: int,
    draft_length: int = 0,
    sampling: SamplingParameters = GREEDY,
) -> Rounds:
    """Rounds of `batch` new streams, after a few that are not counted."""
    target, draft = engines.target, engines.draft
    vocabulary = target.description.vocabulary_size
    streams = [Stream(prompt) for prompt in prompts(batch, _PROMPT_TOKENS, vocabulary)]
    try:
        prefill(target, draft if draft_length else None, streams, target.description.max_num_batched_tokens)
        decode(target, draft, streams, _WARM_UP, draft_length, sampling)
        return decode(target, draft, streams, rounds, draft_length, sampling)
    finally:
        free(target, draft, streams)


def plain(bench: Bench, engines: Engines, name: str, batches: Sequence[int], rounds: int) -> dict[int, float]:
    """Tokens a second by batch size. A step's share is what reading the target's weights alone would take."""
    speeds = {}
    for batch in batches:
        found = run_rounds(bench, engines, batch, rounds)
        speeds[batch] = found.tokens_per_second
        times = found.milliseconds()
        reading = engines.weight_bytes / bench.read_bandwidth * 1000
        bench.findings.add(
            f"plain, {name}",
            batch=batch,
            tokens_per_second=found.tokens_per_second,
            step_ms=times["round_ms"],
            device_ms=times["target_device_ms"],
            host_ms=times["round_ms"] - times["target_device_ms"],
            read_share=reading / times["round_ms"],
        )
    return speeds


def speculation(
    bench: Bench,
    engines: Engines,
    name: str,
    speeds: dict[int, float],
    agreements: Sequence[float],
    lengths: Sequence[int],
    rounds: int,
    sampling: SamplingParameters = GREEDY,
) -> None:
    """`speeds`: of plain decoding by batch size, with the same sampling."""
    for agreement in agreements:
        engines.pair.set_agreement(agreement)
        for length in lengths:
            for batch, plain_speed in speeds.items():
                found = run_rounds(bench, engines, batch, rounds, length, sampling)
                bench.findings.add(
                    f"speculation, {name}",
                    agreement=agreement,
                    draft_length=length,
                    batch=batch,
                    ratio=found.tokens_per_second / plain_speed,
                    tokens_per_second=found.tokens_per_second,
                    tokens_per_round=found.tokens / batch / rounds,
                    accepted=found.accepted / max(found.drafted, 1),
                    **found.milliseconds(),
                )


def inside(bench: Bench, engines: Engines, name: str, batches: Sequence[int], rounds: int) -> None:
    """Plain decoding, and speculation with the draft inside the target's engine, which must give the same tokens."""
    target, length = engines.target, 3
    proposer = InsideDrafting(ModelDrafting(engines.draft, prefix_cache=False))
    engines.pair.set_agreement(0.8)
    for batch in batches:
        outputs, speeds = list[list[Stream]](), list[float]()
        for draft_length in (0, length):
            streams = [Stream(one) for one in prompts(batch, _PROMPT_TOKENS, target.description.vocabulary_size)]
            try:
                prefill(target, None, streams, target.description.max_num_batched_tokens)
                decode(target, None, streams, _WARM_UP, draft_length, inside=proposer)
                found = decode(target, None, streams, rounds, draft_length, inside=proposer)
            finally:
                free(target, None, streams)
            outputs.append(streams)
            speeds.append(found.tokens_per_second)
        pairs = [
            each for one, other in zip(*outputs, strict=True) for each in zip(one.output, other.output, strict=False)
        ]
        bench.findings.add(
            name,
            batch=batch,
            draft_length=length,
            ratio=speeds[1] / speeds[0],
            tokens_per_second=speeds[1],
            accepted=found.accepted / max(found.drafted, 1),
            tokens=len(pairs),
            equal_tokens=sum(one == other for one, other in pairs),
            **found.milliseconds(),
        )


def sampled(bench: Bench, engines: Engines, name: str, batches: Sequence[int], rounds: int) -> None:
    """Plain decoding and speculation at temperature 0.8."""
    sampling = SamplingParameters(temperature=0.8, seed=7)
    speeds = {}
    for batch in batches:
        found = run_rounds(bench, engines, batch, rounds, sampling=sampling)
        speeds[batch] = found.tokens_per_second
        bench.findings.add(
            f"plain at 0.8, {name}", batch=batch, tokens_per_second=found.tokens_per_second, **found.milliseconds()
        )
    speculation(bench, engines, f"{name}, at 0.8", speeds, (0.8,), (4,), rounds, sampling)


def long_contexts(bench: Bench, engines: Engines, name: str, contexts: Sequence[int], batches: Sequence[int]) -> None:
    """Prefill by chunks of the largest pass, and plain decoding after it."""
    vocabulary = engines.target.description.vocabulary_size
    for context in contexts:
        for batch in batches:
            streams = [Stream(prompt) for prompt in prompts(batch, context, vocabulary)]
            try:
                started = time.perf_counter()
                prefill(engines.target, None, streams, engines.target.description.max_num_batched_tokens)
                wait_for(bench.device)
                prefilled = time.perf_counter() - started
                decode(engines.target, None, streams, _WARM_UP)
                found = decode(engines.target, None, streams, 16)
            finally:
                free(engines.target, None, streams)
            bench.findings.add(
                f"long context, {name}",
                context=context,
                batch=batch,
                prefill_tokens_per_second=batch * context / prefilled,
                **found.milliseconds(),
            )
