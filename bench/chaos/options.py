"""What the commands that strike a served application share: which application it is, and how many streams it has."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="a spool.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="FIELD=VALUE")
    parser.add_argument("--clients", type=int, default=32, help="streams at once")
    parser.add_argument("--cases", type=int, default=32, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=128)


def overrides(arguments: argparse.Namespace, demo: Sequence[str]) -> list[str]:
    """Words for `--set` of `spool serve`; `demo` are those that the demo pair gets, which is served without a
    `--config`."""
    return [*(() if arguments.config is not None else demo), *arguments.overrides]


def environment_of(group: str, variables: Mapping[str, str]) -> list[str]:
    """Words for `--set` that give the group's workers these environment variables."""
    return [f"groups.{group}.environment.{name}={json.dumps(value)}" for name, value in variables.items()]
