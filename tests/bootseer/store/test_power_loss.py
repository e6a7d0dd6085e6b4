"""Objects that a folder store has put survive a loss of power, by its system calls.

After a loss of power, a file without flushed bytes may be empty or cut, and a name in a folder that
was not flushed may be the old one. A publication must flush both before it returns, the file before
its name appears.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.needs import MissingError

_CALLS = "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,openat,unlinkat"
# A call that another thread interrupts has a line without its result.
_TRACED = re.compile(r"(?:\[pid\s+\d+\] |\d+ +)?(\w+)\((.*?)(?:\)\s+= \d+| <unfinished \.\.\.>$)")
_PATH = re.compile(r"\d+<([^>]*)>")
_NAME = re.compile(r'"([^"]*)"')

_PROGRAMS = {
    "publish": 'with open_store(url) as store:\n    assert store.publish("a/key", data)\n',
    "replace": (
        'with open_store(url) as store:\n    store.publish("a/key", data, replace=True)\n'
        '    store.publish("a/key", data, replace=True)\n'
    ),
    "create": 'with open_backend(url).create("a/key") as writer:\n    writer.write(data)\n',
    "overwrite": (
        'for _ in "ab":\n    with open_backend(url).create("a/key", overwrite=True) as writer:\n'
        "        writer.write(data)\n"
    ),
    "copy out of a checkpoint": (
        "import os; from pathlib import Path; from urllib.parse import urlsplit\n"
        "from bootseer.checkpoints import copy_out, open_checkpoints\n"
        "kept, target = url.replace('/store', '/kept'), Path(urlsplit(url).path, 'a')\n"
        "os.makedirs(target)\n"
        "with open_checkpoints(kept) as storage:\n"
        "    with storage.backend.create('key') as writer:\n        writer.write(data)\n"
        "    copy_out(storage, 'key', target / 'key')\n"
    ),
    "rename": (
        'with open_backend(url).create("b") as writer:\n    writer.write(data)\n'
        'open_backend(url).rename("b", "a/key")\n'
    ),
}


class Disk:
    """Files of a traced program as a disk surely has them."""

    def __init__(self) -> None:
        self.unflushed: set[str] = set()
        """Files with bytes that were written and not flushed."""
        self.unnamed: dict[str, set[str]] = {}
        """By folder, names that were made or changed and not flushed."""
        self.named_too_early: set[str] = set()
        """Names that appeared before the bytes of their file were flushed."""

    def apply(self, call: str, arguments: str) -> None:
        paths, names = _PATH.findall(arguments), _NAME.findall(arguments)
        if call in ("write", "pwrite64"):
            self.unflushed.add(paths[0])
        elif call in ("fsync", "fdatasync"):
            self.unflushed.discard(paths[0])
            self.unnamed.pop(paths[0], None)
        elif call == "openat" and "O_CREAT" in arguments:
            # From the current directory where there is no descriptor.
            folder, name = os.path.split(names[0])
            self._name(folder or paths[0], name)
        elif call in ("rename", "renameat", "renameat2"):
            at = paths if call != "rename" else ("/", "/")
            source, target = (os.path.join(*pair) for pair in zip(at, names, strict=True))
            if source in self.unflushed:
                self.named_too_early.add(target)
            self._name(*os.path.split(source))
            self._name(*os.path.split(target))

    def _name(self, folder: str, name: str) -> None:
        self.unnamed.setdefault(folder, set()).add(name)


@pytest.mark.parametrize("program", sorted(_PROGRAMS))
def test_what_was_put_outlives_a_loss_of_power(tmp_path: Path, program: str) -> None:
    strace = shutil.which("strace")
    if strace is None:
        raise MissingError("strace is not installed: the system calls cannot be seen")
    root, log = tmp_path / "store", tmp_path / "log"
    code = "from bootseer.store import open_backend, open_store\nurl, data = {!r}, b'x' * 70_000\n"
    tracer = [strace, "-f", "-y", "-s", "4096", "-e", f"trace={_CALLS}", "-o", str(log)]
    done = subprocess.run(
        [*tracer, sys.executable, "-c", code.format(root.as_uri()) + _PROGRAMS[program]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "ptrace" in done.stderr and not root.exists():
        raise MissingError(f"no process may be traced here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    disk, seen = Disk(), set[str]()
    for line in log.read_text().splitlines():
        match = _TRACED.match(line)
        if match is not None and str(root) in line:
            disk.apply(match[1], match[2])
            seen.add("write" if match[1] == "pwrite64" else match[1])
    assert {"write", "fsync"} <= seen, "nothing was traced"
    assert (root / "a/key").read_bytes() == b"x" * 70_000
    assert not disk.named_too_early
    # The mark of the folder is made again where it is missing.
    assert {Path(path).name for path in disk.unflushed} <= {".bootseer.store"}
    folder = str(root / "a")
    assert "key" not in disk.unnamed.get(folder, ()), "its folder was not flushed"
