"""Prints what pyproject.toml here names as dependencies, one a line: for the image, where the code comes later."""

import tomllib
from pathlib import Path

print("\n".join(tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]))
