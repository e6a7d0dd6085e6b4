"""Runs `bootseer` commands in forks of one process that has imported all of it.

A command costs milliseconds then, and may run as another user, who could not read the interpreter.
Reads one request per line (JSON) on stdin, answers one line on stdout. Single-threaded, so that a
fork is safe.
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import time
from typing import Any, NoReturn

from bootseer.linux.processes import wait_readable
from testbed.users import NOBODY, become

_NOT_IMPORTED = (
    "bootseer.demo.",
    "bootseer.__main__",
    "bootseer.fuse.striped.group.channel",
    "bootseer.fuse.striped.group.loading",
    "bootseer.fuse.striped.group.reader",
)


def _import_all() -> None:
    import bootseer

    for module in pkgutil.walk_packages(bootseer.__path__, "bootseer."):
        # The demo's trainer is a program, the command line's entry point runs, the rest is torch's.
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    for name in ("rich.console", "rich.table", "rich._unicode_data", "encodings.idna", "fsspec"):
        importlib.import_module(name)


def _child(request: dict[str, Any]) -> NoReturn:
    code = 70
    try:
        os.setsid()
        for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
            flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if number else 0)
            os.dup2(os.open(path, flags, 0o600), number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if request["nobody"]:
            become(NOBODY)
        from bootseer.cli import main

        arguments = [os.fsdecode(bytes.fromhex(argument)) for argument in request["arguments"]]
        try:
            main(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        started_s = time.monotonic()
        pid = os.fork()
        if not pid:
            _child(request)
        process = os.pidfd_open(pid)
        in_time = bool(wait_readable([process], request["timeout_s"]))
        os.close(process)
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        answers.write(
            json.dumps({"code": code, "in_time": in_time, "s": time.monotonic() - started_s}) + "\n"
        )


if __name__ == "__main__":
    _import_all()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _serve()
