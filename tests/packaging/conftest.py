"""The wheel, built once in a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import RUN_VARIABLE
from tests.support.wheels import BEST, built_from, copied_sources


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With kernels of this processor's best build alone: the others take minutes."""
    folder = Path(os.environ[RUN_VARIABLE]) / "wheel"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            scratch = folder.with_name("wheel-being-made")
            built_from(copied_sources(tmp_path_factory.mktemp("sources")), scratch, SPOOL_WHEEL_BUILDS=BEST)
            scratch.rename(folder)
    (built,) = folder.glob("*.whl")
    return built
