"""Brings a model to this machine: builds the demo, makes a folder of a GGUF file, or downloads from the hub.

Knows no torch.
"""

from __future__ import annotations

from pathlib import Path

from spool.engine.models.source import DemoPart, ModelSource, Progress, SourceKind, download_model, download_tokenizer


def fetch_model(source: ModelSource, progress: Progress) -> Path:
    """Makes the model of `source` loadable, building or downloading it where needed, and returns its folder.

    Raises `ModelNotFoundError` if the hub does not have it, `DemoBuildError` if the demo cannot be
    built, `UnsupportedModelError` for a GGUF file that cannot be served.
    """
    if source.ready and source.folder is not None:
        return source.folder
    if source.kind is SourceKind.DEMO:
        from spool.engine.demo.build import build_demo_models

        return build_demo_models(progress, (DemoPart.TARGET, source.demo_part))[source.demo_part]
    if source.gguf is not None:
        from spool.engine.quantization.gguf_folder import gguf_folder

        return gguf_folder(source.gguf, progress, source.template)
    return download_model(source.name, progress)


def fetch_tokenizer(source: ModelSource, progress: Progress) -> Path:
    """A folder with the model's tokenizer and configurations: nothing else is downloaded from the hub. Raises as
    `fetch_model`."""
    if source.kind is SourceKind.HUB and source.folder is None:
        return download_tokenizer(source.name, progress)
    return fetch_model(source, progress)
