"""What a program's next start on this node imports ahead: written by a worker when it is ready, and
by a launcher before it starts its workers.

Runs in the job's process, with the standard library alone. The record is a file of the user's own
folder, and whoever reads it checks that; values of variables that may be secrets are left out.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.served.preload import PYTHON_VARIABLE, VARIABLE, is_of_process

VERSION = 1
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_OURS = ("bootseer", "_bootseer_collect", "sitecustomize", "usercustomize", "__main__")


def digests_of(environ: Mapping[str, str], salt: str) -> dict[str, str]:
    """Variables by name, so that they can be compared and not read."""
    return {
        name: hashlib.sha256(f"{salt}\0{value}".encode(errors="surrogateescape")).hexdigest()
        for name, value in environ.items()
    }


def write(began: Mapping[str, str]) -> None:
    """Write the record of this process, where its launcher wants one of it.

    `began`: the environment that the process was started with.
    """
    # Of a node's workers the first.
    is_first = "TORCHELASTIC_RUN_ID" in began and began.get("LOCAL_RANK") == "0"
    folder = began.get(VARIABLE)
    if folder and (is_first or _is_program(began)):
        _write(began, json.loads(Path(folder, "plan").read_bytes()))


def _write(began: Mapping[str, str], plan: Mapping[str, Any]) -> None:
    if (document := document_of(began, plan)) is None:
        return
    replace_document(plan["record"], document)
    # What could not be preloaded of an older record is tried again.
    Path(plan["refused"]).unlink(missing_ok=True)


def replace_document(path: str, document: Mapping[str, Any]) -> None:
    """Put a document of the user's own at `path`, in one step. Raises: OSError."""
    temporary = f"{path}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file)
    os.replace(temporary, path)


def document_of(began: Mapping[str, str], plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of this process; None where a program was started in a way that is not served."""
    if (words := program_words(sys.orig_argv)) is None:
        return None
    known = plan["variables"]
    digests = digests_of(began, plan["salt"])
    others = {
        name: value
        for name, value in began.items()
        if known.get(name) != digests[name] and not is_of_process(name)
    }
    extra = {name: value for name, value in others.items() if not _SECRET.search(name)}
    last = plan.get("program") or {"extra": {}, "varying": []}
    varying = {name for name in extra if last["extra"].get(name, extra[name]) != extra[name]}
    now = digests_of(os.environ, plan["salt"])
    changed = {
        name: now.get(name, "")
        for name in {*began, *now}
        if digests.get(name) != now.get(name) and not is_of_process(name)
    }
    return {
        "version": VERSION,
        "executable": sys.executable,
        "words": words,
        "arguments": sys.orig_argv[len(words) + 1 :],
        "extra": extra,
        # A run's number, or a secret: other ones than the last time are no reason to step aside.
        "varying": sorted({*varying, *last["varying"], *(others.keys() - extra.keys())}),
        "missing": sorted(name for name in known if name not in began),
        "salt": plan["salt"],
        "changed": changed,
        "modules": library_modules(),
    }


def program_words(command: list[str]) -> list[str] | None:
    """Behind the interpreter: the options and the program; None where an option is not known to
    change nothing but buffering, or where there is no program."""
    words = []
    rest = command[1:]
    while rest and rest[0] == "-u":
        words.append(rest.pop(0))
    if len(rest) > 1 and rest[0] == "-m":
        return [*words, *rest[:2]]
    return [*words, rest[0]] if rest and not rest[0].startswith("-") else None


def library_modules() -> list[str]:
    """The loaded modules that come with the interpreter or are installed, in the order in which
    their imports began; the program's own are not among them."""
    user = getattr(sys.modules.get("site"), "USER_BASE", None)
    prefixes = {sys.prefix, sys.base_prefix, "/usr", *filter(None, [user])}
    roots = tuple(os.path.join(prefix, "lib") for prefix in prefixes)
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name.partition(".")[0] in _OURS or getattr(spec, "name", "") != name:
            continue
        is_built_in = origin in ("built-in", "frozen")
        if is_built_in or (isinstance(origin, str) and origin.startswith(roots)):
            found.append(name)
    return found


def _is_program(began: Mapping[str, str]) -> bool:
    """Whether this process was `bootseer run`, and is no worker of a launcher."""
    launched, _, _ = began.get("BOOTSEER_LAUNCHED", "").partition(":")
    return launched == str(os.getpid()) and "TORCHELASTIC_RUN_ID" not in began


def launches(began: Mapping[str, str]) -> None:
    """Let the launcher in this process start its workers through the preloader, and write its own
    record, if it was not forked from one itself. `began`: as of `write`."""
    folder = began.get(VARIABLE, "")
    if _is_program(began):
        with contextlib.suppress(OSError, ValueError, KeyError):
            plan = json.loads(Path(folder, "plan").read_bytes())
            _write(began, {**plan, **plan["launcher"]})
    shim = os.path.join(folder, "python")
    if "PYTHON_EXEC" not in os.environ and os.path.isabs(shim) and os.access(shim, os.X_OK):
        os.environ["PYTHON_EXEC"] = shim
        os.environ[PYTHON_VARIABLE] = sys.executable
