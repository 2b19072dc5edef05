"""The synthetic pair of a benchmark: made once in its folder, and known again by what stands beside it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.gpu.settings import GpuBenchSettings
from bench.synthetic_pair import SHAPES, write_pair
from engine.errors import one_line
from engine.models.source import Progress

_FILE = "pair.json"


class PairError(Exception):
    """There is no pair as asked for, nor can it be made; one line that a user can act on."""


def ensure_pair(folder: Path, settings: GpuBenchSettings, progress: Progress) -> dict[str, Any]:
    """Makes `folder`/target and `folder`/draft where they are not there yet; what is known of the pair.

    The folder is there whole or not at all. Raises PairError where it holds something else or another pair, or the
    pair cannot be or takes no sequences so long, and RuntimeError where the agreement cannot be had.
    """
    if settings.shape not in SHAPES:
        raise PairError(f"shape is {settings.shape!r}, must be one of {', '.join(SHAPES)}")
    most = SHAPES[settings.shape]().target.max_position_embeddings
    if settings.longest > most:
        raise PairError(f"prompt_tokens and max_tokens make sequences of {settings.longest}, must be at most {most}")
    asked = {name: getattr(settings, name) for name in ("shape", "agreement", "seed", "dtype")}
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return _make(folder, settings, asked, progress)
    try:
        found: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PairError(f"{folder} is there but holds no {_FILE} of a pair; choose another folder") from error
    for name, value in asked.items():
        if found.get(name) != value:
            raise PairError(f"{folder} holds a pair with {name} {found.get(name)!r}, not {value!r}")
    return found


def _make(folder: Path, settings: GpuBenchSettings, asked: dict[str, Any], progress: Progress) -> dict[str, Any]:
    progress(f"making a pair of shape {settings.shape}, agreement {settings.agreement}", None)
    part = folder.with_name(f"{folder.name}.part")
    if part.exists():
        shutil.rmtree(part)
    try:
        pair = asdict(
            write_pair(
                part,
                SHAPES[settings.shape](),
                settings.agreement,
                seed=settings.seed,
                device=settings.device,
                dtype=getattr(torch, settings.dtype),
                draft_length=settings.draft_length,
            )
        )
    except ValueError as error:
        raise PairError(one_line(error)) from error
    # Where the two lie is no part of what they are.
    found = asked | {"found": {name: pair[name] for name in pair.keys() - {"target", "draft", "asked"}}}
    (part / _FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    part.rename(folder)
    return found
