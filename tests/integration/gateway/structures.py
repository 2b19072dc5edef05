"""Schemas that no gateway lets in, and why."""

from __future__ import annotations

from typing import Any

# Three levels of repeats: what the library keeps of it grows with every token.
EXPONENTIAL = "((a{1,1000}){1,1000}){1,1000}"


def nested(depth: int) -> dict[str, Any]:
    """Lists of lists."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


EACH_OTHER = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}

BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "number?"}, "cannot be used: Invalid type: number"),
    ({"$ref": "#"}, "cannot be used: no text fits$"),
    (EACH_OTHER, "cannot be used: no text fits$"),
    (nested(300), "cannot be used: recursion limit exceeded"),
    ({"description": "x" * 1_000_000}, "has 1000019 bytes, must have at most 65536"),
    ({"type": "string", "pattern": f"^{EXPONENTIAL}$"}, "cannot be used: .*too many expressions"),
]
