"""The wrapper costs little more than the interpreter: heavy modules are imported when used.

No assertion is about time: the imported modules decide it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.paths import REPOSITORY

pytestmark = pytest.mark.usefixtures("fresh_interpreters")

HEAVY = (
    *("aiohttp", "asyncio", "ctypes", "docker", "fsspec", "hdfs_native", "hypothesis", "numpy"),
    *("pyarrow", "requests", "rich", "ssl", "urllib3", "xxhash", "zstandard"),
)
# Modules that each rank of a job would import without need.
UNUSED = (
    "click",
    "hashlib",
    "hmac",
    "msgspec.json",
    "platform",
    "queue",
    "random",
    "secrets",
    "shlex",
    "shutil",
    "socket",
    "subprocess",
    "tomllib",
    "typing_extensions",
)
_CODE = """
import atexit, os, sys
def tell(*ignored):
    os.write(2, " ".join(sorted(sys.modules)).encode())
    os._exit(0)
os.execvp = tell
atexit.register(tell)
from bootseer.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("run", "--help"),
        ("checkpoint", "mount", "--help"),
        ("snapshot", "--help"),
        ("config", "--json"),
        ("run", "--", "true"),
        ("run", "--store", "store", "--", "true"),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *arguments],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "XDG_RUNTIME_DIR": str(tmp_path),
            "PYTHONPATH": str(REPOSITORY),
        },
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    modules = done.stderr.split()
    assert "bootseer.cli" in modules
    # Of a start, up to the exec.
    unwanted = (*HEAVY, *UNUSED) if arguments[-1] == "true" else HEAVY
    assert not [name for name in unwanted if name in modules]


_INTERRUPTED = """
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, *ignored):
        if name == "bootseer.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from bootseer.__main__ import main
main()
"""


def test_an_interrupt_while_it_is_loaded_shows_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, "image", "list"],
        capture_output=True,
        cwd=REPOSITORY,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
