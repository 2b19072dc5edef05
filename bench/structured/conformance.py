"""Structured output of many JSON schemas: the same with drafts and without, and valid.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    git clone https://github.com/guidance-ai/jsonschemabench
    spool serve --detach
    python -m bench.structured.conformance --schemas JSON-Schema-Test-Suite/tests/draft2020-12 \\
      --schemas jsonschemabench/maskbench/data --sample 500 --output bench/results/schema_conformance.json

Sends each schema to a running server four times: greedy and at temperature 0.8 with a seed, each time with drafts and
with `draft_length` 0. Both texts must be the same, token count and end included, and a text that ended by itself must
be valid, as `jsonschema` has it for draft 2020-12. Exit code 1 where texts differ, one is not valid, or the server
fails.

A schema is counted as valid only where its outputs at both temperatures ended by themselves. Where `max_tokens` cut
one, it is counted as cut, where the server refuses it, by the reason, and where `jsonschema` cannot judge by it, it is
named with the reason.

The folders come from elsewhere (bench/structured/schemas.py says in which forms), and the result has the URL and the
commit of their repositories. Of each folder with more schemas, a sample is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import referencing.exceptions

from bench.record import ask_git, commit_of, write_result
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


class FailedError(Exception):
    """The server failed; the message is what it says."""


@dataclass
class Report:
    """What became of schemas: `schemas` = `refused` + `cut` + `valid` + those of the lists, which can be in several.

    `valid_outputs` and `cut_outputs` count an output once for each temperature, not for each request; `tokens` are
    those with drafts, and `accepted` the ones of them that drafts had proposed.
    """

    schemas: int = 0
    refused: int = 0
    cut: int = 0
    valid: int = 0
    valid_outputs: int = 0
    cut_outputs: int = 0
    tokens: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unchecked: list[dict[str, Any]] = field(default_factory=list)
    """The validator cannot judge: it has no such references, or no such regular expressions."""
    failed: list[dict[str, Any]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    invalid: list[dict[str, Any]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.failed or self.differing or self.invalid)

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
    """Raises RefusedError for 400, and FailedError for other errors."""
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
    if response.is_error:
        raise FailedError(f"{response.status_code}: {response.text[:_REASON_CHARACTERS]}")
    answer = response.json()
    [choice], usage = answer["choices"], answer["usage"]
    text = choice["message"]["content"] or ""
    return Answer(text, choice["finish_reason"], usage["completion_tokens"], usage["spool"]["accepted"])


async def try_schema(
    client: httpx.AsyncClient, asked: Asked, bias: Mapping[int, float], schema: NamedSchema, report: Report
) -> None:
    report.schemas += 1
    valid = cut = 0
    for temperature in TEMPERATURES:
        where = {"schema": schema.name, "temperature": temperature}
        try:
            drafted = await ask(client, asked, bias, schema, temperature, DRAFT_LENGTH)
            plain = await ask(client, asked, bias, schema, temperature, 0)
        except RefusedError as refused:
            report.refused += 1
            report.reasons[_reason(str(refused))] += 1
            return
        except FailedError as failed:
            report.failed.append(where | {"error": str(failed)})
            continue
        report.tokens += drafted.tokens
        report.accepted += drafted.accepted
        if (drafted.text, drafted.finish_reason, drafted.tokens) != (plain.text, plain.finish_reason, plain.tokens):
            report.differing.append(where | {"drafted": asdict(drafted), "plain": asdict(plain)})
        elif plain.finish_reason != "stop":
            cut += 1
        else:
            valid += _is_valid(schema, plain.text, where, report)
    report.valid_outputs += valid
    report.cut_outputs += cut
    report.valid += valid == len(TEMPERATURES)
    report.cut += cut > 0 and valid + cut == len(TEMPERATURES)


def _is_valid(schema: NamedSchema, text: str, where: dict[str, Any], report: Report) -> bool:
    """Puts a text that is not, or may not be, into the report."""
    try:
        error = error_of(schema.content, text)
    except UncheckedError as reason:
        report.unchecked.append(where | {"reason": str(reason)})
        return False
    if error is not None:
        report.invalid.append(where | {"text": text, "error": error})
    return error is None


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


def sampled(schemas: Sequence[NamedSchema], count: int | None) -> list[NamedSchema]:
    """Those whose names have the lowest digests, so that one schema more changes no others; all without a count."""
    return sorted(schemas, key=lambda schema: sha256(schema.name.encode()).digest())[:count]


def source_of(folder: Path) -> dict[str, str]:
    """Where a folder's files come from, as git has it; no URL and commit outside a repository."""
    origin = ask_git(folder, "remote", "get-url", "origin")
    return {"repository": origin, "commit": commit_of(folder), "folder": ask_git(folder, "rev-parse", "--show-prefix")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, action="append", required=True, help="folder; may be given repeatedly")
    parser.add_argument("--sample", type=int, help="schemas of each folder (default all)")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1/")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--closing-bias", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("schema_conformance.json"))
    given = parser.parse_args()
    asked = Asked(given.model, given.max_tokens, given.closing_bias, given.seed)
    samples = {folder: sampled(read_schemas(folder), given.sample) for folder in given.schemas}
    reports: dict[Path, Report] = {}
    for folder, schemas in samples.items():
        reports[folder] = asyncio.run(measure(given.url, given.api_key, asked, schemas, given.concurrency))
        print(f"{folder}: {json.dumps(reports[folder].result())}", file=sys.stderr)
    result = asdict(asked) | {
        "temperatures": TEMPERATURES,
        "draft_lengths": (DRAFT_LENGTH, 0),
        "validator": f"jsonschema {version('jsonschema')}",
        "valid": sum(report.valid for report in reports.values()),
        "folders": [source_of(folder) | report.result() for folder, report in reports.items()],
    }
    write_result(given.output, shlex.join(["python", "-m", "bench.structured.conformance", *sys.argv[1:]]), result)
    return 0 if all(report.good for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
