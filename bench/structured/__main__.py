"""What structured output costs: steps of a batch with a grammar and of one without, in turns. JSON on the last line.

    python -m bench.structured --target demo --threads 2

Both batches continue the same prompts on one engine, first a token at a time, then with the tokens of that as drafts,
which are all accepted. Tokens a second of two runs differ by what else the machine does meanwhile; steps next to each
other in time differ less.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.kv.pages import PageTable
from engine.models.fetching import fetch_model
from engine.models.loading import load_target_engine
from engine.models.source import resolve_model
from engine.sampling.grammars import GrammarState
from engine.settings import EngineSettings
from engine.steps import VerifyRow
from engine.target import TargetEngine
from scheduler.messages import Role
from scheduler.sampling import Grammar, SamplingParameters
from services.gateway.grammar_check import definition
from services.text.tokenizer import ModelTokenizer

# Never complete, so that both batches go on as long.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "likes": {"enum": ["tea", "milk"]}},
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    },
}
QUESTION = "List the people of village {number} as JSON: names, ages, and whether they like tea or milk."
_WARM_UP = 5


@dataclass(frozen=True)
class StructurePrice:
    """`ratio` is the geometric mean, over pairs, of a structured step's time over a free one's; `error` its standard
    error. Steps commit `sequences` x `tokens_each` tokens; times are medians in milliseconds, of the whole step."""

    sequences: int
    tokens_each: int
    pairs: int
    structured_ms: float
    free_ms: float
    structured_tokens_per_second: float
    free_tokens_per_second: float
    ratio: float
    error: float

    @classmethod
    def of(cls, sequences: int, tokens_each: int, structured: Sequence[float], free: Sequence[float]) -> StructurePrice:
        """Of seconds of at least two pairs of steps, pair by pair."""
        logarithms = [math.log(one / two) for one, two in zip(structured, free, strict=True)]
        ours, others = statistics.median(structured), statistics.median(free)
        tokens = sequences * tokens_each
        return cls(
            sequences=sequences,
            tokens_each=tokens_each,
            pairs=len(logarithms),
            structured_ms=1000 * ours,
            free_ms=1000 * others,
            structured_tokens_per_second=tokens / ours,
            free_tokens_per_second=tokens / others,
            ratio=math.exp(statistics.mean(logarithms)),
            error=statistics.stdev(logarithms) / math.sqrt(len(logarithms)),
        )


class Batch:
    """The same prompts, continued with one set of sampling parameters."""

    def __init__(self, engine: TargetEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParameters) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self.outputs: list[list[int]] = []
        self._tables: list[PageTable] = []
        self._states: list[GrammarState] = []

    def begin(self) -> None:
        """Prefills, one prompt after the other; the first tokens are sampled."""
        self._tables = [PageTable() for _ in self._prompts]
        self._states = [GrammarState() for _ in self._prompts]
        self.outputs = [[] for _ in self._prompts]
        for index, prompt in enumerate(self._prompts):
            self._run([index], [prompt], [()])

    def step(self, drafts: Sequence[Sequence[int]]) -> None:
        self._run(range(len(self._prompts)), [output[-1:] for output in self.outputs], drafts)

    def end(self) -> None:
        for table in self._tables:
            self._engine.pool.free(table)

    def _run(self, which: Sequence[int], tokens: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> None:
        rows = [
            VerifyRow(
                table=self._tables[index],
                tokens=fed,
                draft_tokens=drafted,
                sample=True,
                history=[*self._prompts[index], *self.outputs[index]],
                prompt_length=len(self._prompts[index]),
                sampling=self._sampling,
                grammar_state=self._states[index],
            )
            for index, fed, drafted in zip(which, tokens, drafts, strict=True)
        ]
        for index, outcome in zip(which, self._engine.step(rows).rows, strict=True):
            if outcome.error is not None:
                raise RuntimeError(outcome.error)
            self.outputs[index] += outcome.tokens


def price(structured: Batch, free: Batch, drafts: Sequence[Sequence[Sequence[int]]], pairs: int) -> StructurePrice:
    """Steps that verify what `drafts` have for each batch and sequence, so many tokens at a time as one pair of steps
    in `pairs` takes; without drafts, one token at a time."""
    batches = (structured, free)
    taken: list[list[float]] = [[], []]
    for batch in batches:
        batch.begin()
    each = len(drafts[0][0]) // (pairs + _WARM_UP) if drafts else 1
    for pair in range(pairs + _WARM_UP):
        for which in (0, 1) if pair % 2 else (1, 0):
            batch = batches[which]
            proposed: list[Sequence[int]] = [() for _ in batch.outputs]
            if drafts:
                lengths = [len(output) for output in batch.outputs]
                proposed = [
                    known[length : length + each - 1] for known, length in zip(drafts[which], lengths, strict=True)
                ]
            started = time.perf_counter()
            batch.step(proposed)
            if pair >= _WARM_UP:
                taken[which].append(time.perf_counter() - started)
    for batch in batches:
        batch.end()
    return StructurePrice.of(len(structured.outputs), each, *taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pairs", type=int, default=200)
    arguments = parser.parse_args()
    folder = fetch_model(resolve_model(arguments.target, Role.TARGET), lambda *_: None)
    tokenizer = ModelTokenizer(folder)
    # A free answer that ends goes on after it, with whatever the model then says.
    free = SamplingParameters(temperature=arguments.temperature, seed=1)
    grammar = Grammar(definition("json_schema", json.dumps(SCHEMA)), tokenizer.stop_token_ids)
    structured = SamplingParameters(temperature=arguments.temperature, seed=1, grammar=grammar)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": QUESTION.format(number=number)}], add_generation_prompt=True)
        for number in range(arguments.batch_size)
    ]
    settings = EngineSettings(arguments.target, dtype=arguments.dtype, threads=arguments.threads, kv_pages=2048)
    engine = load_target_engine(settings, lambda message, _: print(message, file=sys.stderr))
    batches = Batch(engine, prompts, structured), Batch(engine, prompts, free)
    prices = [price(*batches, [], arguments.pairs)]
    known = [[list(output) for output in batch.outputs] for batch in batches]
    fewer = (arguments.pairs + _WARM_UP) // (arguments.draft_length + 1) - _WARM_UP
    if fewer >= 2:
        prices.append(price(*batches, known, fewer))
    for one in prices:
        print(f"{one.sequences} x {one.tokens_each} tokens: {one.ratio:.3f} +- {one.error:.3f}", file=sys.stderr)
    print(json.dumps(vars(arguments) | {"steps": [asdict(one) for one in prices]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
