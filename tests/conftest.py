"""What holds for a whole test run: its own cache, the order and the kinds of tests, and which skips CI accepts."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

from spool.engine.models.source import CACHE_VARIABLE, DemoPart, demo_folder, demo_is_built
from spool.services.launch.process_tuning import compute_environment
from tests.support.quick_clients import share_authorities
from tests.support.quick_interpreter import quicken
from tests.support.ray_cluster import RayCluster, redis

ACCEPTED_SKIPS = ("no GPU", "another processor", "no podman", "no network namespaces")
"""With CI=true a skip is a failure unless its reason begins with one of these words: `.ci/run` installs the rest."""

RUN_VARIABLE = "SPOOL_TEST_RUN"
"""The folder of this test run; pytest-xdist's workers get the name from the process that starts them."""

DEMO = tuple(DemoPart)

OF_THE_REST = 4
"""One in so many of what a sample leaves out of the loop is run by `make test-all`, where the sample says no other."""


def pytest_configure(config: pytest.Config) -> None:
    # Triton looks when it is first imported; without a GPU its kernels run in no other way.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # As in a worker, and before torch is imported: threads do not spin for long, and all of a run keeps to the
    # instruction set of SPOOL_CPU_ISA.
    os.environ.update(compute_environment(0))
    # Shells let background programs ignore SIGINT, and then every process that a test starts to interrupt does too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time, however slow the machine is; `make sim` looks for new ones.
    slow_is_no_error = list(hypothesis.HealthCheck)
    hypothesis.settings.register_profile(
        "tests", derandomize=True, deadline=None, suppress_health_check=slow_is_no_error, database=None
    )
    hypothesis.settings.load_profile("tests")
    if not hasattr(config, "workerinput"):
        _begin_run(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _end_run(config)


# --- the folder of a run ----------------------------------------------------------------------------------------------


def _begin_run(config: pytest.Config) -> None:
    """Every run begins with a cache of its own: calibrations, compiled kernels and models of the user's stay apart.

    Only the demo models are taken over, as links, if they lie as they would be built now in the user's cache or, left
    by an earlier run, in pytest's. Building them takes a minute. And libraries of CPU kernels are those that earlier
    runs of this checkout have compiled: their names say of what sources, by what compiler and for what.
    """
    found = {part: demo_folder(part) for part in DEMO if demo_is_built(part)}
    run = Path(tempfile.mkdtemp(prefix="spool-tests-"))
    os.environ[RUN_VARIABLE] = str(run)
    cache = run / "cache"
    cache.mkdir()
    with _cache_at(_kept(config)):
        found = {part: demo_folder(part) for part in DEMO if demo_is_built(part)} | found
    os.environ[CACHE_VARIABLE] = str(cache)
    kernels = _kept(config).with_name("cpu-kernels")
    kernels.mkdir(mode=0o700, exist_ok=True)
    (cache / kernels.name).symlink_to(kernels)
    if len(found) == len(DEMO):
        for part, folder in found.items():
            demo_folder(part).symlink_to(folder.resolve())


def _end_run(config: pytest.Config) -> None:
    run = os.environ.pop(RUN_VARIABLE, None)
    if run is None:
        return
    with _cache_at(Path(run) / "cache"):
        built = [demo_folder(part) for part in DEMO if demo_is_built(part) and not demo_folder(part).is_symlink()]
    if len(built) == len(DEMO):
        kept = _kept(config)
        for folder in built:
            shutil.rmtree(kept / folder.name, ignore_errors=True)
            shutil.move(folder, kept / folder.name)
    shutil.rmtree(run, ignore_errors=True)


def _kept(config: pytest.Config) -> Path:
    """Where demo models that a run had to build stay for the next run; `make clean` removes the folder."""
    cache = config.rootpath / ".pytest_cache" / "demo"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


@contextlib.contextmanager
def _cache_at(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder))
        yield


# --- which tests run when ---------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests on Ray first, which wait more than they compute, and marks what a sample leaves out as slow, and
    what a second one leaves out of that as long."""
    seen: dict[str, int] = {}
    for item in items:
        sample = item.get_closest_marker("sampled")
        if sample is not None:
            every, of_the_rest = sample.args if len(sample.args) > 1 else (*sample.args, OF_THE_REST)
            place = item.nodeid.partition("[")[0]
            number = seen[place] = seen.get(place, -1) + 1
            if number % every:
                item.add_marker(pytest.mark.slow)
                if (number - number // every - 1) % of_the_rest:
                    item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


def pytest_runtest_setup() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
        quicken()
    if "httpx" in sys.modules:
        share_authorities()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine, and has an event loop of its own then."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return judged(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return judged(report)


def judged(report: Any) -> Any:
    """In CI, a skip for a reason that is not accepted is a failure."""
    if os.environ.get("CI") != "true" or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ACCEPTED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: a skip that CI does not accept (tests/conftest.py): {reason}"
    return report


# --- what suites share ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_pair() -> tuple[Path, Path]:
    """Folders of a target and a draft, with tokenizers, made once in a run; nobody changes what lies there."""
    # Here, so that a run of tests without models does not wait for torch.
    from tests.support.command_line import save_tokenizer
    from tests.support.tiny_models import save_tiny_pair

    folder = Path(os.environ[RUN_VARIABLE]) / "models"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            scratch = folder.with_name("models-being-made")
            for model in save_tiny_pair("llama", scratch):
                save_tokenizer(model)
            scratch.rename(folder)
    return folder / "llama-target", folder / "llama-draft"


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """The Ray of all suites that can share one; its state lies in a Redis where there is one, so that it can be lost.

    The head has no room for replicas: every suite adds the nodes that it needs (`RayCluster.further_nodes`).
    """
    with redis(tmp_path_factory.mktemp("redis")) as state, RayCluster([{}], state, head_cpus=0) as cluster:
        yield cluster
