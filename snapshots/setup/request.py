"""What a set-up is: its command, where it runs, what it reads and writes; and so its key.

Alone decides which parts make the fingerprint of a set-up. Looks at the machine (inputs,
interpreter, targets) but changes nothing.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.errors import InvalidInputError, UnsupportedError
from bootseer.redact import without_users
from bootseer.scripts import as_script
from bootseer.snapshots.manifest import text_of
from bootseer.snapshots.restoring.restore import base_part_name
from bootseer.snapshots.setup.command import hints_of
from bootseer.snapshots.setup.fingerprint import (
    Part,
    command_part,
    fingerprint,
    secret_part,
    variable_parts,
)
from bootseer.snapshots.setup.inputs import (
    FILE_VARIABLES,
    Place,
    check_declared,
    collect_inputs,
)
from bootseer.snapshots.setup.interpreter import Runner, find_python, find_uv_environment, probe
from bootseer.snapshots.setup.targets import declared_targets, infer_targets, show
from bootseer.snapshots.upper_layer import Layers

Report = Callable[[str], None]
"""Gets one sentence for people at a time."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run_plainly(
    args: Sequence[str],
    /,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """The runner of a set-up on this host itself."""

    def run(words: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            words,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            timeout=timeout,
            check=False,
        )

    try:
        return run(args)
    except OSError as error:
        path = None if env is None else env.get("PATH")
        script = as_script(error, args, search_path=path, directory=cwd or "")
        if script is None:
            raise
        return run(script)


class Request(Struct, frozen=True):
    """A set-up command and what the user said about it."""

    command: Sequence[str]
    targets: Sequence[str] = ()
    """Directories that it makes or changes; none: inferred."""
    inputs: Sequence[str] = ()
    """Files and directories that decide its result, besides those that the command names."""
    variables: Sequence[str] = ()
    """Environment variables that decide its result."""
    salt: str = ""
    """Another salt, another snapshot."""
    base: str = ""
    """Digest of the image that it runs in; empty: BOOTSEER_IMAGE."""
    root: Path = field(default_factory=lambda: Path("/"))
    """Where the job's "/" lies on this host."""
    scratch: Path | None = None
    """A folder that goes with another root than this host's."""
    layers: Layers | None = None
    """Of that root, if it is an overlay."""
    directory: str = ""
    """Where the command runs, inside the root; empty: here, or "/" of another root."""
    environ: Mapping[str, str] | None = None
    """The command's environment; None: this process's."""
    runner: Runner = run_plainly
    """Runs it inside the root."""


class Resolved(Struct, frozen=True):
    """A request of which everything is known but what was in the targets before."""

    targets: tuple[bytes, ...]
    parts: tuple[Part, ...]

    def all_parts(self, bases: Mapping[bytes, str]) -> list[Part]:
        """With what was in each target (`scan.base_digest`)."""
        return [*self.parts, *(Part(base_part_name(t), bases[t]) for t in self.targets)]

    def key(self, bases: Mapping[bytes, str]) -> str:
        """The fingerprint."""
        return fingerprint(self.all_parts(bases))


def working_directory(request: Request) -> str:
    """Where the command runs, as it sees it."""
    if request.directory:
        return request.directory
    return str(Path.cwd()) if request.root == Path("/") else "/"


def _words(text: str) -> list[str]:
    """Of a variable with a list, which pip separates by blanks and uv by commas."""
    return text.replace(",", " ").split()


def resolve(request: Request, report: Report) -> Resolved:
    """Find out what decides the result, and say what was not declared.

    Raises: InvalidInputError where a declaration cannot be used; NotFoundError for a declared
    input that is missing; UnsupportedError where no target can be inferred.
    """
    if not request.command:
        raise InvalidInputError("there is no set-up command; write it behind --")
    check_declared(request.inputs)
    environ = os.environ if request.environ is None else request.environ
    directory = working_directory(request)
    place = Place(request.root, directory)
    hints = hints_of(request.command)
    if hints.uses_uv and not hints.environment_dirs:
        found_environment = find_uv_environment(place, environ)
        if found_environment is not None:
            words = (f"{found_environment}/bin/python", *hints.python_words)
            hints = replace(hints, environment_dirs=(found_environment,), python_words=words)
    python = find_python(place, hints.python_words, environ.get("PATH") or _PATH)
    interpreter = None
    if python is not None:
        env = None if request.environ is None else dict(request.environ)
        cwd = request.directory or None
        interpreter = probe(python, request.runner, cwd=cwd, env=env)
    if request.targets:
        targets = declared_targets(request.targets, directory)
    else:
        try:
            targets = infer_targets(hints, interpreter, environ, directory)
        except InvalidInputError as error:
            raise UnsupportedError(f"{error}; name the targets with --target DIR") from error
        report(f"targets: {show(targets.paths)} ({targets.reason})")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        hints = replace(hints, link_dirs=(*hints.link_dirs, *_words(environ.get(name, ""))))
    for name in FILE_VARIABLES:
        hints = replace(hints, files=(*hints.files, *environ.get(name, "").split()))
    inputs, found = collect_inputs(place, request.inputs, hints, targets.paths)
    if found:
        report(f"inputs named in the command or the environment: {', '.join(found)}")
    command = command_part(request.command)
    variables = variable_parts(environ, request.variables)
    base = request.base or environ.get("BOOTSEER_IMAGE", "")
    parts = [
        *command.parts,
        *inputs,
        *variables.parts,
        *(interpreter.parts() if interpreter else ()),
        Part("machine", os.uname().machine),
        Part("image", without_users(base)),
        Part("salt", request.salt),
        *(Part(f"target {text_of(path)}", "") for path in targets.paths),
    ]
    parts += secret_part(parts, (*command.secrets, *variables.secrets))
    return Resolved(targets.paths, tuple(sorted(parts)))
