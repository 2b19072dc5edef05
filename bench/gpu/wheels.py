"""Fetches what a server needs beside torch and transformers, for a machine that has these and no network.

    python -m bench.gpu.wheels FOLDER --python 3.12

There: `pip install --no-index --no-deps --target SITE FOLDER/*.whl`, and SITE in PYTHONPATH. The versions are those
that are installed here. Ray is left out, for `spool serve --no-ray` does without.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]
_LEFT_OUT = ("ray", "torch", "transformers", "accelerate", "huggingface-hub", "numpy", "safetensors", "tokenizers")
_OWN = ("spool-serve", "spool-client")
_ALSO = ("psutil",)
"""What the benchmark itself needs."""
# Those of a glibc of 2.39, of which pip takes each by its name alone.
_PLATFORMS = tuple(f"manylinux{glibc}_x86_64" for glibc in (*(f"_2_{minor}" for minor in range(39, 4, -1)), 2014, 1))


def needed(python: str) -> list[str]:
    """Packages with versions, as `NAME==VERSION`."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found: set[str] = set()
    left = [(name, frozenset[str]()) for name in (*_OWN, *_ALSO)]
    while left:
        name, extras = left.pop()
        found.add(name)
        for requirement in map(Requirement, requires(name) or ()):
            marker, one = requirement.marker, canonicalize_name(requirement.name)
            wanted = marker is None or any(marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras))
            if wanted and one not in found and one not in _LEFT_OUT:
                left.append((one, frozenset(requirement.extras)))
    return sorted(f"{name}=={version(name)}" for name in found - {*_OWN})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.wheels", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="takes the wheels")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python (3.12)")
    asked = parser.parse_args(arguments)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--python-version", asked.python, "--implementation", "cp", "--dest", str(asked.folder)]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *needed(asked.python)], check=True)
    # A server asks for its own version.
    own = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(asked.folder)]
    subprocess.run([*own, str(_ROOT), str(_ROOT / "spool_client")], check=True)
    size = sum(path.stat().st_size for path in asked.folder.glob("*.whl"))
    print(f"{asked.folder}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
