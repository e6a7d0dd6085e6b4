"""Hints: what is taken from the words of a set-up command, not checked yet. Pure."""

import posixpath
from collections.abc import Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Hints(Struct, frozen=True):
    """What the words of a set-up command tell. Paths are as written, relative ones included."""

    python_words: tuple[str, ...] = ()
    """Programs that are, or live beside, the interpreter in use: "python3", "/opt/v/bin/pip"."""
    environment_dirs: tuple[str, ...] = ()
    """Environments that the command makes or activates."""
    install_dirs: tuple[str, ...] = ()
    """Given with --target or --prefix."""
    files: tuple[str, ...] = ()
    """Words that may be input files or directories."""
    link_dirs: tuple[str, ...] = ()
    """Folders of wheels (--find-links)."""
    uses_pip: bool = False
    """Installs into the environment of the interpreter in use."""
    uses_user_site: bool = False
    """`pip install --user`."""
    uses_uv: bool = False
    """`uv pip`, which prefers the active environment to the interpreter on PATH."""
    projects: tuple[tuple[str, str], ...] = ()
    """"uv", "poetry" or "pdm", and the folder of the project whose environment it fills."""
    uses_conda: bool = False
    """Changes the active conda environment."""
    names_conda_environment: bool = False
    """Changes one that is given by its name, which only conda's settings lead to."""
    requirement_files: tuple[str, ...] = ()
    """The `files` that are lists of requirements or constraints."""
    indexed_files: tuple[str, ...] = ()
    """The `requirement_files` whose requirements are looked up in an index."""
    requirements: tuple[str, ...] = ()
    """Words that are looked up in an index, unless they name a file."""
    lock_files: tuple[str, ...] = ()
    """The `files` without which everything is looked up anew."""
    spec_files: tuple[str, ...] = ()
    """The `files` that are conda's lists."""
    scripts: tuple[str, ...] = ()
    """Files of `files` that a shell runs or reads."""
    programs: tuple[str, ...] = ()
    """Programs of which nothing is known; with a "/" in `files`, too."""
    opaque: tuple[str, ...] = ()
    """What is run without being understood, for people."""
    tools: tuple[str, ...] = ()
    """The tools whose settings decide: "pip", "uv", "conda"."""
    words: tuple[str, ...] = ()
    """Words that count if they name a file. A directory that they name does not."""
    folders: tuple[str, ...] = ()
    """Words that count if they name a directory. A file of that name is made by the command."""
    tested: tuple[str, ...] = ()
    """Files of which only it counts whether they are there, and of what kind."""
    variables: tuple[str, ...] = ()
    """Variables that the command takes from its environment."""
    directories: tuple[str, ...] = ()
    """Directories in which `scripts` and `programs` may run."""

    @property
    def runs_files(self) -> bool:
        """Whether there are scripts or programs."""
        return bool(self.scripts or self.programs)


_NOTHING = Hints()


def merged(*hints: Hints) -> Hints:
    """What all of them say, in this order."""
    values: dict[str, Any] = {}
    for name in Hints.__struct_fields__:
        found = [getattr(one, name) for one in hints]
        is_flag = isinstance(getattr(_NOTHING, name), bool)
        values[name] = any(found) if is_flag else tuple(dict.fromkeys(chain.from_iterable(found)))
    return Hints(**values)


def _joined(directory: str, path: str) -> str:
    scheme = "file:" if path.startswith("file:") else ""
    relative = path.removeprefix(scheme).removeprefix("//" if scheme else "")
    return scheme + posixpath.join(directory, relative)


def moved_to(hints: Hints, directory: str) -> Hints:
    """The hints of a command that runs in `directory`. As "cd" may have been meant for another
    command, files may also lie where they did."""
    if not directory:
        return hints

    def moved(paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            path if ":/" in path and not path.startswith("file://.") else _joined(directory, path)
            for path in paths
        )

    def both(paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*paths, *moved(paths))))

    return replace(
        hints,
        python_words=tuple(
            posixpath.join(directory, word) if "/" in word else word for word in hints.python_words
        ),
        environment_dirs=moved(hints.environment_dirs),
        install_dirs=moved(hints.install_dirs),
        projects=tuple((tool, posixpath.join(directory, path)) for tool, path in hints.projects),
        files=both(hints.files),
        link_dirs=both(hints.link_dirs),
        requirement_files=both(hints.requirement_files),
        indexed_files=both(hints.indexed_files),
        scripts=both(hints.scripts),
        words=both(hints.words),
        folders=both(hints.folders),
        tested=both(hints.tested),
        programs=tuple(
            dict.fromkeys(
                (
                    *hints.programs,
                    *(posixpath.join(directory, one) for one in hints.programs if "/" in one),
                )
            )
        ),
        directories=(directory, *moved(hints.directories)) if hints.runs_files else (),
        lock_files=moved(hints.lock_files),
        spec_files=moved(hints.spec_files),
    )
