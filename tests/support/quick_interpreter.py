"""Triton's interpreter computes the same, without computing the same things about types at every operation anew."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from typing import Any


@functools.cache
def quicken() -> None:
    """For good, in this process; the interpreter is a third of what the tests of kernels need otherwise."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")
    # With `debug` off, which it is, nobody looks at what these further operations say of overflows.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    number_types: dict[str, Any] = {}
    of_type = interpreter._get_np_dtype

    def known(type: Any) -> Any:
        name = type.scalar.name
        if name not in number_types:
            number_types[name] = of_type(type)
        return number_types[name]

    interpreter._get_np_dtype = known
    _remember_shapes(core)
    _broadcast_what_differs(importlib.import_module("triton.language.semantic"))
    _patch_once_a_launch(interpreter)


def _remember_shapes(core: Any) -> None:
    @functools.cache
    def known(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def start_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known(tuple(type.shape.values) if type.is_block() else ())

    start_block = core.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def start_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        try:
            key = (element_ty.name, *(size if type(size) is int else size.value for size in shape))
        except AttributeError:
            start_block(self, element_ty, shape)
            return
        if (found := blocks.get(key)) is None:
            start_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    core.tensor.__init__ = start_tensor
    core.block_type.__init__ = start_block_type


def _broadcast_what_differs(semantic: Any) -> None:
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def alike(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    semantic.TritonSemantic.broadcast_impl_value = alike


def _patch_once_a_launch(interpreter: Any) -> None:
    """The interpreter patches Triton's modules for a launch, and for all functions that a kernel calls once more."""
    patched: set[tuple[int, ...]] = set()
    launch = interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = self.fn.__globals__.values()
        of = tuple(id(language) for language in languages if any(value is language for value in seen))
        if of not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(of)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = start
    interpreter.InterpretedFunction.__call__ = call
