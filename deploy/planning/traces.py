"""Public traces of requests: of Mooncake, of Azure's LLM services, and BurstGPT.

- Mooncake (arXiv 2407.00079): JSON lines with `timestamp` in milliseconds, `input_length`, `output_length` and
  `hash_ids`, one for each 512 tokens of the prompt; equal ids in the same places mean equal beginnings.
- Azure (Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens and GeneratedTokens.
- BurstGPT (arXiv 2401.17644): CSV with Timestamp in seconds, Request tokens and Response tokens. Requests that got no
  answer have 0 response tokens, and are left out.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.errors import UsageError
from deploy.planning.traffic import PlannedRequest

_MOONCAKE_BLOCK = 512

Fields = Mapping[str, Any]


def read_trace(path: Path, limit: int) -> list[PlannedRequest]:
    """The first `limit` requests of a trace of any of the three formats, told apart by their fields.

    They are in the order of arrival, the first at 0. Raises `UsageError` naming file, line and field.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            found = _json_lines(path, file) if first.lstrip().startswith("{") else _csv_lines(file)
            requests = list(itertools.islice(_requests(path, found), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {path} cannot be read: {error}") from error
    if not requests:
        raise UsageError(f"trace {path} holds no requests")
    requests.sort(key=lambda request: request.arrival)
    begin = requests[0].arrival
    return [
        PlannedRequest(one.arrival - begin, one.prompt_tokens, one.output_tokens, one.blocks, one.block_tokens)
        for one in requests
    ]


def _json_lines(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Fields]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}") from error
            yield number, fields if isinstance(fields, dict) else {}


def _csv_lines(lines: Iterator[str]) -> Iterator[tuple[int, Fields]]:
    yield from enumerate(csv.DictReader(lines), 2)


def _requests(path: Path, lines: Iterator[tuple[int, Fields]]) -> Iterator[PlannedRequest]:
    line, read = 1, None
    try:
        for line, fields in lines:  # noqa: B007
            read = read or _reader(path, fields)
            request = read(fields)
            if request.prompt_tokens < 1:
                raise ValueError(f"the prompt has {request.prompt_tokens} tokens, must have at least 1")
            if request.output_tokens > 0:
                yield request
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        what = f"has no field {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}:{line}: {what}") from error


def _reader(path: Path, fields: Fields) -> Callable[[Fields], PlannedRequest]:
    for mark, read in (("hash_ids", _mooncake), ("ContextTokens", _azure), ("Request tokens", _burst_gpt)):
        if mark in fields:
            return read
    if "input_length" in fields:
        return _mooncake
    names = ", ".join(map(str, fields)) or "none"
    raise UsageError(
        f"{path} has the fields {names}; must have those of a Mooncake trace (timestamp, input_length, output_length, "
        "hash_ids), of an Azure one (TIMESTAMP, ContextTokens, GeneratedTokens) or of BurstGPT (Timestamp, Request "
        "tokens, Response tokens)"
    )


def _mooncake(fields: Fields) -> PlannedRequest:
    blocks = tuple(int(block) for block in fields.get("hash_ids") or ())
    prompt, output = int(fields["input_length"]), int(fields["output_length"])
    return PlannedRequest(float(fields["timestamp"]) / 1000, prompt, output, blocks, _MOONCAKE_BLOCK)


def _azure(fields: Fields) -> PlannedRequest:
    moment = datetime.fromisoformat(fields["TIMESTAMP"])
    arrival = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    return PlannedRequest(arrival, int(fields["ContextTokens"]), int(fields["GeneratedTokens"]))


def _burst_gpt(fields: Fields) -> PlannedRequest:
    return PlannedRequest(float(fields["Timestamp"]), int(fields["Request tokens"]), int(fields["Response tokens"]))
