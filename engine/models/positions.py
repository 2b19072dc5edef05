"""How many positions a model's sequences can have."""

from __future__ import annotations

from collections.abc import Mapping


def longest_sequence(positions: int, rope: object) -> int:
    """`positions` is the configuration's `max_position_embeddings`, and `rope` its `rope_parameters` (`rope_scaling` in
    older ones). YaRN scales the original length; many configurations leave `max_position_embeddings` as it was."""
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return positions
    return max(positions, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or positions)))
