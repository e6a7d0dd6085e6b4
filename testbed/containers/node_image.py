"""The image `bootseer-node` where no container engine builds docker/node/Dockerfile.

The Dockerfile's Debian, packages and wheels are unpacked into folders and written as an OCI layout.
Debian and the wheels, which change rarely, are a layer that is kept; Bootseer itself is the layer
on top. Needs root, apt and uv. `skopeo copy oci:FOLDER:bootseer-node docker://...` copies the image
to a registry.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from testbed.images.layout import OciLayout, StoredLayer
from testbed.needs import MissingError
from testbed.packages import Packages
from testbed.paths import REPOSITORY

NAME = "bootseer-node"
DOCKERFILE = REPOSITORY / "docker" / "node" / "Dockerfile"
USER_ID = 65532
_SUITE, _PYTHON = "trixie", "3.13"
# Packages of python:slim that the Dockerfile does not name.
_BASE = (
    "base-files",
    "bash",
    "coreutils",
    "dash",
    "grep",
    "libc-bin",
    "libstdc++6",
    "mount",
    "sed",
)
_DEADLINE_S = 600.0
_SITE = Path("usr/local/lib/python3/bootseer")


def node_image(kept: Path) -> Path:
    """Make the OCI layout of this checkout's image `bootseer-node` below `kept`; return it.

    Raises: MissingError if the image cannot be made here.
    """
    if os.geteuid() != 0:
        raise MissingError("making the image needs root: its files are root's")
    base = _base_layout(kept)
    root = base.folder.with_suffix(".root")
    work = kept / "image-work"
    for left in (work, root / "top"):
        shutil.rmtree(left, ignore_errors=True)
    target = kept / NAME
    try:
        # Blobs are never changed, so the base's are hard-linked.
        shutil.copytree(base.folder, work / "layout", copy_function=os.link)
        layout = OciLayout(work / "layout")
        (layout.folder / "index.json").unlink()
        _install(root / "top" / _SITE, "--no-deps", str(REPOSITORY))
        _compile(root, "-s", "/top", f"/top/{_SITE}")
        layout.write_index({NAME: [*base.layers("base"), layout.add_tree(root / "top")]})
        shutil.rmtree(target, ignore_errors=True)
        layout.folder.rename(target)
    finally:
        for left in (work, root / "top"):
            shutil.rmtree(left, ignore_errors=True)
    return target


def size_of(layout: Path) -> tuple[int, int]:
    """Return the bytes of the image as it is pulled, and as it is unpacked."""
    layers: list[StoredLayer] = OciLayout(layout).layers(NAME)
    return sum(one.stored_bytes for one in layers), sum(one.tar_bytes for one in layers)


def _base_layout(kept: Path) -> OciLayout:
    recipe = [
        DOCKERFILE,
        REPOSITORY / "pyproject.toml",
        REPOSITORY / "constraints.txt",
        Path(__file__),
    ]
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in recipe)).hexdigest()
    layout = OciLayout(kept / f"base-{digest[:16]}")
    if layout.folder.is_dir():
        return layout
    for old in kept.glob("base-*"):
        shutil.rmtree(old)
    work = kept / "base-work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        root = _debian(kept / "packages", ["python3", *dockerfile_words("apt-get install")])
        extras = [f"--extra={name}" for name in dockerfile_words("EXTRAS=")]
        _install(root / _SITE, "--requirements", str(REPOSITORY / "pyproject.toml"), *extras)
        partial = OciLayout(work / "layout")
        partial.create()
        _compile(root, "/usr/lib/python3", f"/usr/lib/python{_PYTHON}", f"/{_SITE}")
        partial.write_index({"base": [partial.add_tree(root)]})
        # Kept, since its Python compiles the modules of the layer above.
        root.rename(layout.folder.with_suffix(".root"))
        partial.folder.rename(layout.folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return layout


def dockerfile_words(prefix: str) -> list[str]:
    """Return the words behind `prefix` in the Dockerfile, which both recipes use."""
    line = re.search(rf"{prefix}([^\n&\\]*)", DOCKERFILE.read_text())
    assert line is not None, prefix
    return [word for word in re.split(r"[\s,]+", line[1]) if word and not word.startswith("-")]


def _debian(folder: Path, names: list[str]) -> Path:
    root = Packages(folder).unpacked_with_needs(_SUITE, *_BASE, *names)
    for kind in ("doc", "man", "info", "locale", "lintian", "bash-completion"):
        shutil.rmtree(root / "usr/share" / kind, ignore_errors=True)
    for name in ("run", "tmp", "proc", "sys", "dev", "var/tmp"):
        (root / name).mkdir(exist_ok=True)
    # The packages' install scripts would write these files.
    (root / "etc/passwd").write_text(
        f"root:x:0:0:root:/root:/bin/sh\nbootseer:x:{USER_ID}:{USER_ID}::/tmp:/usr/sbin/nologin\n"
    )
    (root / "etc/group").write_text(f"root:x:0:\nbootseer:x:{USER_ID}:\n")
    certificates = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
    (root / "etc/ssl/certs/ca-certificates.crt").write_bytes(
        b"".join(one.read_bytes() for one in certificates)
    )
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for link, goal in (("usr/bin/sh", "dash"), ("usr/local/bin/python", "/usr/bin/python3")):
        (root / link).unlink(missing_ok=True)
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(goal)
    (root / "tmp").chmod(0o1777)
    _add_entry_points(root)
    _run("ldconfig", "-r", str(root))
    return root


def _add_entry_points(root: Path) -> None:
    place = root / f"usr/local/lib/python{_PYTHON}/dist-packages"
    place.mkdir(parents=True, exist_ok=True)
    (place / "bootseer.pth").write_text(f"/{_SITE}\n")
    program = root / "usr/local/bin/bootseer"
    program.write_text("#!/usr/bin/python3\nfrom bootseer.__main__ import main\n\nmain()\n")
    program.chmod(0o755)


def _compile(root: Path, *what: str) -> None:
    """Compile modules with the image's own Python, as dpkg and pip do."""
    # Some modules are written for other versions of Python and cannot be compiled.
    _run("chroot", str(root), "sh", "-c", f"python3 -m compileall -qq {' '.join(what)} || true")


def _install(target: Path, *what: str) -> None:
    """Install wheels for the image's Python into a folder."""
    platform_name = f"{platform.machine()}-manylinux_2_36"
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(target)]
    command += ["--python-version", _PYTHON, "--python-platform", platform_name]
    _run(*command, "--constraint", str(REPOSITORY / "constraints.txt"), *what)
    shutil.rmtree(target / "bin", ignore_errors=True)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"cannot make the image: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise MissingError(f"cannot make the image: {words[-1] if words else command}")
