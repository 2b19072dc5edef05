"""Puts the packages of this project under one name: `scheduler.core` becomes `spool.scheduler.core`, and so on.

    python .ci/namespace.py [FILE ...]

rewrites these files, or all that are committed: imports, and names of modules in strings, comments and documents. Names
that are not modules' (`engine.kv_memory` is a setting) stay. It changes nothing a second time; a branch from before the
change becomes mergeable by running it there. Afterwards: `make format`.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {name: f"spool.{name}" for name in ("deploy", "engine", "protos", "scheduler", "services")}
NAMES["spool_client"] = "spool.client"
TEXTS = {".md", ".yaml", ".jinja", ".js", ".html"}

_ROOTS = "|".join(NAMES)
MODULE = re.compile(rf"(?<![\w./-])({_ROOTS})((?:\.[a-zA-Z_]\w*)+)")
# In strings, these are settings and attributes, and the file of an address.
NOT_MODULES = re.compile(r"engine\.(description|settings)\b|engine\.(quantization|sampling)$")


def is_module(root: str, rest: str) -> bool:
    """Whether its first part is a module or a folder of modules."""
    first = ROOT / root / rest.split(".")[1]
    return first.is_dir() or first.with_suffix(".py").exists()


def renamed(text: str) -> str:
    """Text that is no code, with the names of modules replaced."""

    def replace(found: re.Match[str]) -> str:
        root, rest = found.groups()
        if NOT_MODULES.match(found[0]) or not is_module(root, rest):
            return found[0]
        return NAMES[root] + rest

    return MODULE.sub(replace, text)


def renamed_code(code: str) -> str:
    lines = code.splitlines(keepends=True)
    # From the end to the beginning, so that places stay right.
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(code).readline))):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            (first, start), (last, end) = token.start, token.end
            before, after = lines[first - 1][:start], lines[last - 1][end:]
            lines[first - 1 : last] = [before + renamed(token.string) + after]
    text = "".join(lines)
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            root = (module or "").split(".")[0]
            if root in NAMES:
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = re.sub(rf"(?<![\w.]){root}(?=[.\s])", NAMES[root], line, count=1)
    return "".join(lines)


def main(names: list[str]) -> None:
    given = names or subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    for path in (ROOT / name for name in given):
        if path.is_relative_to(ROOT / "bench" / "results") or path == Path(__file__).resolve():
            continue
        if path.suffix not in TEXTS | {".py"} or "_pb2" in path.name:
            continue
        before = path.read_text(encoding="utf-8")
        after = renamed_code(before) if path.suffix == ".py" else renamed(before)
        if after != before:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
