"""Shards on disk: rows of equal length that the target wrote, with its states; and the batches that training reads.

Shards are written atomically: a file under its final name is complete.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench.distill.stages import derived_seed

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


class Batches:
    """Batches of about `tokens` tokens, the rows of a batch all of one length.

    Each pass over the shards reads every row once, in an order of its own. Batch i depends only on the shards, the
    seed and i.
    """

    def __init__(self, shards: Sequence[Shard], tokens: int, seed: int) -> None:
        self._shards = shards
        self._tokens = tokens
        self._seed = seed
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, shard in enumerate(shards):
            self._places[shard.length] += [(index, row) for row in range(shard.rows)]
        self._pass_number = -1
        self._order: list[list[tuple[int, int]]] = []
        self._begin_pass(0)

    def __getitem__(self, index: int) -> Rows:
        number, place = divmod(index, len(self._order))
        self._begin_pass(number)
        return joined(self._shards[shard].read(row, 1) for shard, row in self._order[place])

    def _begin_pass(self, number: int) -> None:
        if number == self._pass_number:
            return
        shuffle = random.Random(derived_seed(self._seed, "pass", number)).shuffle
        self._pass_number, self._order = number, []
        for length, places in sorted(self._places.items()):
            shuffled, count = list(places), max(1, self._tokens // length)
            shuffle(shuffled)
            self._order += [shuffled[first : first + count] for first in range(0, len(shuffled), count)]
        shuffle(self._order)
