"""Sampling defaults that a model's author gave with the model."""

from __future__ import annotations

import json
from pathlib import Path

from services.gateway.settings import SamplingDefaults


def model_sampling_defaults(folder: Path) -> SamplingDefaults:
    """What generation_config.json says, OpenAI's defaults for the rest.

    Raises ValueError, naming the file, for values that cannot be used.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"holds a JSON {type(config).__name__}, must be an object")
        known = {name: config[name] for name in SamplingDefaults.model_fields if config.get(name) is not None}
        return SamplingDefaults.model_validate(known)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
