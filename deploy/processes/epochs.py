"""Epochs of schedulers in a folder."""

from __future__ import annotations

from pathlib import Path


class FileEpochs:
    """A register for `EpochAuthority` that lasts as long as the folder: a file for each start of a scheduler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    async def taken(self) -> list[int]:
        return [int(file.name) for file in self._folder.iterdir()]

    async def take(self, number: int) -> bool:
        try:
            (self._folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
