"""The ranks of a worker as threads of one process: they compute and exchange what processes would."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spool.engine.models import loading, reading
from spool.engine.models.loading import load_target_engine, run_rank
from spool.engine.parallel.ranks import Ranks
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine

# Ends the other ranks.
_NO_ORDER = 99


class BrokenRanksError(AssertionError):
    """The ranks could not go on together."""


def _broken(reason: str) -> None:
    raise BrokenRanksError(reason)


@contextmanager
def target_of_ranks(settings: EngineSettings) -> Iterator[TargetEngine]:
    """A target engine whose other ranks run until the block ends."""
    # transformers replaces functions of torch while a model loads, so that two cannot do so at the same time.
    one_at_a_time, join_ranks = threading.Lock(), loading.join_ranks
    joined: dict[int, Ranks] = {}

    def alone(read: Callable[..., object]) -> Callable[..., object]:
        def read_alone(*arguments: object) -> object:
            with one_at_a_time:
                return read(*arguments)

        return read_alone

    def join(folder: Path, rank: int, *arguments: object) -> Ranks:
        joined[rank] = join_ranks(folder, rank, *arguments)  # type: ignore[arg-type]
        return joined[rank]

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "read_part", alone(reading.read_part))
        patch.setattr(reading, "build_model", alone(reading.build_model))
        patch.setattr(loading, "join_ranks", join)

        def follow(rank: int) -> None:
            with pytest.raises(ValueError, match=str(_NO_ORDER)):
                run_rank(settings, rank, Path(folder), lambda: None)

        others = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, settings.tensor_parallel_size)]

        def start() -> tuple[Path, Callable[[str], None]]:
            for other in others:
                other.start()
            return Path(folder), _broken

        engine, first = load_target_engine(settings, lambda *_: None, start), joined[0]
        yield engine
        first.send([_NO_ORDER])
        for other in others:
            other.join()
