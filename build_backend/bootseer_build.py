"""Build backend: setuptools in a copy of the checkout, so that building writes nothing into it.

Setuptools puts `build/` and `*.egg-info` beside the sources, which fails in a checkout that belongs
to another user or lies on a read-only mount, and takes stale files of `build/lib` along. Editable
installs name the checkout itself and are made there.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

_CHECKOUT = Path(__file__).resolve().parent.parent
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
# All that a wheel or a source archive holds.
_PARTS = ("bootseer", "build_backend", "fuse", "prefetch", "snapshots")
_FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")

_Settings = dict[str, Any] | None


@contextlib.contextmanager
def _in_copy() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="bootseer-build-") as folder:
        for name in _PARTS:
            shutil.copytree(_CHECKOUT / name, Path(folder, name), symlinks=True, ignore=_LEFT_OUT)
        for name in _FILES:
            shutil.copy(_CHECKOUT / name, folder)
        for path in Path(folder).rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        with contextlib.chdir(folder):
            yield


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """Return nothing: setuptools alone is needed."""
    return []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: _Settings = None
) -> str:
    """Write the metadata of a wheel; return the name of its folder."""
    target = str(Path(metadata_directory).absolute())
    with _in_copy():
        return str(build_meta.prepare_metadata_for_build_wheel(target, config_settings))


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel; return its name."""
    target = str(Path(wheel_directory).absolute())
    metadata = metadata_directory and str(Path(metadata_directory).absolute())
    with _in_copy():
        return str(build_meta.build_wheel(target, config_settings, metadata))


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    """Build a source archive; return its name."""
    target = str(Path(sdist_directory).absolute())
    with _in_copy():
        return str(build_meta.build_sdist(target, config_settings))


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that leads to the checkout; return its name."""
    if not os.access(_CHECKOUT, os.W_OK):
        raise SystemExit(
            f"an editable install writes into its checkout, and {_CHECKOUT} cannot be written: "
            "install it without -e"
        )
    # A line of a .pth file; else every interpreter of the environment loads an import hook, which
    # takes twice as long as all the rest of its start.
    settings = {"editable_mode": "compat", **(config_settings or {})}
    return str(build_meta.build_editable(wheel_directory, settings, metadata_directory))
