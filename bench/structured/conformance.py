"""Structured output of many JSON schemas: the same with drafts and without, and valid.

    spool serve --detach
    python -m bench.structured.conformance --schemas JSON-Schema-Test-Suite/tests/draft2020-12 \\
      --schemas maskbench/data --sample 400 --output bench/results/schema_conformance.json

Sends each schema to a running server four times: greedy and at temperature 0.8 with a seed, each time with drafts and
with `draft_length` 0. Both texts must be the same, token count and end included. A text that ended by itself must be
valid, as `jsonschema` has it for draft 2020-12; one that `max_tokens` cut is only counted. Schemas that the server
refuses are counted by its reason. Exit code 1 where texts differ, or one is not valid.

The folders come from elsewhere (bench/structured/schemas.py says in which forms); of each folder with more schemas, a
sample is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import referencing.exceptions

from bench.record import write_result
from bench.structured.schemas import NamedSchema, read_schemas

DRAFT_LENGTH = 4
TEMPERATURES = (0.0, 0.8)
CLOSING = ('"', '"}', '"]', "}", "]", "}}", "]}")
QUESTION = "Write a short example of JSON that fits this schema:\n{schema}"
_SCHEMA_CHARACTERS = 600
"""How much of a schema the question shows: its beginning, so that prompts stay short."""
_REASONS = 40
_REASON_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Asked:
    """`closing_bias` is added to the logits of tokens that close texts, lists and objects, since small models that are
    left to themselves seldom come to an end."""

    model: str
    max_tokens: int
    closing_bias: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    finish_reason: str
    tokens: int
    accepted: int
    """Of the tokens, those that drafts had proposed."""


class RefusedError(Exception):
    """The server takes no such schema; the message is its reason."""


@dataclass
class Report:
    """What became of schemas. Outputs are counted once for each schema and temperature, not for each request."""

    schemas: int = 0
    refused: int = 0
    finished: int = 0
    valid: int = 0
    cut: int = 0
    unchecked: int = 0
    """Finished, but the validator cannot judge: it has no such references, or no such regular expressions."""
    tokens: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    differing: list[dict[str, Any]] = field(default_factory=list)
    invalid: list[dict[str, Any]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.differing and not self.invalid

    def result(self) -> dict[str, Any]:
        """In the form of bench/results/."""
        return asdict(self) | {"reasons": dict(self.reasons.most_common(_REASONS))}


async def closing_tokens(client: httpx.AsyncClient, model: str) -> list[int]:
    """Those of `CLOSING` that are one token of the model. Raises httpx.HTTPStatusError."""
    found = []
    for text in CLOSING:
        response = await client.post("../tokenize", json={"model": model, "prompt": text, "add_special_tokens": False})
        tokens: list[int] = response.raise_for_status().json()["tokens"]
        found += tokens if len(tokens) == 1 else []
    return found


async def ask(
    client: httpx.AsyncClient,
    asked: Asked,
    bias: Mapping[int, float],
    schema: NamedSchema,
    temperature: float,
    drafts: int,
) -> Answer:
    """Raises RefusedError, or httpx.HTTPStatusError for other answers than 200 and 400."""
    shown = json.dumps(schema.content)[:_SCHEMA_CHARACTERS]
    body = {
        "model": asked.model,
        "messages": [{"role": "user", "content": QUESTION.format(schema=shown)}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "asked", "schema": schema.content}},
        "temperature": temperature,
        "seed": asked.seed,
        "max_tokens": asked.max_tokens,
        "logit_bias": bias,
        "spool": {"draft_length": drafts},
    }
    response = await client.post("chat/completions", json=body)
    if response.status_code == httpx.codes.BAD_REQUEST:
        raise RefusedError(response.json()["error"]["message"])
    response.raise_for_status()
    answer = response.json()
    [choice], usage = answer["choices"], answer["usage"]
    text = choice["message"]["content"] or ""
    return Answer(text, choice["finish_reason"], usage["completion_tokens"], usage["spool"]["accepted"])


async def try_schema(
    client: httpx.AsyncClient, asked: Asked, bias: Mapping[int, float], schema: NamedSchema, report: Report
) -> None:
    report.schemas += 1
    for temperature in TEMPERATURES:
        try:
            drafted = await ask(client, asked, bias, schema, temperature, DRAFT_LENGTH)
            plain = await ask(client, asked, bias, schema, temperature, 0)
        except RefusedError as refused:
            report.refused += 1
            report.reasons[_reason(str(refused))] += 1
            return
        report.tokens += drafted.tokens
        report.accepted += drafted.accepted
        where = {"schema": schema.name, "temperature": temperature}
        if (drafted.text, drafted.finish_reason, drafted.tokens) != (plain.text, plain.finish_reason, plain.tokens):
            report.differing.append(where | {"drafted": asdict(drafted), "plain": asdict(plain)})
        if plain.finish_reason != "stop":
            report.cut += 1
            continue
        report.finished += 1
        try:
            error = error_of(schema.content, plain.text)
        except UncheckedError:
            report.unchecked += 1
            continue
        if error is None:
            report.valid += 1
        else:
            report.invalid.append(where | {"text": plain.text, "error": error})


class UncheckedError(Exception):
    """The validator cannot judge by this schema."""


def error_of(schema: dict[str, Any] | bool, text: str) -> str | None:
    """Why a text is no JSON that the schema describes; None where it is. Raises UncheckedError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    try:
        found = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    except (referencing.exceptions.Unresolvable, re.error, jsonschema.exceptions.UnknownType) as error:
        raise UncheckedError(str(error)) from error
    return None if found is None else found.message


def _reason(message: str) -> str:
    reason = message.partition("cannot be used: ")[2] or message
    return reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:_REASON_CHARACTERS]} ..."


async def measure(url: str, key: str, asked: Asked, schemas: Sequence[NamedSchema], concurrency: int) -> Report:
    """Raises httpx.HTTPError where the server fails."""
    report = Report()
    waiting = list(reversed(schemas))
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600) as client:
        bias = dict.fromkeys(await closing_tokens(client, asked.model), asked.closing_bias)

        async def work() -> None:
            while waiting:
                await try_schema(client, asked, bias, waiting.pop(), report)
                if report.schemas % 50 == 0:
                    print(f"{report.schemas} of {len(schemas)} schemas", file=sys.stderr, flush=True)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(work())
    return report


def sampled(schemas: list[NamedSchema], count: int | None, seed: int) -> list[NamedSchema]:
    """Some of them, in their order; all without a count."""
    if count is None or count >= len(schemas):
        return schemas
    places = sorted(random.Random(seed).sample(range(len(schemas)), count))
    return [schemas[place] for place in places]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, action="append", required=True, help="folder; may be given repeatedly")
    parser.add_argument("--sample", type=int, help="schemas of each folder (default all)")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1/")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--closing-bias", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("schema_conformance.json"))
    given = parser.parse_args()
    asked = Asked(given.model, given.max_tokens, given.closing_bias, given.seed)
    folders = {folder: sampled(read_schemas(folder), given.sample, given.seed) for folder in given.schemas}
    result: dict[str, Any] = asdict(asked) | {"folders": {}}
    good = True
    for folder, schemas in folders.items():
        report = asyncio.run(measure(given.url, given.api_key, asked, schemas, given.concurrency))
        good = good and report.good
        result["folders"][folder.name] = report.result()
        print(f"{folder}: {json.dumps(report.result())}", file=sys.stderr)
    command = " ".join(["python -m bench.structured.conformance", *sys.argv[1:]])
    write_result(given.output, command, result)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
