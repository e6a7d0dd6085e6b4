"""Other clients of HDFS: programs of Debian's packages, and libhdfs built for pyarrow.

Owns their files and command lines. Nothing is installed. No package index has a binary of libhdfs;
pydoop's source distribution contains Hadoop's C source of it.
"""

import contextlib
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.model import Workspace
from testbed.hdfs.classpath import classpath
from testbed.needs import MissingError
from testbed.packages import Packages
from testbed.processes import FuseProcess, mounted

_SUITE = "bookworm"
_PYDOOP = "pydoop==2.0.0"
_STEP_DEADLINE_S = 240.0


def program(workspace: Workspace, package: str, name: str) -> Path:
    """Return the program `name` of a Debian package. Raises: MissingError."""
    packages = Packages(workspace.kept / "packages")
    folder: Path = fetch_once(workspace, package, lambda: packages.unpacked(_SUITE, package))
    add_note(workspace, f"{name} is that of Debian {_SUITE}'s package {package} {_version(folder)}")
    return folder / "usr/bin" / name


def _version(folder: Path) -> str:
    """Return the version of an unpacked package from its changelog."""
    for changelog in folder.glob("usr/share/doc/*/changelog.Debian*.gz"):
        with gzip.open(changelog, "rt", encoding="utf-8") as file:
            found = re.match(r"\S+ \(([^)]+)\)", file.readline())
        if found:
            return found[1]
    return "of unknown version"


def fetch_once(workspace: Workspace, name: str, fetch: Callable[[], Any]) -> Any:
    """Return the result of the first call of `fetch` under this name.

    A case may later be in a network namespace without a way out. Raises: MissingError, the same
    each time.
    """
    fetched: dict[str, Any] = workspace.shared.setdefault("fetched", {})
    if name not in fetched:
        try:
            fetched[name] = fetch()
        except MissingError as reason:
            fetched[name] = reason
    if isinstance(fetched[name], MissingError):
        raise fetched[name]
    return fetched[name]


def add_note(workspace: Workspace, line: str) -> None:
    """Add a line to the case's notes, once."""
    notes: list[str] = workspace.shared.setdefault("notes", [])
    if line not in notes:
        notes.append(line)


def rclone_remote(address: str, path: str) -> str:
    """Return rclone's name of a file or folder of an HDFS."""
    return f":hdfs,namenode='{address}',username=hdfs:{path}"


@contextlib.contextmanager
def rclone_mount(
    rclone: Path, address: str, folder: str, mountpoint: Path, log: Path
) -> Iterator[FuseProcess]:
    """Mount `folder` by rclone with its defaults until the block ends. Raises: MissingError."""
    command = [str(rclone), "mount", "--config", "/dev/null"]
    command += [rclone_remote(address, folder), str(mountpoint)]
    with mounted(command, mountpoint, log) as server:
        yield server


def libhdfs_environment(workspace: Workspace) -> dict[str, str]:
    """Return the variables by which pyarrow finds libhdfs, the JVM and Hadoop's jars.

    Raises: MissingError.
    """
    folder: Path = fetch_once(workspace, "libhdfs", lambda: _libhdfs(workspace.kept))
    add_note(
        workspace, f"libhdfs is built from the source in {_PYDOOP}, with the cluster's own jars"
    )
    return {
        "ARROW_LIBHDFS_DIR": str(folder),
        "CLASSPATH": ":".join(map(str, classpath())),
        "JAVA_HOME": str(_java_home()),
    }


def _libhdfs(kept: Path) -> Path:
    """Return the folder with libhdfs, built unless it is kept. Raises: MissingError."""
    folder = kept / "libhdfs"
    if not (folder / "libhdfs.so").exists():
        work = kept / "libhdfs-work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            _build_libhdfs(work)
            shutil.rmtree(folder, ignore_errors=True)
            (work / "built").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _java_home() -> Path:
    compiler = shutil.which("javac")
    if compiler is None:
        raise MissingError("libhdfs needs a JDK (openjdk-17-jdk-headless)")
    return Path(compiler).resolve().parent.parent


def _build_libhdfs(work: Path) -> None:
    if shutil.which("gcc") is None:
        raise MissingError("libhdfs is built with gcc, and there is none")
    # pip runs its setup.py, which needs pkg_resources of an old setuptools.
    (work / "constraints.txt").write_text("setuptools<60\n")
    _run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--no-binary", "pydoop", "--dest", str(work), _PYDOOP),
        ],
        work,
    )
    with tarfile.open(next(work.glob("pydoop-*.tar.gz"))) as archive:
        for member in archive:
            inside = member.name.partition("/src/libhdfs/")[2]
            if member.isfile() and inside and ".." not in inside:
                target = work / "source" / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None, "a file has content"
                target.write_bytes(source.read())
    home = _java_home()
    headers = [".", "include", "include/hdfs", "common", "os", "os/posix"]
    headers += [str(home / "include"), str(home / "include/linux")]
    files = ["exception.c", "hdfs.c", "jni_helper.c", "common/htable.c"]
    files += [str(path) for path in sorted((work / "source/os/posix").glob("*.c"))]
    virtual_machine = home / "lib/server"
    (work / "built").mkdir()
    _run(
        [
            *("gcc", "-shared", "-fPIC", "-O2", "-w", *(f"-I{folder}" for folder in headers)),
            *(*files, f"-L{virtual_machine}", "-ljvm", f"-Wl,-rpath,{virtual_machine}"),
            *("-lpthread", "-o", str(work / "built/libhdfs.so")),
        ],
        work / "source",
    )


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PIP_BUILD_CONSTRAINT": str(folder / "constraints.txt")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=_STEP_DEADLINE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"libhdfs cannot be built: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-300:]
        raise MissingError(f"libhdfs cannot be built: {command[0]}: {words}")
