"""The tests on a fresh Debian or Ubuntu of another release, and so with another Python.

    python -m tests.pythons trixie              # Debian 13: Python 3.13
    python -m tests.pythons forky -n 2 tests/snapshots  # Debian's next: Python 3.14
    python -m tests.pythons noble               # Ubuntu 24.04: Python 3.12

Run by `make test-pythons`. The system is made anew by mmdebstrap and kept in BOOTSEER_TEST_DEBIAN
(~/.cache/bootseer-debian), with what README's `make test` installs there; the checkout's files are
copied into it at each run. The tests run in namespaces of mounts and processes of their own, on
this machine's kernel, network and cgroups; the root is pivoted, as a process in a chroot may make
no user namespaces.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from testbed.needs import MissingError, require
from testbed.packages import mirror
from testbed.paths import REPOSITORY

_FOLDER = os.environ.get("BOOTSEER_TEST_DEBIAN") or "~/.cache/bootseer-debian"
_PACKAGES = "ca-certificates,git,make,mount,python3,python3-venv"
_TESTS = ("-n", "2", "tests")
_CHECKOUT = "/bootseer"
# What reaches the registries of packages, where this machine has it.
_SETTINGS = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pip.conf",
)
_UBUNTU = {"noble": "deb http://archive.ubuntu.com/ubuntu noble main universe"}
# Debian has none: by its digest, so that what comes can be no other.
_KEYRING = "https://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
_KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
# Kept between runs: the environment is made once.
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
# Not by exec: the first process of the namespace reaps those whose parents have ended.
sh -ec "$@"
"""
_RUN = """
cd %s
python3 --version
make --silent system-test .venv/ready
exec .venv/bin/python -m pytest --dist loadgroup --no-loadscope-reorder -p no:cacheprovider "$@"
"""


def _system(suite: str) -> Path:
    """The root of a Debian. Raises: MissingError, CalledProcessError."""
    require("root", "mount", programs=["mmdebstrap", "pivot_root", "unshare"])
    root = Path(_FOLDER).expanduser() / suite
    if not root.is_dir():
        partial = root.with_name(f"{suite}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        words = ["mmdebstrap", "--quiet", "--variant=apt", "--mode=root", f"--include={_PACKAGES}"]
        if suite in _UBUNTU:
            words.append(f"--keyring={_ubuntu_keyring(root.parent)}")
        subprocess.run([*words, suite, partial, _UBUNTU.get(suite) or mirror()], check=True)
        partial.rename(root)
    for path in map(Path, _SETTINGS):
        if path.exists():
            shutil.copyfile(path, root / path.relative_to("/"))
    return root


def _ubuntu_keyring(folder: Path) -> Path:
    """The keys of Ubuntu's archive. Raises: MissingError, CalledProcessError."""
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
    """What git follows, and what it would; an environment from an earlier run stays."""
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
    """The exit code of pytest in a Debian of that suite.

    Raises: MissingError, CalledProcessError.
    """
    root = _system(suite)
    _copy_checkout(root)
    kept = (
        "PIP_CERT",
        "PIP_DEFAULT_TIMEOUT",
        "SSL_CERT_FILE",
        "PIP_INDEX_URL",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    )
    environment = {name: os.environ[name] for name in kept if name in os.environ}
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
