"""Commands, processes and folders of other users than the one who runs the tests.

Where only root may read the interpreter, the checkout and `/dev/fuse`, `reading_all` lets a user
read and enter everything, and nothing more; `with_device_mode` shows a `/dev/fuse` of another mode.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.needs import MissingError, require

NOBODY = 65534
"""User id of an ordinary user that every machine has."""
_DEADLINE_S = 60

# The tmpfs is mounted with `dev`: on a tmpfs of a user namespace a device node cannot be opened.
_OTHER_DEVICE = """
mount -t tmpfs -o dev,mode=755 tmpfs /mnt && mknod -m {mode:o} /mnt/fuse c 10 229 &&
mount --bind /mnt/fuse /dev/fuse && exec "$@"
"""


def as_user(user: int, *, reading_all: bool = False) -> tuple[str, ...]:
    """Return the words before a command that `user` is to run, in the group of the same number.

    Raises: MissingError without root or setpriv.
    """
    require("root", programs=["setpriv"])
    words: tuple[str, ...] = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    if reading_all:
        words += ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return words


def as_ordinary_user(*, reading_all: bool = False) -> tuple[str, ...]:
    """Return the words before a command of an ordinary user; () unless this user is root.

    Raises: MissingError without setpriv.
    """
    return as_user(NOBODY, reading_all=reading_all) if os.geteuid() == 0 else ()


def with_fuse(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Return `prefix` (of `as_ordinary_user`) extended so that the ordinary user may mount FUSE.

    Raises: MissingError.
    """
    require("fuse", programs=["fusermount3"])
    if not prefix or os.stat("/dev/fuse").st_mode & 0o006 == 0o006:
        return prefix
    return (*with_device_mode(0o666), *prefix)


def with_device_mode(mode: int) -> tuple[str, ...]:
    """Return the words before a command that sees a `/dev/fuse` with the permissions `mode`.

    Raises: MissingError where root may not change mounts.
    """
    require("root", "mount", programs=["unshare"])
    words = ("unshare", "--mount", "sh", "-c", _OTHER_DEVICE.format(mode=mode), "sh")
    _try((*words, "true"), "no namespace can change who may open /dev/fuse")
    return words


def unprivileged(*owned: Path) -> tuple[str, ...]:
    """Return the words before a command of an ordinary user who may mount FUSE and read all files.

    The user may make user namespaces, too, and becomes the owner of the folders `owned`. Raises:
    MissingError.
    """
    words = with_fuse(as_ordinary_user(reading_all=True))
    _try((*words, "unshare", "--user", "--map-root-user", "--mount", "true"),
         "an ordinary user cannot make a user namespace")  # fmt: skip
    for folder in owned:
        give_to_nobody(folder)
    return words


def give_to_nobody(folder: Path) -> None:
    """Make the user 65534 the owner of a tree; do nothing unless this user is root."""
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", folder], check=True)


def make_reachable(folder: Path) -> None:
    """Allow all users to enter and list the folder and the folders above it."""
    for one in (folder, *folder.parents):
        if one != Path("/"):
            one.chmod(one.stat().st_mode | 0o055)


@contextmanager
def folder_for_all_users() -> Iterator[Path]:
    """Yield a new folder that every user of this machine may enter and list.

    The folder is not below pytest's, which each new session makes private again.
    """
    folder = Path(tempfile.mkdtemp(prefix="bootseer-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def become(user: int) -> None:
    """Make this process one of `user`, in the group of the same number, for good.

    Raises: PermissionError without root.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _try(command: tuple[str, ...], reason: str) -> None:
    done = subprocess.run(
        command, cwd="/", capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise MissingError(f"{reason}: {done.stderr.strip()}")
