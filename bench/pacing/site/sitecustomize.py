"""Python runs this at the start of every process that has this folder on its path: engines are slowed when imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ENGINES = {
    "engine.target": ("TargetEngine", "target_seconds"),
    "engine.drafting.model_draft": ("DraftEngine", "draft_seconds"),
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ENGINES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _SlowingLoader(spec.loader)
        return spec


class _SlowingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from bench.pacing import slow_down

        self._loader.exec_module(module)
        engine, seconds = _ENGINES[module.__name__]
        slow_down(getattr(module, engine), seconds)


sys.meta_path.insert(0, _Finder())
