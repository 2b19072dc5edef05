"""The perplexity of a text by a model, as llama.cpp's program llama-perplexity counts it. JSON on the last line.

    python -m bench.perplexity MODEL TEXT [--quantization int8] [--kv-cache-dtype int8]
    llama-perplexity -m FILE.gguf -f TEXT -c 512

The text is cut into chunks of 512 tokens; of each, the second half is scored, given all tokens of the chunk before.
MODEL is a folder or a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from spool.deploy.progress import say
from spool.engine.kv.pages import PageTable
from spool.engine.models.fetching import fetch_model
from spool.engine.models.loading import load_target_engine
from spool.engine.models.source import resolve_model
from spool.engine.settings import EngineSettings
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.messages import PromptScoring, Role
from spool.scheduler.sampling import SamplingParameters
from spool.services.text.tokenizer import ModelTokenizer

CHUNK = 512
_FED = 128


def perplexity(engine: TargetEngine, tokens: list[int]) -> dict[str, float]:
    """Of the whole chunks among `tokens`."""
    scores: list[float] = []
    starts = range(0, len(tokens) - CHUNK + 1, CHUNK)
    for start in starts:
        scores += _scores(engine, tokens[start : start + CHUNK])
    return {"tokens": len(starts) * CHUNK, "scored": len(scores), "perplexity": math.exp(-sum(scores) / len(scores))}


def _scores(engine: TargetEngine, chunk: list[int]) -> list[float]:
    """Log probabilities of the second half."""
    row = VerifyRow(PageTable(), [], (), False, (), CHUNK, SamplingParameters())
    found: list[float] = []
    for fed in range(0, CHUNK, _FED):
        first, end = max(fed + 1, CHUNK // 2), min(fed + _FED + 1, CHUNK)
        scoring = PromptScoring(first, tuple(chunk[first:end]), 0) if first < end else None
        (outcome,) = engine.step([replace(row, tokens=chunk[fed : fed + _FED], scoring=scoring)]).rows
        found += [entry.logprob for entry in outcome.prompt_logprobs]
    engine.pool.free(row.table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()

    def progress(message: str, _: float | None) -> None:
        say(message)

    folder = str(fetch_model(resolve_model(str(asked.model), Role.TARGET), progress))
    settings = EngineSettings(
        folder,
        threads=asked.threads,
        quantization=asked.quantization,
        kv_cache_dtype=asked.kv_cache_dtype,
        kv_pages=CHUNK // 16 + 1,
        prefix_cache=False,
    )
    engine = load_target_engine(settings, progress)
    tokens = ModelTokenizer(Path(folder)).encode(asked.text.read_text(encoding="utf-8"))
    print(json.dumps({"quantization": engine.description.quantization, **perplexity(engine, tokens)}))


if __name__ == "__main__":
    main()
