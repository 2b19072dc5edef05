"""Installs the folders of the project under one name: `engine` as `spool.engine`, and so on. A wheel also gets the CPU
kernels, compiled; an editable installation compiles what it needs when it needs it.

SPOOL_WHEEL_MACHINE is another machine than this one, for which CC compiles; SPOOL_WHEEL_BUILDS some builds of
engine/cpu/isa.py instead of all.
"""

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDERS = ("deploy", "engine", "protos", "scheduler", "services")
MACHINE = os.environ.get("SPOOL_WHEEL_MACHINE")
BUILDS = os.environ.get("SPOOL_WHEEL_BUILDS", "").split()


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        # These sources by their installed name, whatever else is installed.
        sources = ModuleType("spool")
        sources.__path__ = [str(Path(__file__).parent)]
        sys.modules["spool"] = sources
        from spool.engine.cpu.isa import this_machine
        from spool.engine.cpu.prebuilt import COMPILED, build_libraries

        folder = Path(self.build_lib, "spool", "engine", "cpu", COMPILED.name)
        shutil.rmtree(folder, ignore_errors=True)
        build_libraries(folder, MACHINE or this_machine(), BUILDS, lambda line: print(line, flush=True))


class WheelOfAMachine(bdist_wheel):
    """For any Python 3, as kernels are called by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        named = self.plat_name_supplied or MACHINE is None
        return "py3", "none", super().get_tag()[2] if named else f"linux_{MACHINE}"


class DistributionWithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=DistributionWithKernels,
    packages=[f"spool.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_dir={f"spool.{folder}": folder for folder in FOLDERS},
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAMachine},
)
