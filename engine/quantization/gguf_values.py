"""Values under the keys of a GGUF file, checked. Knows no torch."""

from __future__ import annotations

import math

import numpy as np

from spool.engine.errors import UnsupportedModelError
from spool.engine.quantization.gguf_file import GgufFile


def count(file: GgufFile, key: str, default: int | None = None) -> int:
    """Raises UnsupportedModelError for what is no positive whole number, as all functions here do."""
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(file, key, value, "a positive number")
    return value


def positive(file: GgufFile, key: str, default: float | None = None) -> float:
    """The shortest number in decimals that float32, as files have it, does not tell from the one in the file."""
    value = file.metadata.get(key, default)
    if not isinstance(value, float) or not 0 < (short := shortest(value)) < math.inf:
        raise wrong(file, key, value, "a positive number")
    return short


def shortest(value: float) -> float:
    return float(str(np.float32(value)))


def layer_types(file: GgufFile, period: int) -> list[str]:
    """Of a model with a sliding window, as transformers names them: by the file's pattern, or else each `period`th
    layer sees everything."""
    kind = file.metadata["general.architecture"]
    layers, key = count(file, f"{kind}.block_count"), f"{kind}.attention.sliding_window_pattern"
    pattern = file.metadata.get(key, period)
    if not isinstance(pattern, list):
        period = count(file, key, period)
        pattern = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(pattern) != layers or not set(pattern) <= {0, 1}:
        raise wrong(file, key, pattern, f"a whole number, or {layers} flags, one for each layer")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def wrong(file: GgufFile, field: str, value: object, limit: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.path.name}: {field} is {value!r:.60}, must be {limit}")
