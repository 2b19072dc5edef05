"""Plants a mutant into the running process, which is a fork and ends with it.

All modules are imported already, so that `from x import y` has bound what was there. A mutant inside of a function
therefore becomes the code of the function object that everybody has. What runs at import, such as a constant or the
default of an argument, needs a second import of the product and of the tests.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType

from tests.mutants.operators import Mutant
from tests.mutants.sources import Module

_IMPORTED_AGAIN = ("scheduler", "services", "engine", "deploy", "tests")


class Functions:
    """All function objects of some modules, by file, qualified name and first line."""

    def __init__(self, modules: Sequence[Module]) -> None:
        files = {str(module.file) for module in modules}
        self._found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        for found in gc.get_objects():
            if isinstance(found, FunctionType) and found.__code__.co_filename in files:
                code = found.__code__
                self._found[code.co_filename, code.co_qualname, code.co_firstlineno].append(found)

    def plant(self, module: Module, mutant: Mutant) -> bool:
        """Whether the mutant could be planted. False: it needs an import, as the changed tree then is."""
        mutant.apply()
        if mutant.function is None:
            return False
        code = compile(module.tree, str(module.file), "exec", dont_inherit=True)
        functions = self._found.get((str(module.file), *mutant.function), [])
        changed = [found for found in _codes(code) if (found.co_qualname, found.co_firstlineno) == mutant.function]
        if not functions or len(changed) != 1:
            return False
        try:
            for function in functions:
                function.__code__ = changed[0]
        except ValueError:  # the change took the only `super()` of the function
            return False
        return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def forget_imports(module: Module) -> None:
    """The next import of the module executes its tree as it is now; what may have bound a part is imported again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in _IMPORTED_AGAIN:
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder(module.name, module.tree, str(module.file)))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the one module."""

    def __init__(self, name: str, tree: ast.Module, file: str) -> None:
        self._name = name
        self._tree = tree
        self._file = file

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=self._file)
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, self._file, "exec", dont_inherit=True), module.__dict__)
