"""Shards on disk: rows of equal length that the target wrote, with its states. A file is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_SUFFIX = ".safetensors"
_SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [B, L] of token ids (int32) and their `TokenKind` (int8), with states [B, L, H] of the target.

    `features` are what the student's first layer reads, `final` what the head reads.
    """

    token_ids: Tensor
    kinds: Tensor
    features: Tensor
    final: Tensor


class Shard:
    """One file, read row by row: a folder of shards may be larger than memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = safe_open(path, framework="pt")
        self.rows, self.length = self._file.get_slice("token_ids").get_shape()
        self.seconds = float(self._file.metadata()[_SECONDS])
        """How long writing it took."""

    def read(self, first: int = 0, count: int | None = None) -> Rows:
        """`count` rows from `first` on; all that follow without a count."""
        end = self.rows if count is None else first + count
        return Rows(*(self._file.get_slice(name)[first:end] for name in Rows.__slots__))

    def token_ids_and_kinds(self) -> tuple[Tensor, Tensor]:
        return self._file.get_tensor("token_ids"), self._file.get_tensor("kinds")


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}{_SUFFIX}"


def open_shards(folder: Path) -> list[Shard]:
    """All shards in their order."""
    return [Shard(path) for path in sorted(folder.glob(f"[0-9]*{_SUFFIX}"))]


def store_shard(path: Path, rows: Rows, seconds: float) -> None:
    partial = path.with_name(f".{path.name}.partial")
    tensors = {name: getattr(rows, name).cpu().contiguous() for name in Rows.__slots__}
    save_file(tensors, partial, metadata={_SECONDS: f"{seconds:.3f}"})
    os.replace(partial, path)


def joined(parts: Iterator[Rows]) -> Rows:
    """The rows of all parts, which have one length."""
    found = list(parts)
    return Rows(*(torch.cat([getattr(part, name) for part in found]) for name in Rows.__slots__))
