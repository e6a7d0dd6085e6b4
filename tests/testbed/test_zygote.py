"""A program forked by `testbed.zygote` behaves like the executed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import zygote
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.users import NOBODY

_TELL = """
import os, resource, signal, sys, threading, time
from pathlib import Path
print(os.getppid(), os.getcwd(), sys.argv, sys.orig_argv, sys.path[0], dict(os.environ))
print(Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/environ").read_bytes())
print(sorted(os.listdir("/proc/self/fd")), os.umask(0), os.getpgid(0) == os.getpid())
print([signal.getsignal(n) for n in signal.valid_signals()], signal.pthread_sigmask(0, ()))
print([(f.encoding, f.errors, f.line_buffering) for f in (sys.stdin, sys.stdout, sys.stderr)])
print(threading.main_thread() is threading.current_thread(), len(os.listdir("/proc/self/task")))
print(os.getresuid(), os.getgroups(), __name__, time.tzname, sys.stdin.read())
"""
_THREAD = """
import atexit, threading
atexit.register(print, "last")
threading.Timer(0.1, print, "first").start()
"""


def _done(arguments: tuple[str, ...], folder: Path, **options: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        **{
            "cwd": folder,
            "text": True,
            "errors": "backslashreplace",
            "capture_output": True,
            "check": False,
            **options,
        },
    )  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", _TELL, "a", "b c"),
        ("-c", "1 / 0"),
        ("-c", "raise KeyboardInterrupt"),
        ("-c", "import sys; sys.exit('no')"),
        ("-c", "import sys; sys.exit(300)"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
        ("-c", _THREAD),
        ("-m", "bootseer", "--version"),
        ("-m", "bootseer", "run", "--", "sh", "-c", "echo $A; exit 7"),
        ("-m", "bootseer", "none"),
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_is_what_an_ordinary_start_is(arguments: tuple[str, ...], tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "A": "\udcff=\n", "TZ": "UTC-3"}
    options = {"env": variables, "input": "in", "start_new_session": True}
    with zygote.without_zygote():
        expected = _done(arguments, tmp_path, **options)
    code, out, err = _done(arguments, tmp_path, **options)
    assert out.splitlines() == expected[1].splitlines()
    # Python 3.13 shows lines of `-c`, too.
    assert err.splitlines()[-1:] == expected[2].splitlines()[-1:]
    assert code == expected[0]


@pytest.mark.needs("root")
def test_is_forked_also_for_a_user_who_cannot_read_the_interpreter(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getresuid(), os.getgroups(), 'bootseer' in sys.modules)"
    try:
        _, out, _ = _done(("-c", code), Path("/"), user=NOBODY, group=NOBODY, extra_groups=[])
    except PermissionError as error:
        raise MissingError(f"the kernel lets nobody rename a process: {error}") from None
    assert out == f"{(NOBODY,) * 3} [] True\n"


def test_a_start_that_cannot_be_forked_costs_no_other_its_fork() -> None:
    program = """
import os, subprocess, sys
from testbed import zygote
zygote.install()
tell = [sys.executable, "-c", "import sys; print('bootseer' in sys.modules, flush=True)"]
subprocess.run(tell, stdin=os.open("/", os.O_RDONLY))
subprocess.run(tell)
print(*zygote.failures)
"""
    with zygote.without_zygote():
        _, out, err = _done(("-c", program), REPOSITORY)
    # The first does not start at all: the interpreter refuses a folder as its input.
    forked, failure = out.splitlines()
    assert forked == "True", err
    assert failure.startswith("-c import sys")
    assert "IsADirectoryError" in failure


@pytest.mark.needs("root")
def test_a_first_start_in_a_network_of_its_own_costs_no_other_its_fork() -> None:
    program = """
import subprocess, sys
from testbed import zygote
from testbed.network import own_network
zygote.install()
tell = [sys.executable, "-c", "import sys; print('bootseer' in sys.modules, flush=True)"]
with own_network():
    subprocess.run(tell)
subprocess.run(tell)
"""
    with zygote.without_zygote():
        _, out, err = _done(("-c", program), REPOSITORY)
    assert out.split() == ["False", "True"], err
