"""The tool that plants mutants: what it makes, and that it tells which of them tests notice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.mutants.equivalents import read_equivalents, unknown
from tests.mutants.forks import Say, in_fork, limit_processor_time
from tests.mutants.operators import mutants_of
from tests.mutants.outcomes import interval
from tests.mutants.sources import LOGIC, modules_of

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "mutants" / "toy"


def names(source: str) -> list[str]:
    return [mutant.name for mutant in mutants_of(ast.parse(dedent(source)))]


@pytest.mark.parametrize(
    ("statement", "changes"),
    [
        ("return a < b", ["`a < b` -> `None`", "`a < b` -> `a <= b`"]),
        ("return", ["deleted `return`"]),
        ("x = a is b", ["`a is b` -> `a is not b`"]),
        ("x = a + b", ["`a + b` -> `a - b`"]),
        ("x += 1", ["deleted `x += 1`", "`x += 1` -> `x -= 1`", "`1` -> `2`", "`1` -> `0`"]),
        ("x = a and b", ["`a and b` -> `a or b`", "`a and b` -> `b`", "`a and b` -> `a`"]),
        ("x = not a", ["`not a` -> `a`"]),
        ("x = f(True)", ["`True` -> `False` in `f(True)`"]),
        ("x = f(a, b)", ["`f(a, b)` -> `f(a)`"]),
        ("x = f(a=a)", ["`f(a=a)` -> `f()`"]),
        ("x = min(a)", ["`min(a)` -> `max(a)`"]),
        ("x = b if a else c", ["`a` -> `True`", "`a` -> `False`"]),
        ("x = [i for i in a if i]", ["no filter `i`"]),
        ("f(a)", ["deleted `f(a)`"]),
        ("self.x = a", ["deleted `self.x = a`"]),
        ("del a[b]", ["deleted `del a[b]`"]),
        ("raise E(a + b, 1)", ["deleted `raise`"]),
        ("while a: break", ["`a` -> `not a`", "`break` -> `continue`"]),
        ("if a: b.c()", ["`a` -> `True`", "`a` -> `False`", "deleted `b.c()`"]),
        # What no test should notice.
        ('"""Docs, 1 + 1."""', []),
        ("logger.warning('%s', a + 1)", []),
        ("x: int | None = a", []),
        ("x = f'{a + 1}'", []),
        ("import a", []),
    ],
)
def test_makes_each_kind_of_mutant(statement: str, changes: list[str]) -> None:
    assert names(f"def f(a, b):\n    {statement}") == [f"f: {change}" for change in changes]


def test_what_runs_at_import_is_mutated_apart_from_functions() -> None:
    source = dedent(
        """
        LIMIT, SECONDS = 1, 0.5
        class A:
            @property
            def p(self, n=2):
                def inner():
                    return -n
                return inner
            def __repr__(self):
                return 1
        """
    )
    found = {mutant.name: mutant.function for mutant in mutants_of(ast.parse(source))}
    function = ("A.p", 4)
    assert found == {
        "<module>: `1` -> `2` in `(1, 0.5)`": None,
        "<module>: `1` -> `0` in `(1, 0.5)`": None,
        "A.p: `2` -> `3`": None,
        "A.p: `2` -> `1`": None,
        "A.p.inner: `-n` -> `None`": function,
        "A.p.inner: `-n` -> `n`": function,
        "A.p: `inner` -> `None`": function,
    }


def test_the_same_change_twice_has_two_names() -> None:
    assert names("def f(a):\n    g(a)\n    g(a)") == ["f: deleted `g(a)`", "f: deleted `g(a)` #2"]


def run(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = folder / "figures.json"
    toy = "tests/mutants/toy"
    paths = ("--modules", f"{toy}/counter.py", "--checks", f"{toy}/checks.py", "--folder", str(folder))
    command = [sys.executable, "-m", "tests.mutants", *paths, "--json", str(file), *options]
    finished = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    return finished, json.loads(file.read_text(encoding="utf-8"))["result"] if file.exists() else {}


def test_tells_which_mutants_of_the_toy_its_tests_notice(tmp_path: Path) -> None:
    finished, figures = run(tmp_path, "--equivalent", str(TOY / "equivalent.toml"))
    assert finished.returncode == 0, finished.stderr
    place = "tests.mutants.toy.counter:Counter"
    lives = {"`self.value > 10` -> `self.value >= 10`", "`10` -> `11` in `self.value > 10`"}
    lives |= {"`10` -> `9` in `self.value > 10`", "`1` -> `2`", "`1` -> `0`"}
    assert set(figures["survivors"]) == {f"{place}.describe: {change}" for change in lives}
    assert figures["equivalents"] == read_equivalents(TOY / "equivalent.toml")
    # The limit and the default of `amount` are values of the time of import.
    assert figures["made"] == figures["run"] == figures["killed"] + len(lives) + 2
    assert figures["killed_by"]["unit tests"] == figures["killed"] == 15
    # Looking for 10 that are not there never ends.
    assert figures["ends"]["time"] >= 1
    # Goes on with what is known, and a listed mutant that a test kills is none that changes nothing.
    listed = tmp_path / "equivalent.toml"
    listed.write_text('["tests.mutants.toy.counter"]\n"<module>: `3` -> `4`" = "no"\n"gone" = "no"\n', encoding="utf-8")
    kept = (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8")
    finished, again = run(tmp_path, "--equivalent", str(listed))
    assert finished.returncode == 1
    assert "no such mutant: tests.mutants.toy.counter:gone" in finished.stderr
    assert "listed as equivalent, killed by tests/mutants/toy/checks.py::test_" in finished.stderr
    assert (tmp_path / "outcomes.jsonl").read_text(encoding="utf-8") == kept
    assert again["survived"] == len(lives) + 2


def test_every_listed_equivalent_is_a_mutant_with_a_reason() -> None:
    modules = modules_of(LOGIC)
    made = [module.name_of(mutant) for module in modules for mutant in module.mutants]
    assert len(made) == len(set(made)) > 1000
    from tests.mutants.equivalents import FILE

    assert unknown(read_equivalents(FILE), set(made), {module.name for module in modules}) == []


def test_an_equivalent_needs_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.toml"
    file.write_text('["a.b"]\n"f: deleted `x`" = " "\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no reason for"):
        read_equivalents(file)


def test_a_fork_says_how_it_ended() -> None:
    def loops(say: Say) -> None:
        say("begins")
        limit_processor_time(0.05)
        while True:
            pass

    def ends_itself(say: Say) -> None:
        os.kill(os.getpid(), 9)

    def raises(say: Say) -> None:
        raise KeyError

    assert in_fork(lambda say: say("a\nb")).said == ["a", "b"]
    assert (in_fork(loops).said, in_fork(loops).end) == (["begins"], "time")
    assert in_fork(ends_itself).end == in_fork(raises).end == "crash"


def test_the_confidence_of_a_sample() -> None:
    """Wilson's interval for 95 of 100, from the formula's own solution."""
    assert interval(95, 100) == pytest.approx([0.8882, 0.9785], abs=1e-4)
