"""Commands and processes as another user than the one who runs the tests.

Root may keep the interpreter, the checkout and `/dev/fuse` where nobody else may look:
`reading_all` lets a user read and enter everything, and no more; `device_for` shows a `/dev/fuse`
of another mode.
"""

import os
import subprocess
from pathlib import Path

from testbed.needs import MissingError, require

NOBODY = 65534
_DEADLINE_S = 60

# tmpfs is mounted with `dev`, since a user namespace's would refuse to open a device node.
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
    """Return the words before a command that NOBODY is to run; none where this user is not root.

    Raises: MissingError without setpriv.
    """
    return as_user(NOBODY, reading_all=reading_all) if os.geteuid() == 0 else ()


def with_fuse(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Return `prefix`, which makes an ordinary user of root, so that the user may mount FUSE.

    Raises: MissingError.
    """
    require("fuse", programs=["fusermount3"])
    if not prefix or os.stat("/dev/fuse").st_mode & 0o006 == 0o006:
        return prefix
    return (*device_for(0o666), *prefix)


def device_for(mode: int) -> tuple[str, ...]:
    """Return the words before a command that sees a `/dev/fuse` of that mode, root's as ever.

    Raises: MissingError where root may not change mounts.
    """
    require("root", "mount", programs=["unshare"])
    words = ("unshare", "--mount", "sh", "-c", _OTHER_DEVICE.format(mode=mode), "sh")
    _try((*words, "true"), "no namespace can change who may open /dev/fuse")
    return words


def unprivileged(*owned: Path) -> tuple[str, ...]:
    """Return the words before a command of an ordinary user who may mount FUSE and make user
    namespaces, and who reads everything; the trees of the folders `owned` become that user's.

    Raises: MissingError.
    """
    words = with_fuse(as_ordinary_user(reading_all=True))
    _try((*words, "unshare", "--user", "--map-root-user", "--mount", "true"),
         "an ordinary user cannot make a user namespace")  # fmt: skip
    for folder in owned:
        give(folder)
    return words


def give(folder: Path) -> None:
    """Make NOBODY the owner of a tree; nothing where this user is not root."""
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", folder], check=True)


def open_way(folder: Path) -> None:
    """Let everybody enter and list the folder and all above it."""
    for one in (folder, *folder.parents):
        if one != Path("/"):
            one.chmod(one.stat().st_mode | 0o055)


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
