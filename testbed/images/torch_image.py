"""Builds the image of the image cases: Debian, Python, torch, and a top layer with pandas.

Each layer is the upper folder of an overlay into which the image's own dpkg, or pip, put the files,
as a build by a container engine does. The image is an OCI layout with two tags: v1, and v2 whose
top layer was built again from a changed script. Needs root (overlay, chroot), apt and pip. The
result is kept under the digest of this recipe.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from testbed.images.layout import GZIP_LEVEL, OciLayout, StoredLayer
from testbed.images.workloads import READ_DATA_SCRIPT, data_file
from testbed.needs import MissingError
from testbed.packages import Packages

_SUITE = "bookworm"
_PYTHON = "3.11"
_TORCH = "torch==2.13.0+cpu"
_TOP_PACKAGES = ("numpy", "pandas")
_SITE = f"usr/local/lib/python{_PYTHON}/dist-packages"
# Change the last word when the building steps change.
_RECIPE = (_SUITE, _PYTHON, _TORCH, *_TOP_PACKAGES, str(GZIP_LEVEL), "1")
_STEP_DEADLINE_S = 900.0
TAGS = ("v1", "v2")


def torch_image(kept: Path, say: Callable[[str], None]) -> Path:
    """Return the OCI layout, built unless `kept` has one of this recipe. Raises: MissingError."""
    recipe = "\n".join([*_RECIPE, READ_DATA_SCRIPT, data_file()])
    layout = kept / f"image-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if not layout.is_dir():
        if os.geteuid() != 0:
            raise MissingError("building the image needs root")
        work = kept / "image-work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            _build(work, OciLayout(work / "layout"), Packages(kept / "packages"), say)
            (work / "layout").rename(layout)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return layout


def _build(work: Path, layout: OciLayout, packages: Packages, say: Callable[[str], None]) -> None:
    layout.create()
    base, python, torch = work / "base", work / "python", work / "torch"
    say("image: layer 1 of 4: Debian")
    _debootstrap(base, packages)
    say("image: layer 2 of 4: Python")
    with _overlay(work, [base], python) as root:
        _install_python(root, packages)
    say("image: layer 3 of 4: torch")
    with _overlay(work, [python, base], torch) as root:
        _pip(root, _TORCH)
    common = [layout.add_tree(folder) for folder in (base, python, torch)]
    images: dict[str, Sequence[StoredLayer]] = {}
    for revision, tag in enumerate(TAGS, 1):
        say(f"image: layer 4 of 4: pandas, data and scripts, {tag}")
        top = work / tag
        with _overlay(work, [torch, python, base], top) as root:
            _pip(root, *_TOP_PACKAGES)
            (root / "app").mkdir()
            (root / "app/data.csv").write_text(data_file())
            (root / "app/read_data.py").write_text(READ_DATA_SCRIPT.format(revision=revision))
        images[tag] = [*common, layout.add_tree(top)]
    layout.write_index(images)


def _debootstrap(target: Path, packages: Packages) -> None:
    unpacked = packages.unpacked(_SUITE, "debootstrap")
    script = str(unpacked / "usr/sbin/debootstrap")
    environment = {"DEBOOTSTRAP_DIR": str(unpacked / "usr/share/debootstrap")}
    _step([script, "--variant=minbase", _SUITE, str(target)], environment)
    for folder in ("var/lib/apt/lists", "var/cache/apt", "var/log", "dev"):
        shutil.rmtree(target / folder)
        (target / folder).mkdir()


def _install_python(root: Path, packages: Packages) -> None:
    folder = root / "tmp/packages"
    folder.mkdir()
    for package in packages.download_missing(_SUITE, ["python3"], root):
        shutil.copy(package, folder)
    # All packages at once: when all are unpacked, each finds its dependencies.
    unpack = "dpkg --unpack --force-depends /tmp/packages/*.deb && dpkg --configure -a"
    _step(["chroot", str(root), "sh", "-c", unpack], {"DEBIAN_FRONTEND": "noninteractive"})
    shutil.rmtree(folder)
    for name in ("var/log/dpkg.log", "var/cache/debconf"):
        _remove(root / name)


def _pip(root: Path, *requirements: str) -> None:
    """Install wheels for the image's Python, and compile them with it, as its pip would."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    command += ["--target", str(root / _SITE), "--python-version", _PYTHON]
    _step([*command, "--only-binary=:all:", *requirements], {"PYTHONPATH": ""})
    # Wheels hold files that Python 3.11 cannot compile; pip ignores these, too.
    compile_all = f"python3 -m compileall -qq /{_SITE} || true"
    _step(["chroot", str(root), "sh", "-c", compile_all], {})


@contextlib.contextmanager
def _overlay(work: Path, lowers: list[Path], upper: Path) -> Iterator[Path]:
    """Yield the merged tree of an overlay whose upper folder is `upper`."""
    root, scratch = work / "merged", work / "scratch"
    for folder in (root, scratch, upper):
        folder.mkdir(exist_ok=True)
    lower = ":".join(str(folder) for folder in lowers)
    options = f"lowerdir={lower},upperdir={upper},workdir={scratch}"
    _step(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], {})
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", str(root)], timeout=60, check=False)
        shutil.rmtree(scratch, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _step(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=_STEP_DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise MissingError(f"the image cannot be built: {command[0]}: {words}")
