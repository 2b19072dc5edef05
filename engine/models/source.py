"""From the name of a model to its folder, and the length that its configuration allows.

No torch here: names are resolved wherever settings are read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from spool.engine.quantization.gguf_file import part_paths
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import Role

DEMO = "demo"
DEMO_HEAD = "demo-head"
CACHE_VARIABLE = "SPOOL_CACHE"

# Raised when the way of building the demo models changes, so that folders built in an older one are built again.
DEMO_RECIPE = 2
DEMO_MARKER = "spool_demo.json"
GGUF_WEIGHTS = "model.gguf"
"""In a model folder, a file of the GGUF format that holds the weights."""
CHAT_TEMPLATE = "chat_template.jinja"
# A GGUF file says itself what they say of other models.
_NOT_BESIDE_GGUF = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
DRAFT_VOCABULARY = "draft_vocabulary.json"
"""In a draft's folder, the tokens that it may propose."""
TRAINED_LAYERS = "trained_layers.safetensors"
TRAINED_HEAD = "trained_head.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Weights in pickle files (.bin) are taken only from models that have no others.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the part of it that is done, in [0, 1]; None where that is not known."""


class ModelNotFoundError(SpoolError, ValueError):
    """The name is neither a built-in model, nor a folder or file with a model, nor a model that the hub has."""


class DemoPart(StrEnum):
    """The models that the demo is made of, by the names of their folders: a target, and what drafts for it, a model or
    a head."""

    TARGET = "demo-target"
    DRAFT = "demo-draft"
    HEAD = "demo-head"


_ASSETS = {DemoPart.DRAFT: (TRAINED_LAYERS, DRAFT_VOCABULARY), DemoPart.HEAD: (TRAINED_HEAD, DRAFT_VOCABULARY)}


class SourceKind(Enum):
    DEMO = "demo"
    FOLDER = "folder"
    GGUF = "gguf"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model for `role` comes from. `folder` is where it is or will be; None for one to be found on the hub or
    made of the GGUF file `gguf`, with the chat template in the file `template` if there is one."""

    name: str
    kind: SourceKind
    folder: Path | None
    role: Role
    gguf: Path | None = None
    template: Path | None = None

    @property
    def ready(self) -> bool:
        """Whether the model can be loaded without building or downloading anything."""
        if self.folder is None:
            return False
        return self.kind is not SourceKind.DEMO or demo_is_built(self.demo_part)

    @property
    def demo_part(self) -> DemoPart:
        """Of the demo."""
        if self.name == DEMO_HEAD:
            return DemoPart.HEAD
        return DemoPart.TARGET if self.role is Role.TARGET else DemoPart.DRAFT


def cache_folder() -> Path:
    """The folder for models Spool builds itself: `$SPOOL_CACHE`, or the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("spool"))


def demo_folder(part: DemoPart) -> Path:
    return cache_folder() / part.value


def demo_assets() -> Traversable:
    """What engine/demo/assets has of the demo models: what was trained, a draft vocabulary, and a chat template."""
    return resources.files("spool.engine.demo") / "assets"


def demo_chat_template() -> str:
    """The demo target's own chat template with tools beside; without tools, it writes the same."""
    return (demo_assets() / "chat_template.jinja").read_text(encoding="utf-8")


def demo_marker(part: DemoPart) -> dict[str, object]:
    """What the marker in the folder of a demo model says about how it was built.

    It names assets by their contents, so that a folder made of others is built again.
    """
    assets = [demo_assets() / name for name in _ASSETS.get(part, ())]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in assets}
    return {"recipe": DEMO_RECIPE, **({"assets": digests} if digests else {})}


def demo_is_built(part: DemoPart) -> bool:
    """Whether the demo model is there as it would be built now, with all its files in full length."""
    folder = demo_folder(part)
    try:
        marker = json.loads((folder / DEMO_MARKER).read_text(encoding="utf-8"))
        if any(marker.get(name) != value for name, value in demo_marker(part).items()):
            return False
        return all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False


def weights_path(folder: Path) -> Path:
    """The GGUF file of a model's folder, by the name that it has where it lies; `folder` itself where it has none."""
    file = folder / GGUF_WEIGHTS
    # One link only: what lies in a cache of downloads has its name, by which its other parts are found, there.
    return folder / file.readlink() if file.is_symlink() else file if file.is_file() else folder


def resolve_model(name: str, role: Role) -> ModelSource:
    """Finds out what `name` means: `demo`, `demo-head`, a folder, a GGUF file, or a hub id, looked up in the local hub
    cache only.

    Raises `ModelNotFoundError` for a name that cannot be any of them.
    """
    if name in (DEMO, DEMO_HEAD):
        demo = ModelSource(name, SourceKind.DEMO, None, role)
        return replace(demo, folder=demo_folder(demo.demo_part))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            return _gguf_in_folder(name, path, role)
        if not _has_weights(path):
            raise ModelNotFoundError(f"{name}: the folder holds no weights (*.safetensors, {GGUF_WEIGHTS})")
        return ModelSource(name, SourceKind.FOLDER, path.resolve(), role)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"{name}: no such file")
        return ModelSource(name, SourceKind.GGUF, None, role, path)
    if path.exists():
        raise ModelNotFoundError(f"{name} is a file, must be a folder with a Hugging Face model or a *.gguf file")
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{name}: no such folder, and not a hub id (organisation/model)")
    return ModelSource(name, SourceKind.HUB, _in_hub_cache(name), role)


def _gguf_in_folder(name: str, folder: Path, role: Role) -> ModelSource:
    """The model of the only GGUF file, in one part or several, in a folder without a configuration; a chat template may
    lie beside it."""
    files = sorted(folder.glob("*.gguf"))
    found = [path.name for path in files if part_paths(path)[0] == path] or [path.name for path in files]
    if not found:
        raise ModelNotFoundError(f"{name}: the folder holds no config.json and no GGUF file, so no model")
    if len(found) > 1:
        raise ModelNotFoundError(f"{name}: the folder holds {len(found)} GGUF files, name one: {', '.join(found[:4])}")
    for other in _NOT_BESIDE_GGUF:
        if (folder / other).exists():
            raise ModelNotFoundError(
                f"{name}: the folder holds {other}, which is not read beside a GGUF file: name {folder / found[0]}"
            )
    template = folder / CHAT_TEMPLATE
    return ModelSource(name, SourceKind.GGUF, None, role, folder / found[0], template if template.is_file() else None)


def public_name(name: str) -> str:
    """A model's name for those who must not learn where a server keeps its files: hub ids stay, paths are cut to their
    last part."""
    return name if _HUB_ID.fullmatch(name) else Path(name).name


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")) or (folder / GGUF_WEIGHTS).is_file()


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name}: no such folder, and not a hub id: {_first_line(error)}") from error
    # Other programs leave snapshots with a tokenizer only.
    return folder if (folder / "config.json").is_file() and _has_weights(folder) else None


def download_model(name: str, progress: Progress) -> Path:
    """The folder of a model from the hub. Raises `ModelNotFoundError`."""
    progress(f"downloading {name}", None)
    folder = _download(name, _HUB_FILES)
    if not _has_weights(folder):
        folder = _download(name, (*_HUB_FILES, "*.bin"))
    if not (folder / "config.json").is_file() or not _has_weights(folder):
        raise ModelNotFoundError(f"{name}: the hub has it, but without config.json or weights")
    return folder


def download_tokenizer(name: str, progress: Progress) -> Path:
    """A folder with the tokenizer and the configurations of a model on the hub. Raises `ModelNotFoundError`."""
    progress(f"downloading the tokenizer of {name}", None)
    return _download(name, ("*.json", "*.jinja"))


def _download(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name}: the hub gives it only to those who accepted its terms: accept them on the model's page and set "
            f"HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name}: no such folder, and the hub has no such model: check the name, or set HF_TOKEN if it is private"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        remedy = "check network and proxy (HTTPS_PROXY), or give the folder of a model"
        if isinstance(error, OSError) and is_full(error):
            remedy = "free some space, or set HF_HOME to another disk"
        raise ModelNotFoundError(
            f"{name}: no such folder, and not to be had from the hub: {_first_line(error)} ({remedy})"
        ) from error


def is_full(error: OSError) -> bool:
    """Whether a disk, a quota or the limit of a file's size is."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].removeprefix("Got: ") or type(error).__name__


def longest_sequence(positions: int, rope: object) -> int:
    """`positions` is the configuration's `max_position_embeddings`, and `rope` its `rope_parameters` (`rope_scaling` in
    older ones). YaRN scales the original length; many configurations leave `max_position_embeddings` as it was."""
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return positions
    return max(positions, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or positions)))
