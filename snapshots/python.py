"""Python interpreter of a set-up: found by the words of the command, and asked by a probe.

The probe runs through the job's runner, and its answer is checked before use. `remembered` keeps
the answers on the node.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, Unpack

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import DocumentFormat
from bootseer.base.short_digest import short_digest
from bootseer.errors import BootseerError, CorruptError
from bootseer.linux.interpreters import PYTHON, is_interpreter
from bootseer.linux.private_files import read_private_file, write_private_file
from bootseer.linux.root_paths import WorkingDirectory, find_program
from bootseer.linux.scripts import RunOptions
from bootseer.snapshots.key_parts import Part

if TYPE_CHECKING:
    import subprocess

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 300.0
"""Limit of an interpreter's answer. It may be read from an image that is on its way; without its
answer the key is another one, and the set-up is made anew."""
_OUTPUT_BYTES_MAX = 256 * 1024
# List of the host's shared libraries, which is rewritten when one is installed.
_LIBRARIES = "/etc/ld.so.cache"
_DECIDING_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "__PYVENV_LAUNCHER__")
# Runs on any Python 3; -I would hide a PYTHONPATH that the command sees, so it is not used.
_PROBE = """
import json, platform, site, sys, sysconfig
get = sysconfig.get_config_var
print(json.dumps({
    "implementation": sys.implementation.name,
    "version": platform.python_version(),
    "abi": str(get("SOABI") or ""),
    "platform": sysconfig.get_platform(),
    "libc": " ".join(platform.libc_ver()),
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "paths": sysconfig.get_paths(),
    "user_base": site.getuserbase() or "",
    "executable": sys.executable or "",
}))
"""


Answers = dict[str, "Interpreter | None"]
"""Answers of the interpreters that a start has asked, by path; None: it did not answer."""


class Runner(Protocol):
    """Function that runs a command where the job runs, such as `subprocess.run`."""

    def __call__(
        self, args: Sequence[str], /, **options: Unpack[RunOptions]
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command. Raises: OSError if the program cannot be started; TimeoutExpired."""
        ...


class Interpreter(Struct, frozen=True, kw_only=True):
    """Python interpreter, as the probe describes it."""

    path: str = ""
    """Path inside the job's root."""
    implementation: str
    version: str
    abi: str
    platform: str
    libc: str
    prefix: str
    base_prefix: str
    paths: Mapping[str, str]
    """Paths of the default install scheme: purelib, platlib, scripts, data, include."""
    user_base: str
    executable: str = ""
    """Path of the interpreter itself, which a launcher has started; empty if it is unknown."""

    @property
    def is_environment(self) -> bool:
        """Whether the interpreter belongs to a virtual environment."""
        return self.prefix != self.base_prefix

    def parts(self) -> list[Part]:
        """Return the parts that decide which wheels fit.

        They also decide where environments look for the interpreter.
        """
        return [
            Part("installation", self.base_prefix),
            Part("interpreter", f"{self.implementation} {self.version} {self.abi}".strip()),
            Part("libc", self.libc),
            Part("platform", self.platform),
        ]


class _Remembered(Struct, frozen=True):
    """Answer of an interpreter, and the state of files and variables under which it holds."""

    known_by: str
    interpreter: Interpreter


_FORM: DocumentFormat[Interpreter] = DocumentFormat(type=Interpreter, size_max=_OUTPUT_BYTES_MAX)
_REMEMBERED: DocumentFormat[_Remembered] = DocumentFormat(
    type=_Remembered, size_max=2 * _OUTPUT_BYTES_MAX
)


def find_python(place: WorkingDirectory, words: Sequence[str], search_path: str) -> str | None:
    """Return the interpreter of the first existing program in `words`; else PATH's; or None.

    `pip` and other console scripts name their interpreter in the first line. If that line names a
    shell (long paths, shims), the interpreter beside the script is returned.
    """
    for word in (*words, "python3", "python"):
        program = find_program(place.root, word, search_path, place.directory)
        if program is None:
            continue
        if PYTHON.fullmatch(program.rpartition("/")[2]):
            return program
        folder = program.rpartition("/")[0]
        for candidate in (_shebang(place.host(program)), f"{folder}/python3", f"{folder}/python"):
            if candidate and find_program(place.root, candidate, search_path, place.directory):
                return candidate
    return None


def find_uv_environment(place: WorkingDirectory, environ: Mapping[str, str]) -> str | None:
    """Return the `.venv` here or in the nearest folder above that has one.

    `uv pip` changes this environment if none is active. None if one is active.
    """
    if environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX"):
        return None
    folder = place.directory
    for parent in (folder, *map(str, PurePosixPath(folder).parents)):
        found = f"{parent.rstrip('/')}/.venv"
        if place.host(f"{found}/pyvenv.cfg").is_file():
            return found
    return None


def _shebang(script: Path) -> str:
    """Return the Python that a script names in its first line, or ""."""
    try:
        with script.open("rb") as file:
            line = file.readline(4096)
    except OSError:
        return ""
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    if words and PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return words[0]
    return ""


def probe(
    python: str,
    runner: Runner,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Interpreter | None:
    """Return the answer of `python` about itself, or None if it cannot be asked."""
    import subprocess  # here: a start that remembers the answer runs nothing

    try:
        done = runner(
            [python, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env=env,
            timeout=timeout_s,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("cannot ask %s: %s", python, error)
        return None
    output = done.stdout or b""
    if done.returncode != 0 or len(output) > _OUTPUT_BYTES_MAX:
        return None
    return parse(python, output)


def remembered(
    folder: Path, python: str, environ: Mapping[str, str], ask: Callable[[], Interpreter | None]
) -> Interpreter | None:
    """Return the answer of `python`, a program of this host, from a file if nothing has changed.

    `ask` is called if the program, its environment or the host's libraries have changed. Starting
    an interpreter takes longer than the rest of a start that finds everything in place.

    A launcher in the place of the interpreter (pyenv, asdf, mise) is asked each time, because the
    files and variables by which it chooses an interpreter are not known.
    """
    if not is_interpreter(os.path.realpath(python)):
        return ask()
    path = folder / f"{_digest(python)}.json"
    known_by = _known_by(python, environ)
    found = read_private_file(path, _REMEMBERED)
    if found is not None and found.known_by == known_by:
        return found.interpreter
    interpreter = ask()
    if interpreter is not None:
        with contextlib.suppress(OSError, BootseerError):
            write_private_file(path, _REMEMBERED.encode(_Remembered(known_by, interpreter)))
    return interpreter


def _known_by(python: str, environ: Mapping[str, str]) -> str:
    program = os.path.realpath(python)
    prefix = os.path.dirname(os.path.dirname(python))
    files = (python, program, os.path.dirname(program), f"{prefix}/pyvenv.cfg", _LIBRARIES)
    names = [one for one in environ if one.startswith("PYTHON") or one in _DECIDING_VARIABLES]
    facts = [program, *(f"{name}={environ[name]}" for name in sorted(names))]
    return _digest("\0".join([*facts, *map(_stamp, files)]))


def _digest(text: str) -> str:
    return short_digest(os.fsencode(text))[:32]


def _stamp(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def parse(path: str, output: bytes) -> Interpreter | None:
    """Return the probe's answer in `output`, or None if there is none. Pure."""
    # A site's start-up files may print lines before the answer.
    last = output.rstrip().rpartition(b"\n")[2]
    try:
        return replace(_FORM.decode(last, path), path=path)
    except CorruptError:
        return None
