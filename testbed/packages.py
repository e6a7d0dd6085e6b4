"""Debian packages unpacked into a folder: nothing is installed, no service is started.

Owns a private set of apt's folders for each suite, so that packages of other suites than the
machine's own can be fetched. Packages and their unpacked files are kept between runs.
"""

import os
import shutil
import subprocess
from pathlib import Path

from testbed.needs import MissingError

_DEADLINE_S = 300.0
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Packages:
    """Packages of Debian's suites below one folder. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def unpacked(self, suite: str, name: str, *others: str) -> Path:
        """Return the folder with the unpacked files of the packages, as `usr/bin/...`.

        Raises: MissingError if a package cannot be fetched or unpacked.
        """
        target = self.folder / suite / name
        if not target.is_dir():
            downloads = self._empty(suite, "download")
            self._apt_get(suite, "download", name, *others, directory=downloads)
            partial = self._empty(suite, "partial")
            for package in downloads.glob("*.deb"):
                _unpack(package, partial)
            partial.rename(target)
        return target

    def source(self, suite: str, name: str) -> Path:
        """Return a folder with the freshly unpacked source of a package and Debian's patches.

        Raises: MissingError.
        """
        downloads = self._empty(suite, "source")
        self._apt_get(suite, "source", "--download-only", name, directory=downloads)
        (described,) = downloads.glob("*.dsc")
        target = downloads / name
        command = ["dpkg-source", "--no-check", "-x", described.name, str(target)]
        _run(command, f"unpack {described.name}", downloads)
        return target

    def unpacked_with_needs(self, suite: str, *names: str) -> Path:
        """Return a folder with the files of the packages and of all their dependencies.

        Raises: MissingError.
        """
        bare = self._empty(suite, "bare")
        (bare / "var/lib/dpkg").mkdir(parents=True)
        (bare / "var/lib/dpkg/status").touch()
        target = self._empty(suite, "with-needs")
        for package in self.download_missing(suite, list(names), bare):
            _unpack(package, target)
            package.unlink()
        return target

    def download_missing(self, suite: str, names: list[str], root: Path) -> list[Path]:
        """Return the files of the packages `names` and their dependencies that `root` lacks.

        Raises: MissingError.
        """
        downloads = self._empty(suite, "missing")
        (downloads / "partial").mkdir()
        options = [
            f"-oDir::State::status={root}/var/lib/dpkg/status",
            f"-oDir::Cache::archives={downloads}",
            "-oDebug::NoLocking=1",
            "--no-install-recommends",
            "--download-only",
            "--yes",
        ]
        self._apt_get(suite, *options, "install", *names, directory=downloads)
        return sorted(downloads.glob("*.deb"))

    def _empty(self, suite: str, name: str) -> Path:
        folder = self.folder / suite / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _apt_get(self, suite: str, *arguments: str, directory: Path) -> None:
        state = self.folder / suite / "apt"
        sources = state / "debian.sources"
        options = [
            f"-oDir::Etc::sourcelist={sources}",
            "-oDir::Etc::sourceparts=/dev/null",
            f"-oDir::State={state}",
            "-oDir::State::status=/dev/null",
            f"-oDir::Cache={state}/cache",
            "-oAPT::Sandbox::User=root",
        ]
        if shutil.which("apt-get") is None:
            raise MissingError("there is no apt-get to fetch it with")
        types = "deb deb-src" if arguments[0] == "source" else "deb"
        if not sources.exists() or types not in sources.read_text():
            (state / "lists/partial").mkdir(parents=True, exist_ok=True)
            (state / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
            source = f"Types: {types}\nURIs: {mirror()}\nSuites: {suite}\nComponents: main\n"
            sources.write_text(f"{source}Signed-By: {_KEYRING}\n")
            try:
                _run(["apt-get", "-qq", *options, "update"], f"reach Debian {suite}")
            except MissingError:
                sources.unlink()
                raise
        what = f"fetch {arguments[-1]} of Debian {suite}"
        _run(["apt-get", "-qq", *options, *arguments], what, directory)


def _unpack(package: Path, target: Path) -> None:
    _run(["dpkg-deb", "-x", str(package), str(target)], f"unpack {package.name}")


def mirror() -> str:
    """Return the URL of the machine's first apt source that is Debian's. Raises: MissingError."""
    listed = _run(
        ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"],
        "list the sources of apt",
    )
    for line in listed.splitlines():
        label, _, address = line.partition(" ")
        if label == "Debian":
            return address
    raise MissingError("none of apt's sources is Debian's")


def _run(command: list[str], what: str, directory: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True,
            timeout=_DEADLINE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"cannot {what}: {error}") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise MissingError(f"cannot {what}: {words[-1] if words else done.returncode}")
    return done.stdout
