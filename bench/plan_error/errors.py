"""How far predicted figures are from measured ones."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.planning.open_loop import LoadFigures


def errors(measured: LoadFigures, predicted: LoadFigures) -> dict[str, float]:
    """Predicted over measured, less one."""
    found = {"tokens/s": predicted.tokens_per_second / measured.tokens_per_second - 1}
    for name in ("p50", "p99"):
        found[f"first token {name}"] = predicted.first_token[name] / measured.first_token[name] - 1
        found[f"token {name}"] = predicted.token[name] / measured.token[name] - 1
    return found


def shown(error: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {part:+.1%}" for name, part in error.items())
