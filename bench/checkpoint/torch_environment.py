"""A Python environment with torch and the compared loaders, built once and kept.

Owns its packages and their versions. A loader that cannot be installed does not affect the others.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.needs import MissingError
from testbed.processes import run_json

BASE = ("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0")
RUNAI = "runai-model-streamer==0.17.0"
FASTSAFETENSORS = "fastsafetensors==0.5.0"
_STEP_DEADLINE_S = 900.0


class TorchEnvironment:
    """Virtual environment below `kept`."""

    def __init__(self, kept: Path) -> None:
        name = hashlib.sha256(" ".join(BASE).encode()).hexdigest()[:12]
        self.folder = kept / f"torch-{name}"

    @property
    def python(self) -> str:
        """Path of the environment's interpreter."""
        return str(self.folder / "bin/python")

    def build(self) -> None:
        """Make the environment unless it exists. Raises: MissingError."""
        if self.folder.exists():
            return
        partial = self.folder.with_name(f"{self.folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(partial)])
        # pip is run as a module, so that the environment may be renamed.
        _run([str(partial / "bin/python"), "-m", "pip", "install", "--quiet", *BASE])
        partial.rename(self.folder)

    def add(self, requirement: str) -> None:
        """Install a loader unless it is installed. Raises: MissingError with pip's last line."""
        marker = self.folder / f"{requirement}.installed"
        if not marker.exists():
            _run([self.python, "-m", "pip", "install", "--quiet", requirement])
            marker.touch()

    def run(
        self, action: str, arguments: Mapping[str, Any], *, ours: bool, timeout_s: float
    ) -> Mapping[str, float]:
        """Run an action of `loading` and return its figures. Raises: RuntimeError.

        With `ours`, Bootseer's packages can be imported, too.
        """
        command = [self.python, "-m", "bench.checkpoint.loading", action, json.dumps(arguments)]
        env = {"PYTHONPATH": sysconfig.get_paths()["purelib"]} if ours else {}
        outcome: Mapping[str, float] = run_json(command, timeout_s=timeout_s, env=env)
        return outcome


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True,
            timeout=_STEP_DEADLINE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{command[-1]} cannot be installed: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise MissingError(f"{command[-1]} cannot be installed: {lines[-1][:200]}")
