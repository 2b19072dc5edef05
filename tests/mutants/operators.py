"""The mutants of a module: which small changes of its source there are, each with a name that outlives other edits.

Left out, since no test should notice them: docstrings, annotations, strings and f-strings, calls of loggers, what an
exception is raised with, `__repr__` and `__str__`, decorators, imports, and floats of modules and classes, which are
times and other settings. Assignments to names are not deleted either: the error that follows says little for a test.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_OPPOSITE_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TEXTS = ("__repr__", "__str__")
_LONGEST_TEXT = 110

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, eq=False)
class Mutant:
    """One change of a module: one field of one node, or one entry of a field that is a list."""

    name: str
    """Its scope's qualified name and the change; a number where a scope has the same change several times."""
    scope: str
    lines: range
    """Those of the statement, without the body of a compound one: whoever runs one of them runs the mutant."""
    function: tuple[str, int] | None
    """Qualified name and first line of the outermost function that it is in; None for what runs at import."""
    parent: ast.AST
    field: str
    index: int | None
    replacement: object

    def apply(self) -> None:
        """Changes the tree in place; it is of no use for other mutants then."""
        if self.index is None:
            setattr(self.parent, self.field, self.replacement)
        else:
            getattr(self.parent, self.field)[self.index] = self.replacement


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the module a node is."""

    scope: tuple[str, ...] = ()
    function: tuple[str, int] | None = None
    lines: range = range(0)


@dataclass(frozen=True, slots=True)
class _Change:
    """`shown`: what the change is described by, before and after."""

    replacement: object
    text: str


def mutants_of(tree: ast.Module) -> list[Mutant]:
    """In the order of the source."""
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for place, parent, field, index, change in _visit(tree, _Place()):
        scope = ".".join(place.scope) or "<module>"
        counts[scope, change.text] += 1
        number = counts[scope, change.text]
        name = f"{scope}: {change.text}" + (f" #{number}" if number > 1 else "")
        found.append(Mutant(name, scope, place.lines, place.function, parent, field, index, change.replacement))
    return found


_Found = tuple[_Place, ast.AST, str, int | None, _Change]


def _visit(node: ast.AST, place: _Place) -> Iterator[_Found]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment", "format_spec"):
            continue
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, child in entries:
            if not isinstance(child, ast.AST) or _is_left_out(child, place):
                continue
            inner = _place_of(child, place)
            changes = _changes(child, node, field, inner)
            yield from ((inner, node, field, index, change) for change in changes)
            if not isinstance(child, ast.Raise):
                yield from _visit(child, inner)


def _is_left_out(node: ast.AST, place: _Place) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.FunctionDef(name=name):
            return name in _TEXTS
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=owner)))) if owner in ("logger", "logging"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Constant(value=float()):
            return place.function is None
        case ast.BinOp(op=ast.BitOr()):
            # Mostly a union of types.
            return place.function is None
    return False


def _place_of(node: ast.AST, place: _Place) -> _Place:
    """Where what is inside of the node is."""
    if isinstance(node, ast.ClassDef):
        return _Place((*place.scope, node.name), place.function, place.lines)
    if isinstance(node, _Function):
        scope = (*place.scope, node.name)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return _Place(scope, place.function or (".".join(scope), first), place.lines)
    if isinstance(node, ast.arguments):
        # Defaults of a module's own functions are values of the time when it is imported.
        outermost = place.function is not None and place.function[0] == ".".join(place.scope)
        return _Place(place.scope, None if outermost else place.function, place.lines)
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        last = (_first_line(body[0]) - 1 if body else node.end_lineno) or node.lineno
        return _Place(place.scope, place.function, range(node.lineno, max(last, node.lineno) + 1))
    return place


def _first_line(node: ast.AST) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno  # type: ignore[attr-defined]


def _changes(node: ast.AST, parent: ast.AST, field: str, place: _Place) -> Iterator[_Change]:
    if isinstance(node, ast.stmt):
        yield from _statement_changes(node)
    elif isinstance(node, ast.expr):
        # What is too short to be recognised is shown with what it is part of.
        around = parent if isinstance(parent, ast.expr) and isinstance(node, ast.Constant) else None
        for replacement in _expression_changes(node, parent, field):
            yield _Change(ast.copy_location(replacement, node), _described(node, replacement, around))
    elif isinstance(node, ast.comprehension):
        for place_of_test, test in enumerate(node.ifs):
            rest = [other for number, other in enumerate(node.ifs) if number != place_of_test]
            filtered = ast.comprehension(node.target, node.iter, rest, node.is_async)
            yield _Change(filtered, _shortened(f"no filter `{ast.unparse(test)}`"))


def _statement_changes(node: ast.stmt) -> Iterator[_Change]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield _deleted(node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield _deleted(node)
        case ast.Return(value=None):
            yield _deleted(node)
        case ast.Break():
            yield _Change(ast.copy_location(ast.Continue(), node), "`break` -> `continue`")
        case ast.Continue():
            yield _Change(ast.copy_location(ast.Break(), node), "`continue` -> `break`")
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        other = ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
        yield _Change(ast.copy_location(other, node), _described(node, other, None))


def _deleted(node: ast.stmt) -> _Change:
    words = "raise" if isinstance(node, ast.Raise) else ast.unparse(node)
    return _Change(ast.copy_location(ast.Pass(), node), _shortened(f"deleted `{words}`"))


def _expression_changes(node: ast.expr, parent: ast.AST, field: str) -> Iterator[ast.expr]:
    conditional = field == "test" and isinstance(parent, ast.If | ast.IfExp)
    if conditional and not isinstance(node, ast.Constant):
        yield from (ast.Constant(True), ast.Constant(False))
    if field == "test" and isinstance(parent, ast.While) and not isinstance(node, ast.Constant):
        yield ast.UnaryOp(ast.Not(), node)
    if field == "value" and isinstance(parent, ast.Return) and not isinstance(node, ast.Constant):
        yield ast.Constant(None)
    match node:
        case ast.Compare(left, operators, others):
            for place, operator in enumerate(operators):
                changed = [*operators[:place], _COMPARISONS[type(operator)](), *operators[place + 1 :]]
                yield ast.Compare(left, changed, others)
        case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC:
            yield ast.BinOp(left, _ARITHMETIC[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for place in range(len(values)):
                rest = [*values[:place], *values[place + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(operator, rest)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
            if isinstance(value, int) and value > 0:
                yield ast.Constant(value - 1)
        case ast.Call():
            yield from _call_changes(node)


def _call_changes(node: ast.Call) -> Iterator[ast.expr]:
    """The opposite of a function, and each argument dropped that can be: keywords, and the last of several."""
    function, arguments, keywords = node.func, node.args, node.keywords
    if isinstance(function, ast.Name) and function.id in _OPPOSITE_CALLS:
        yield ast.Call(ast.Name(_OPPOSITE_CALLS[function.id], ast.Load()), arguments, keywords)
    for place in range(len(keywords)):
        yield ast.Call(function, arguments, [*keywords[:place], *keywords[place + 1 :]])
    if len(arguments) > 1:
        yield ast.Call(function, arguments[:-1], keywords)


def _described(node: ast.AST, replacement: ast.AST, around: ast.AST | None) -> str:
    change = f"`{ast.unparse(node)}` -> `{ast.unparse(ast.fix_missing_locations(replacement))}`"
    if around is not None:
        change += f" in `{ast.unparse(around)}`"
    return _shortened(change)


def _shortened(text: str) -> str:
    """One line that is not too long; of a long change, both ends."""
    text = " ".join(text.split())
    if len(text) <= 2 * _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]} ... {text[-_LONGEST_TEXT:]}"
