"""Runs the tests on a new Debian or Ubuntu of another release, and so with another Python.

    python -m tests.pythons trixie              # Debian 13: Python 3.13
    python -m tests.pythons forky -n 2 tests/snapshots  # Debian's next: Python 3.14
    python -m tests.pythons noble               # Ubuntu 24.04: Python 3.12

`make test-pythons` runs it. The system is made by mmdebstrap and kept in BOOTSEER_TEST_DEBIAN
(~/.cache/bootseer-debian), with the packages that `make test` installs; the checkout's files are
copied into it at each run. The tests run in their own mount and process namespaces, on this
machine's kernel, network and cgroups. The root is pivoted, since a process in a chroot may not make
user namespaces.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from testbed.debian import NETWORK_FILES, make_system, network_variables
from testbed.needs import MissingError, require
from testbed.paths import REPOSITORY

_FOLDER = os.environ.get("BOOTSEER_TEST_DEBIAN") or "~/.cache/bootseer-debian"
_PACKAGES = "ca-certificates,git,make,mount,python3,python3-venv"
_TESTS = ("-n", "2", "tests")
_CHECKOUT = "/bootseer"
_SETTINGS = (Path("/etc/resolv.conf"), Path("/etc/hosts"), *NETWORK_FILES)
_UBUNTU = {"noble": "deb http://archive.ubuntu.com/ubuntu noble main universe"}
# Debian has no package of it. The digest makes sure that the right file is fetched.
_KEYRING = "https://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
_KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
_ENTER = """
set -e
root=$0
mount --make-rprivate /
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
cd "$root"
pivot_root . .
umount --lazy .
cd /
# Not by exec: the namespace's first process has to reap orphans.
sh -ec "$@"
"""
_RUN = """
cd %s
python3 --version
make --silent system-test .venv/ready
exec .venv/bin/python -m pytest --dist loadgroup --no-loadscope-reorder -p no:cacheprovider "$@"
"""


def _system(suite: str) -> Path:
    """Return the root of a system, made unless it is kept.

    Raises: MissingError, CalledProcessError.
    """
    require("root", "mount", programs=["mmdebstrap", "pivot_root", "unshare"])
    root = Path(_FOLDER).expanduser() / suite
    if not root.is_dir():
        partial = root.with_name(f"{suite}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        options = [f"--keyring={_ubuntu_keyring(root.parent)}"] if suite in _UBUNTU else []
        make_system(suite, partial, _PACKAGES, source=_UBUNTU.get(suite, ""), options=options)
        partial.rename(root)
    for path in _SETTINGS:
        if path.exists():
            shutil.copyfile(path, root / path.relative_to("/"))
    return root


def _ubuntu_keyring(folder: Path) -> Path:
    """Return the file with the keys of Ubuntu's archive.

    Raises: MissingError, CalledProcessError.
    """
    with urllib.request.urlopen(_KEYRING, timeout=60) as answer:
        package = answer.read()
    if hashlib.sha256(package).hexdigest() != _KEYRING_SHA256:
        raise MissingError("the keyring of Ubuntu's archive has another digest")
    with tempfile.NamedTemporaryFile(suffix=".deb") as file:
        file.write(package)
        file.flush()
        subprocess.run(["dpkg-deb", "-x", file.name, folder / "ubuntu-keyring"], check=True)
    return folder / "ubuntu-keyring/usr/share/keyrings/ubuntu-archive-keyring.gpg"


def _copy_checkout(root: Path) -> None:
    """Copy the tracked files and the untracked, not ignored ones; keep an earlier run's .venv."""
    target = root / _CHECKOUT.lstrip("/")
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        if path.name not in (".venv", ".cache"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
    for name in names.decode().split("\0"):
        source = REPOSITORY / name
        if name and (source.is_symlink() or source.exists()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def main(suite: str, words: list[str]) -> int:
    """Run pytest with the arguments `words` in a system of that suite; return its exit code.

    Raises: MissingError, CalledProcessError.
    """
    root = _system(suite)
    _copy_checkout(root)
    environment = network_variables("SSL_CERT_FILE", "no_proxy")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, root),
            *(_RUN % _CHECKOUT, "sh", *(words or _TESTS)),
        ],
        env={**environment, "PATH": path, "HOME": "/root", "LANG": "C.UTF-8"},
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except MissingError as error:
        sys.exit(f"cannot run: {error}")
