"""The types of tensors that Spool reads from GGUF files, as ggml's source numbers and sizes them (ggml-common.h)."""

from __future__ import annotations

from typing import NamedTuple


class GgufType(NamedTuple):
    """A block of `values` numbers takes `size` bytes; codes are kept in `bits` bits (0: floats), with a scale for each
    `group` of them."""

    number: int
    values: int
    size: int
    bits: int = 0
    group: int = 0


TYPES = {
    "F32": GgufType(0, 1, 4),
    "F16": GgufType(1, 1, 2),
    "BF16": GgufType(30, 1, 2),
    "Q4_0": GgufType(2, 32, 18, 4, 32),
    "Q4_1": GgufType(3, 32, 20, 4, 32),
    "Q5_0": GgufType(6, 32, 22, 8, 32),
    "Q5_1": GgufType(7, 32, 24, 8, 32),
    "Q8_0": GgufType(8, 32, 34, 8, 32),
    "Q4_K": GgufType(12, 256, 144, 4, 32),
    "Q5_K": GgufType(13, 256, 176, 8, 32),
    "Q6_K": GgufType(14, 256, 210, 8, 16),
}
# Only named in errors.
_NOT_READ = {
    **{10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
NAMES = _NOT_READ | {type.number: name for name, type in TYPES.items()}
"""By number."""
