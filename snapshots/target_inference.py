"""Inference of the directories that a set-up changes, from the words of its command. Pure."""

import posixpath
from collections.abc import Mapping, Sequence

from msgspec import Struct

from bootseer.errors import UnsupportedError
from bootseer.snapshots.commands import Hints, is_on
from bootseer.snapshots.python import Interpreter
from bootseer.snapshots.scan import target_path
from bootseer.snapshots.shell import has_marks


class Targets(Struct, frozen=True):
    """Targets of a set-up: absolute paths inside the job's root, none inside another."""

    paths: tuple[bytes, ...]
    reason: str
    """Origin of the paths, in words."""


def declared_targets(texts: Sequence[str], directory: str) -> Targets:
    """Return the targets that the user named. Raises: InvalidInputError."""
    return Targets(_disjoint([target_path(text, directory) for text in texts]), "declared")


def infer_targets(
    hints: Hints, interpreter: Interpreter | None, environ: Mapping[str, str], directory: str
) -> Targets:
    """Return the targets of a command that declares none.

    The first of these that applies: environments that the command makes or activates, values of
    --target and --prefix, and projects' own environments; the active conda environment of a conda
    command; the active VIRTUAL_ENV; the environment or the system paths of the interpreter whose
    pip is used.

    Raises: UnsupportedError if nothing fits.
    """
    if hints.names_conda_environment:
        raise UnsupportedError(
            "where a conda environment with a name lies is known to conda only; give it with "
            "-p DIR, or name it with --target DIR"
        )
    projects = [_project_environment(*project, environ) for project in hints.projects]
    # uv does not read pip's variables.
    by_pip = environ if hints.uses_pip and not hints.uses_uv else {}
    places = [by_pip.get("PIP_TARGET", ""), by_pip.get("PIP_PREFIX", "")]
    named = [*hints.environment_dirs, *hints.install_dirs, *filter(None, [*projects, *places])]
    if any(has_marks(text) for text in named):
        raise UnsupportedError(
            "the set-up command computes where its environment lies; name it with --target DIR"
        )
    if named:
        found = [target_path(text, directory) for text in named]
        return Targets(_disjoint(found), "named in the command or the environment")
    is_user = hints.uses_user_site or is_on(by_pip, "PIP_USER")
    if is_user and interpreter is not None and interpreter.user_base:
        return Targets((target_path(interpreter.user_base, directory),), "user site (pip --user)")
    if hints.uses_conda:
        active = environ.get("CONDA_PREFIX", "")
        if active and (not hints.uses_pip or (interpreter and interpreter.prefix == active)):
            return Targets((target_path(active, directory),), "CONDA_PREFIX")
        raise UnsupportedError(
            "cannot tell which conda environment the set-up command changes; give it with -p DIR, "
            "or name it with --target DIR"
        )
    active = environ.get("VIRTUAL_ENV", "")
    # Another environment's or the system's pip, called by its path, does not install into the
    # active environment; uv does.
    if active and (hints.uses_uv or interpreter is None or interpreter.prefix == active):
        return Targets((target_path(active, directory),), "VIRTUAL_ENV")
    if hints.uses_pip and interpreter is not None:
        if interpreter.is_environment:
            prefix = target_path(interpreter.prefix, directory)
            return Targets((prefix,), f"the environment of {interpreter.path}")
        return Targets(
            _disjoint(_system_paths(interpreter, directory)),
            f"the install paths of {interpreter.path}",
        )
    raise UnsupportedError(
        "cannot tell which directories the set-up command writes; name them with --target DIR"
    )


def _project_environment(tool: str, folder: str, environ: Mapping[str, str]) -> str:
    """Return the path of a project's own environment; empty if only the tool's settings tell."""
    name = ".venv"
    if tool == "uv":
        name = environ.get("UV_PROJECT_ENVIRONMENT") or name
    elif environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX"):
        return ""  # poetry and pdm use that one
    elif tool == "poetry" and (
        environ.get("POETRY_VIRTUALENVS_IN_PROJECT", "").lower() not in ("1", "true")
    ):
        return ""
    return posixpath.join(folder, name)


def _system_paths(interpreter: Interpreter, directory: str) -> list[bytes]:
    """Return the directories to which pip installs without an environment.

    Wheels may put files anywhere below `data`, which is the whole prefix ("/usr/local"); only the
    folders that packages use in practice are returned.
    """
    paths = interpreter.paths
    found = [paths[key] for key in ("purelib", "platlib", "scripts", "include") if key in paths]
    data = paths.get("data")
    if data:
        found += [posixpath.join(data, name) for name in ("share", "etc")]
    return [target_path(path, directory) for path in found]


def _disjoint(paths: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the paths that do not lie inside another one, sorted."""
    chosen: list[bytes] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(outer + b"/") for outer in chosen):
            chosen.append(path)
    return tuple(chosen)
