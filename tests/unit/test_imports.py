"""Who may import whom, and what must start without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "spool.protos": "protos",
    "spool.client": "spool_client",
    "spool.scheduler": "scheduler",
    "spool.engine": "engine",
    "spool.services": "services",
    "spool.deploy": "deploy",
    "bench": "bench",
}
ALLOWED = {
    "spool.protos": set[str](),
    "spool.client": set[str](),
    "spool.scheduler": set[str](),
    "spool.engine": {"spool.scheduler"},
    "spool.services": {"spool.protos", "spool.client", "spool.scheduler", "spool.engine"},
    "spool.deploy": FOLDERS.keys() - {"bench"},
    "bench": FOLDERS.keys(),
}
HEAVY = ("torch", "transformers")


def imported_modules(source: Path) -> Iterator[str]:
    """Full names of everything a file imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"), str(source))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{source}:{node.lineno}: relative import")
            yield node.module or ""


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def module_name(package: str, source: Path) -> str:
    inside = source.relative_to(ROOT / FOLDERS[package]).with_suffix("")
    return ".".join((package, *inside.parts)).removesuffix(".__init__")


def is_in(name: str, packages: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def offences(folder: str, forbidden: Iterable[str]) -> list[str]:
    """Imports of modules in the packages `forbidden`."""
    return [
        f"{source.relative_to(ROOT)} imports {name}"
        for source in sources(folder)
        for name in imported_modules(source)
        if is_in(name, forbidden)
    ]


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_import_only_what_they_may(package: str) -> None:
    assert offences(FOLDERS[package], {*FOLDERS, "tests"} - ALLOWED[package] - {package}) == []


@pytest.mark.parametrize("package", [name for name in FOLDERS if name != "spool.protos"])
def test_there_are_no_import_cycles(package: str) -> None:
    """Imports for type checkers alone count as well."""
    modules = {module_name(package, source): source for source in sources(FOLDERS[package])}
    imports = {name: set(imported_modules(source)) & modules.keys() for name, source in modules.items()}
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS.values() if folder not in ("engine", "bench")])
def test_only_engine_and_bench_import_torch(folder: str) -> None:
    assert offences(folder, HEAVY) == []


@pytest.mark.parametrize(("package", "needed"), [("spool.scheduler", set[str]()), ("spool.client", {"grpc", "google"})])
def test_some_packages_need_little_but_the_standard_library(package: str, needed: set[str]) -> None:
    outside = [
        f"{source.relative_to(ROOT)} imports {name}"
        for source in sources(FOLDERS[package])
        for name in imported_modules(source)
        if not is_in(name, sys.stdlib_module_names | needed | {package})
    ]
    assert outside == []


def test_the_scheduler_core_has_neither_clock_nor_randomness_nor_io() -> None:
    banned = {"time", "random", "secrets", "datetime", "asyncio", "threading", "socket", "os", "subprocess"}
    assert offences("scheduler", banned) == []


def test_the_auditor_of_simulations_knows_messages_only() -> None:
    """docs/protocol.md in code of its own: what it shared with the services, it could not judge."""
    assert offences("tests/sim/audit", FOLDERS.keys() - {"spool.protos", "spool.client"}) == []
    foreign = [name for source in sources("tests/sim/audit") for name in imported_modules(source) if "sim.cell" in name]
    assert foreign == []


def printed(program: str) -> tuple[str, set[str]]:
    """What it prints, and the modules that it imports."""
    program = f"import sys; {program}; print(*sys.modules, file=sys.stderr)"
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout, set(outcome.stderr.split())


def test_help_is_quick() -> None:
    """What takes a second to import is imported by the commands that need it, and their options are left out."""
    shown, modules = printed("sys.argv = ['spool', '--help']; from spool.deploy.cli.main import main; main()")
    whole, others = printed("from spool.deploy.cli.command_line import run; run(['--help'])")
    assert shown == whole
    assert "Usage: spool" in shown
    assert {*HEAVY, "ray", "grpc", "fastapi", "numpy", "pydantic", "yaml"}.isdisjoint(modules)
    assert {*HEAVY, "ray", "grpc", "fastapi", "numpy"}.isdisjoint(others)


@pytest.mark.parametrize(("module", "said"), [("typer", ""), ("spool.deploy.cli.chat", "spool: interrupted\n")])
def test_ctrl_c_during_imports_ends_quietly(module: str, said: str) -> None:
    """In the first, before any command runs, and in those of a command."""
    program = "import os, signal, sys\nfrom importlib.abc import MetaPathFinder\n"
    program += "class Interrupting(MetaPathFinder):\n    def find_spec(self, name, path, target=None):\n"
    program += f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
    program += "sys.meta_path.insert(0, Interrupting())\nsys.argv = ['spool', 'chat', '--url', 'http://127.0.0.1:1']\n"
    program += "from spool.deploy.cli.main import main\nmain()"
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (130, "", said)


def test_engines_need_little_but_torch_and_transformers() -> None:
    """So does the benchmark that is sent to a GPU."""
    foreign = ("fastapi", "google", "gguf", "grpc", "llguidance", "platformdirs", "prometheus_client", "pydantic")
    program = f"import pkgutil, sys; sys.modules.update(dict.fromkeys({(*foreign, 'ray', 'typer', 'uvicorn')}))\n"
    program += "for name in ('spool.engine', 'spool.scheduler', 'bench.gpu'):\n"
    program += "    found = pkgutil.walk_packages(__import__(name, fromlist=['']).__path__, name + '.')\n"
    program += "    for module in found: __import__(module.name)\n"
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_all_but_workers_start_without_torch() -> None:
    modules = "spool.services.scheduler.service, spool.services.gateway.http.app, spool.services.gateway.grpc.server, "
    modules += (
        "spool.deploy.cli.command_line, spool.engine.models.source, spool.engine.quantization.gguf_folder, spool.client"
    )
    program = f"import sys, {modules}; print([name for name in {HEAVY} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "[]"


def test_what_builds_a_wheel_needs_nothing_installed() -> None:
    """setup.py imports these where there is nothing but setuptools."""
    shared = {f"spool.engine.cpu.{name}" for name in ("isa", "compiler", "prebuilt")}
    for name in shared:
        source = ROOT / f"{name.removeprefix('spool.').replace('.', '/')}.py"
        imported = set(imported_modules(source)) - shared
        assert {each for each in imported if each.split(".")[0] not in sys.stdlib_module_names} == set()
