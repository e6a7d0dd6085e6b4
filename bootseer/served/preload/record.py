"""Import record: the modules that a program's next start on this node preloads.

Written by a worker when it is ready, and by a launcher before it starts its workers. Runs in the
job's process, with the standard library alone. The record is a file in the user's own folder, and
readers check that; values of variables that may be secrets are left out.
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

from bootseer.served.preload import PYTHON_VARIABLE, VARIABLE, is_worker_variable

VERSION = 1
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_OURS = ("bootseer", "_bootseer_collect", "sitecustomize", "usercustomize", "__main__")


def digests_of(environ: Mapping[str, str], salt: str) -> dict[str, str]:
    """Return a digest of each variable's value, for comparison without the value."""
    return {
        name: hashlib.sha256(f"{salt}\0{value}".encode(errors="surrogateescape")).hexdigest()
        for name, value in environ.items()
    }


def write(began: Mapping[str, str]) -> None:
    """Write the record of this process, started with variables `began`, if its launcher asks."""
    # Only the first worker of a node writes a record.
    is_first = "TORCHELASTIC_RUN_ID" in began and began.get("LOCAL_RANK") == "0"
    folder = began.get(VARIABLE)
    if folder and (is_first or _is_command_of_run(began)):
        _write(began, json.loads(Path(folder, "plan").read_bytes()))


def _write(began: Mapping[str, str], plan: Mapping[str, Any]) -> None:
    if (document := make_record(began, plan)) is None:
        return
    replace_document(plan["record"], document)
    # Modules that could not be preloaded with the older record are tried again.
    Path(plan["refused"]).unlink(missing_ok=True)


def replace_document(path: str, document: Mapping[str, Any]) -> None:
    """Replace the file `path` by a document, in one step. Raises: OSError."""
    temporary = f"{path}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file)
    os.replace(temporary, path)


def make_record(began: Mapping[str, str], plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of this process; None if its command line is not supported."""
    if (words := program_words(sys.orig_argv)) is None:
        return None
    known = plan["variables"]
    digests = digests_of(began, plan["salt"])
    others = {
        name: value
        for name, value in began.items()
        if known.get(name) != digests[name] and not is_worker_variable(name)
    }
    extra = {name: value for name, value in others.items() if not _SECRET.search(name)}
    last = plan.get("program") or {"extra": {}, "varying": []}
    varying = {name for name in extra if last["extra"].get(name, extra[name]) != extra[name]}
    now = digests_of(os.environ, plan["salt"])
    changed = {
        name: now.get(name, "")
        for name in {*began, *now}
        if digests.get(name) != now.get(name) and not is_worker_variable(name)
    }
    return {
        "version": VERSION,
        "executable": sys.executable,
        "words": words,
        "arguments": sys.orig_argv[len(words) + 1 :],
        "extra": extra,
        # Variables whose values may differ from the last time: a run's number, or a secret.
        "varying": sorted({*varying, *last["varying"], *(others.keys() - extra.keys())}),
        "missing": sorted(name for name in known if name not in began),
        "salt": plan["salt"],
        "changed": changed,
        "modules": library_modules(),
    }


def program_words(command: list[str]) -> list[str] | None:
    """Return the options and program of an interpreter's command line; None if it is not supported.

    Only -u, -m and a script are: other options may change what the program does.
    """
    words = []
    rest = command[1:]
    while rest and rest[0] == "-u":
        words.append(rest.pop(0))
    if len(rest) > 1 and rest[0] == "-m":
        return [*words, *rest[:2]]
    return [*words, rest[0]] if rest and not rest[0].startswith("-") else None


def library_modules() -> list[str]:
    """Return the loaded modules that are built in or installed, in order of import."""
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


def _is_command_of_run(began: Mapping[str, str]) -> bool:
    """Return whether `bootseer run` became this process, which is no worker of a launcher."""
    launched, _, _ = began.get("BOOTSEER_LAUNCHED", "").partition(":")
    return launched == str(os.getpid()) and "TORCHELASTIC_RUN_ID" not in began


def prepare_launcher(began: Mapping[str, str]) -> None:
    """Make the launcher in this process use the preloader; write its record."""
    folder = began.get(VARIABLE, "")
    if _is_command_of_run(began):
        with contextlib.suppress(OSError, ValueError, KeyError):
            plan = json.loads(Path(folder, "plan").read_bytes())
            _write(began, {**plan, **plan["launcher"]})
    # torchrun starts its workers by the program that PYTHON_EXEC names.
    shim = os.path.join(folder, "python")
    if "PYTHON_EXEC" not in os.environ and os.path.isabs(shim) and os.access(shim, os.X_OK):
        os.environ["PYTHON_EXEC"] = shim
        os.environ[PYTHON_VARIABLE] = sys.executable
