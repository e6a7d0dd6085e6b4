"""Set-ups and their keys: everything that decides the result of a set-up.

`resolve` reads inputs, interpreter and settings, infers the targets, and lists the parts of the
key. `Resolved.key` adds the former contents of the targets. Reads the machine, changes nothing.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.base.redact import HIDDEN, redact, strip_logins
from bootseer.errors import InvalidInputError, UnsupportedError
from bootseer.linux.processes import KILLED_S, wait_readable
from bootseer.linux.root_paths import WorkingDirectory, find_program
from bootseer.linux.scripts import RunOptions, as_script
from bootseer.snapshots.command_parts import (
    command_part,
    hidden_words,
    is_always_in_key,
    secret_part,
    variable_parts,
)
from bootseer.snapshots.commands import FILE_VARIABLES, Hints, hints_of, is_on
from bootseer.snapshots.inputs import (
    TOOLS,
    Inputs,
    collect_inputs,
    folderless_names,
    settings_parts,
    shared_part_name,
    with_names,
)
from bootseer.snapshots.key_parts import Part, base_part_name, fingerprint
from bootseer.snapshots.layers import Layers
from bootseer.snapshots.python import (
    Answers,
    Interpreter,
    Runner,
    find_python,
    find_uv_environment,
    probe,
    remembered,
)
from bootseer.snapshots.scan import NOTHING, text_of
from bootseer.snapshots.shell import filled
from bootseer.snapshots.shown import hide_atoms, is_known_program
from bootseer.snapshots.target_inference import declared_targets, infer_targets
from bootseer.snapshots.targets import shown_paths

if TYPE_CHECKING:
    import subprocess

Report = Callable[[str], None]
"""Function that shows one sentence to people."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables that say where and for whom a command runs, and do not decide its result.
_USUAL_VARIABLES = {
    *("HOME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TMPDIR", "LANG"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "BOOTSEER_IMAGE", "PS1", "UID", "EUID", "PPID", "OSTYPE"),
    # Shells set these themselves.
    *("BASH_SOURCE", "BASH_VERSION", "FUNCNAME", "LINENO", "SECONDS", "PIPESTATUS", "IFS", "REPLY"),
    *("OPTARG", "OPTIND"),
}
_SHOWN_MAX = 5
_FOUND_MAX = 50
# Limit for the output of a program; no answer that is read here is as long.
_OUTPUT_BYTES_MAX = 1024 * 1024


def run_plainly(
    args: Sequence[str], /, **options: Unpack[RunOptions]
) -> "subprocess.CompletedProcess[bytes]":
    """Runner of a set-up on this host itself.

    Output that is piped is bounded, and so is everything if there is a timeout. Raises: OSError;
    TimeoutExpired.
    """
    try:
        return _run(args, options)
    except OSError as error:
        env = options.get("env")
        path = None if env is None else env.get("PATH")
        script = as_script(error, args, search_path=path, directory=options.get("cwd") or "")
        if script is None:
            raise
        return _run(script, options)


def _run(args: Sequence[str], options: RunOptions) -> "subprocess.CompletedProcess[bytes]":
    import subprocess  # here: a start that finds its environment in place runs nothing

    timeout_s = options.get("timeout")
    others = {name: value for name, value in options.items() if name != "timeout"}
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    process = subprocess.Popen(args, **others)  # type: ignore[call-overload]
    output = None
    try:
        if process.stdout is not None:
            output = _read_output(process.stdout.fileno(), end)
            if output is None:
                raise subprocess.TimeoutExpired(args, timeout_s or 0.0)
            process.stdout.close()  # a program that writes more is ended by SIGPIPE
        wait_s = None if timeout_s is None else max(0.0, end - time.monotonic())
        code = process.wait(wait_s)
    finally:
        if process.poll() is None:
            process.kill()
            # A process that waits in the kernel for a dead file system does not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
        if process.stdout is not None:
            process.stdout.close()
    return subprocess.CompletedProcess(args, code, output, None)


def _read_output(descriptor: int, end: float) -> bytes | None:
    """Read to the end, or to a bound; the rest is not read. None if the time is over."""
    found = bytearray()
    while len(found) < _OUTPUT_BYTES_MAX:
        left_s = None if end == math.inf else end - time.monotonic()
        if not wait_readable([descriptor], left_s):
            return None
        piece = os.read(descriptor, 64 * 1024)
        if not piece:
            break
        found += piece
    return bytes(found)


class SetupRequest(Struct, frozen=True):
    """Set-up command, and the user's declarations about it."""

    command: Sequence[str]
    targets: Sequence[str] = ()
    """Directories that the command makes or changes; if empty, they are inferred."""
    inputs: Sequence[str] = ()
    """Files and directories that decide the result, besides those that the command names."""
    variables: Sequence[str] = ()
    """Environment variables that decide the result."""
    salt: str = ""
    """Text that becomes a part of the key, so that another salt makes another snapshot."""
    base: str = ""
    """Digest of the image in which the command runs; empty: the value of BOOTSEER_IMAGE."""
    root: Path = field(default_factory=lambda: Path("/"))
    """Path of the job's "/" on this host."""
    scratch: Path | None = None
    """Temporary folder of a root that is not this host's; it is removed with the root."""
    layers: Layers | None = None
    """Layers of the root, if it is an overlay."""
    directory: str = ""
    """Working directory of the command, inside the root; empty: that of this process, or "/" in
    another root."""
    environ: Mapping[str, str] | None = None
    """Environment of the command; None: that of this process."""
    runner: Runner = run_plainly
    """Function that runs the command inside the root."""
    answers: Answers = field(default_factory=dict)
    """Answers of interpreters, which a start keeps from one question to the next."""


class Resolved(Struct, frozen=True):
    """Request with all parts of its key but the former contents of the targets."""

    targets: tuple[bytes, ...]
    parts: tuple[Part, ...]
    unknown: tuple[str, ...] = ()
    """Things that may decide the result and are not in the key, in a few words each."""
    is_open: bool = False
    """Whether the same set-up may have another result on another day."""

    def all_parts(self, bases: Mapping[bytes, str]) -> list[Part]:
        """Return all parts, with the former contents of each target (`scan.base_digest`)."""
        return [*self.parts, *(Part(base_part_name(t), bases[t]) for t in self.targets)]

    def all_unknown(self, bases: Mapping[bytes, str]) -> tuple[str, ...]:
        """Return the things that are not in the key, with the former contents of each target."""
        held = [text_of(target) for target in self.targets if bases[target] != NOTHING]
        return (*self.unknown, *unknown_before(held))

    def key(self, bases: Mapping[bytes, str]) -> str:
        """Return the key."""
        return fingerprint(self.all_parts(bases))


def working_directory(request: SetupRequest) -> str:
    """Return the directory in which the command runs, as a path inside its root."""
    if request.directory:
        return request.directory
    return str(Path.cwd()) if request.root == Path("/") else "/"


def _words(text: str) -> list[str]:
    """Split the list in a variable, which pip separates by blanks and uv by commas."""
    return text.replace(",", " ").split()


def resolve(request: SetupRequest, report: Report, answers_dir: Path | None = None) -> Resolved:
    """Return the targets and parts of a set-up, and report findings that were not declared.

    `answers_dir`: folder that keeps the answers of this host's interpreters.

    Raises: InvalidInputError for a declaration that cannot be used; NotFoundError for a declared
    input that is missing; UnsupportedError if no target can be inferred.
    """
    if not request.command:
        raise InvalidInputError("there is no set-up command; write it behind --")
    _check_declared(request.inputs)
    _check_variables(request.variables)
    environ = os.environ if request.environ is None else request.environ
    directory = working_directory(request)
    place = WorkingDirectory(request.root, directory)
    hints = _with_environment(hints_of(request.command), place, environ)
    interpreter = _find_interpreter(request, place, hints.python_words, environ, answers_dir)
    if request.targets:
        targets = declared_targets(request.targets, directory)
    else:
        try:
            targets = infer_targets(hints, interpreter, environ, directory)
        except InvalidInputError as error:
            raise UnsupportedError(f"{error}; name the targets with --target DIR") from error
        report(f"targets: {shown_paths(targets.paths)} ({targets.reason})")
    find = partial(
        find_program,
        request.root,
        search_path=environ.get("PATH") or _PATH,
        directory=directory,
    )
    inputs = collect_inputs(place, request.inputs, hints, targets.paths, environ, find)
    if inputs.found:
        found = _some(inputs.found, _FOUND_MAX)
        report(f"inputs named in the command or the environment: {found}")
    # A call that is not understood may use any tool.
    tools = TOOLS if inputs.opaque else inputs.tools
    prefix = interpreter.prefix if interpreter else ""
    settings = settings_parts(place, tools, environ, prefix, targets.paths)
    shared = folderless_names(inputs.lists, [part.name for part in inputs.parts])
    command = command_part([with_names(word, shared) for word in request.command], environ)
    declared = (*request.variables, *inputs.variables)
    variables = variable_parts(environ, declared)
    base = request.base or environ.get("BOOTSEER_IMAGE", "")
    parts = [
        *command.parts,
        *(Part(shared_part_name(part.name, shared), part.value) for part in inputs.parts),
        *settings.parts,
        *variables.parts,
        *(interpreter.parts() if interpreter else ()),
        Part("machine", os.uname().machine),
        Part("image", strip_logins(base)),
        Part("salt", request.salt),
        *(Part(f"target {text_of(path)}", "") for path in targets.paths),
    ]
    parts += secret_part(parts, (*command.secrets, *variables.secrets, *settings.secrets))
    return Resolved(
        targets.paths,
        tuple(sorted(parts)),
        tuple(
            unknown(_shown_inputs(inputs, request.command, environ, place, find), environ, declared)
        ),
        is_open(inputs, environ, declared),
    )


def _with_environment(hints: Hints, place: WorkingDirectory, environ: Mapping[str, str]) -> Hints:
    """Return the hints with everything that the variables of the command add to them."""
    hints = _with_values(hints, environ)
    if hints.uses_uv and not hints.environment_dirs:
        found = find_uv_environment(place, environ)
        if found is not None:
            words = (f"{found}/bin/python", *hints.python_words)
            hints = replace(hints, environment_dirs=(found,), python_words=words)
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        hints = replace(hints, link_dirs=(*hints.link_dirs, *_words(environ.get(name, ""))))
    for name in FILE_VARIABLES:
        lists = environ.get(name, "").split()
        hints = replace(
            hints,
            files=(*hints.files, *lists),
            requirement_files=(*hints.requirement_files, *lists),
        )
    return hints


def _find_interpreter(
    request: SetupRequest,
    place: WorkingDirectory,
    words: Sequence[str],
    environ: Mapping[str, str],
    answers_dir: Path | None,
) -> Interpreter | None:
    """Return the interpreter that a set-up uses; None if there is none, or it does not answer."""
    python = find_python(place, words, environ.get("PATH") or _PATH)
    if python is None:
        return None
    if python in request.answers:
        return request.answers[python]
    env = None if request.environ is None else dict(request.environ)
    ask = partial(probe, python, request.runner, cwd=request.directory or None, env=env)
    if answers_dir is not None and request.root == Path("/"):
        interpreter = remembered(answers_dir, python, environ, ask)
    else:
        interpreter = ask()
    request.answers[python] = interpreter
    return interpreter


def _shown_inputs(
    inputs: Inputs,
    command: Sequence[str],
    environ: Mapping[str, str],
    place: WorkingDirectory,
    find: Callable[[str], str | None],
) -> Inputs:
    """Return the inputs for messages about them.

    Words that are hidden in the command and its scripts are left out, except existing programs and
    files.
    """
    hidden = hidden_words(command, inputs.scripts, environ)

    def shown(name: str) -> str:
        is_computed = re.search(r"\$\{\w+[^\w}]|\$\(|`", name)
        return HIDDEN if is_computed else redact(hide_atoms(name, hidden))

    def is_here(word: str) -> bool:
        if is_known_program(word) or find(word) is not None:
            return True
        try:
            return place.host(word).exists()
        except (OSError, InvalidInputError):
            return False

    def shown_call(name: str) -> str:
        return redact(hide_atoms(name, hidden, is_here))

    return replace(
        inputs,
        opaque=tuple(dict.fromkeys(map(shown_call, inputs.opaque))),
        open_requirements=tuple(map(shown, inputs.open_requirements)),
    )


def _with_values(hints: Hints, environ: Mapping[str, str]) -> Hints:
    """Fill in variables where a hint says in which directory something lies."""

    def values(words: Iterable[str]) -> tuple[str, ...]:
        return tuple(filled(word, environ) for word in words)

    return replace(
        hints,
        python_words=values(hints.python_words),
        environment_dirs=values(hints.environment_dirs),
        install_dirs=values(hints.install_dirs),
        projects=tuple((tool, filled(folder, environ)) for tool, folder in hints.projects),
    )


def _check_variables(names: Iterable[str]) -> None:
    """Raise InvalidInputError for a text that cannot be the name of an environment variable."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InvalidInputError(
                f"{name.partition('=')[0]!r} is not the name alone of an environment variable; "
                "--input-env takes a name, and the value is the one that the variable has"
            )


def _check_declared(names: Iterable[str]) -> None:
    """Raise InvalidInputError for a name that no file can have."""
    for name in names:
        if not name or "\0" in name:
            raise InvalidInputError(f"{name!r} is not the name of an input file")


def is_open(inputs: Inputs, environ: Mapping[str, str], declared: Collection[str]) -> bool:
    """Return whether the same set-up may give another result on another day.

    This is so if not everything that decides the result is in the key. `declared`: the declared
    variables.
    """
    return any(True for _ in unknown(inputs, environ, declared))


def unknown(inputs: Inputs, environ: Mapping[str, str], declared: Collection[str]) -> Iterator[str]:
    """Yield the things that may decide and are not in the key, in a few words each.

    `declared`: the variables that are in the key.
    """
    if names := _looked_up(inputs, environ):
        yield f"which versions an index has of {_some(names)}"
    if inputs.opaque:
        yield f"what {_some(inputs.opaque)} may read or download"
    if inputs.rough:
        yield f"all of {_some(inputs.rough)} (names, sizes and ends count)"
    free = set(inputs.free).difference(declared, _USUAL_VARIABLES)
    if free := {name for name in free if not is_always_in_key(name)}:
        yield f"the values of {_some(sorted(free))} (--input-env makes them count)"


def unknown_before(targets: Sequence[str]) -> Iterator[str]:
    """Yield the missing parts for targets that hold something before the set-up."""
    if targets:
        yield f"the contents of what {_some(targets)} held before (names, types and sizes count)"


def _looked_up(inputs: Inputs, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return requirements without exact versions, unless variables keep tools off an index."""
    switches = ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE")
    is_fixed = any(is_on(environ, name) for name in switches)
    return () if is_fixed or environ.get("UV_EXCLUDE_NEWER") else inputs.open_requirements


def _some(names: Sequence[str], shown_max: int = _SHOWN_MAX) -> str:
    more = len(names) - shown_max
    return ", ".join(names[:shown_max]) + (f" and {more} more" if more > 0 else "")
