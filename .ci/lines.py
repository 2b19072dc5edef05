"""Counts lines of code by room: `python .ci/lines.py [REVISION ...]` (HEAD), so that two commits can be compared.

Lines are those of committed Python files, generated ones left out, and those of C.
"""

import subprocess
import sys

PRODUCT = ("protos", "spool_client", "scheduler", "engine", "services", "deploy")
ROOMS = (*PRODUCT, "bench", "tests")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def counted(revision: str, room: str, suffixes: tuple[str, ...]) -> int:
    names = git("ls-tree", "-r", "--name-only", revision, room).splitlines()
    wanted = [name for name in names if name.endswith(suffixes) and "_pb2" not in name]
    return sum(git("show", f"{revision}:{name}").count("\n") for name in wanted)


def main(revisions: list[str]) -> None:
    for revision in revisions:
        print(f"{git('rev-parse', '--short', revision).strip():>14}  Python      C")
        lines = {room: (counted(revision, room, (".py",)), counted(revision, room, (".c", ".h"))) for room in ROOMS}
        product = tuple(sum(lines[room][kind] for room in PRODUCT) for kind in range(2))
        for name, (python, c) in {**lines, "product": product}.items():
            print(f"{name:>14}  {python:6,} {c:6,}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
