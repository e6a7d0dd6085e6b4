"""The files that a set-up reads: what the user declared, and what the command names.

Alone decides what is looked at. Follows `-r`, `-c` and `--find-links` lines of requirement files,
as pip does, and shell scripts; credentials in URLs of such files do not count.
Nothing here runs anything. Paths are the job's: relative ones start at its working directory and
all are resolved inside its root.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.redact import without_users
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots.setup.digests import (
    GUESSED_BYTES_MAX,
    WORD_BYTES_MAX,
    InputDigest,
    bytes_digest,
    file_digest,
    tree_digest,
    wheels_digest,
)
from bootseer.snapshots.setup.fingerprint import Part
from bootseer.snapshots.setup.place import Place
from bootseer.snapshots.setup.reading.command import hints_of_script
from bootseer.snapshots.setup.reading.hints import Hints, merged, moved_to
from bootseer.snapshots.setup.reading.lexer import COMPUTED, as_text, filled, has_marks
from bootseer.snapshots.setup.reading.words import SHELLS, base_name
from bootseer.snapshots.setup.requirements import (
    Requirements,
    local_path,
    open_requirements,
    read_requirements,
)

_REQUIREMENTS_BYTES_MAX = 16 * 1024 * 1024
_SCRIPT_BYTES_MAX = 1024 * 1024
_GLOB_FILES_MAX = 1000
_PATH_BYTES_MAX = 4096
# How many words are looked at that may name a file.
_WORDS_MAX = 2000
_REQUIREMENTS = (".txt", ".in", ".pip")
_FILE_URL = re.compile(r"(?:^|[@=+\s])(file:[^#]*)")
_EXTRAS = re.compile(r"\[[\w.,\s-]*\]$")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
# What lies there is made by the kernel, and another at each look.
_KERNEL_FOLDERS = ("/proc/", "/sys/", "/dev/")
# Files that hold a secret or change by themselves. A digest in the key would tell of the first.
_PRIVATE = re.compile(
    r"(^|/)(\.netrc|\.pgpass|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519)|authorized_keys)$"
    r"|(^|/)\.(ssh|gnupg|aws|docker|kube)/|\.(pem|key|p12|pfx|keytab|jks)$"
    r"|(^|/)[^/]*(passw|secret|token(?!iz)|credential)[^/]*$",
    re.IGNORECASE,
)
# Packages of a lock file that lie on this host: of uv, pdm and poetry.
_LOCKED_PATH = re.compile(
    r"(?m)\b(?:directory|path)\s*=\s*\"(?!\.\")|^\s*type\s*=\s*\"(?:directory|file)\""
)
# The folder of a script, as scripts ask for it.
_OWN_FOLDER = re.compile(
    r"\$\(\s*(?:cd\s+)?\"?\$?\(?\s*dirname\s+(?:--\s+)?\"?\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?\"?\s*\)?"
    r"\"?(?:\s*&&\s*pwd(?:\s+-P)?)?\s*\)|\$\{0%/\*\}"
)


class Inputs(Struct, frozen=True):
    """What a set-up reads, and what of that cannot be told."""

    parts: tuple[Part, ...]
    found: tuple[str, ...]
    """Inputs that were not declared."""
    open_requirements: tuple[str, ...]
    """What means something else when an index has something else."""
    opaque: tuple[str, ...]
    """What is run without being understood."""
    rough: tuple[str, ...]
    """Inputs of which not all was read."""
    variables: tuple[str, ...]
    """Whose values requirement files take in."""
    tools: frozenset[str]
    """Whose settings decide."""
    lists: tuple[str, ...]
    """Files of requirements among the inputs that were not declared."""
    free: tuple[str, ...]
    """Variables that the command and its scripts take from their environment."""
    scripts: tuple[str, ...] = ()
    """The texts of scripts that the command runs."""


def collect_inputs(
    place: Place,
    declared: Iterable[str],
    hints: Hints,
    outputs: Sequence[bytes],
    environ: Mapping[str, str] | None = None,
    find: Callable[[str], str | None] = lambda program: None,
) -> Inputs:
    """Parts for every input file, and the names of those found without being declared.

    What lies in `outputs`, the targets, is an input only when it is declared. `find` gives the path
    of a program.

    Raises: NotFoundError for a declared file that is missing, or another error of reading it.
    A file that the command only seems to name is left out when it does not exist.
    """
    collector = _Collector(place, outputs, environ or {}, find)
    for name in declared:
        collector.add(name, is_declared=True)
    collector.follow(hints)
    return collector.collected()


class _Collector:
    def __init__(
        self,
        place: Place,
        outputs: Sequence[bytes],
        environ: Mapping[str, str],
        find: Callable[[str], str | None],
    ) -> None:
        self._place = place
        self._outputs = outputs
        self._environ = environ
        self._find = find
        self._parts: dict[str, Part] = {}
        self._found: list[str] = []
        self._has_directory = False
        self._requirements: list[str] = []
        self._constraints: list[str] = []
        self._open: list[str] = []
        self._opaque: list[str] = []
        self._rough: list[str] = []
        self._variables: set[str] = set()
        self._scripts: dict[str, str] = {}
        self._tools: set[str] = set()
        self._lists: list[str] = []
        self._lines: dict[str, Requirements] = {}
        self._free: set[str] = set()
        self._guessed_bytes = 0
        self._word_count = 0

    def collected(self) -> Inputs:
        parts = sorted(self._parts.values())
        if self._has_directory:
            # A project that is installed from its source may record where that lies.
            parts.append(Part("directory", self._place.directory))
        return Inputs(
            tuple(parts),
            tuple(self._found),
            (*self._open, *open_requirements(self._requirements, self._constraints)),
            tuple(dict.fromkeys(self._opaque)),
            tuple(self._rough),
            tuple(sorted(self._variables)),
            frozenset(self._tools),
            tuple(self._lists),
            tuple(sorted(self._free)),
            tuple(self._scripts.values()),
        )

    def follow(self, hints: Hints) -> None:
        """Adds what hints name, as far as it exists."""
        self._opaque += hints.opaque
        self._tools.update(hints.tools)
        self._free.update(hints.variables)
        for name in hints.files:
            is_list = name in hints.requirement_files
            paths = self._expanded(_requirement_path(name))
            if _FILE_URL.search(name) and not any(map(self._exists, paths)):
                self._opaque.append(as_text(name))  # in a form of which the path is not understood
            for path in paths:
                self.add(path, is_list=is_list, is_indexed=name in hints.indexed_files)
        for name in hints.link_dirs:
            for path in self._expanded(local_path(name)):
                self._add_links(path)
        self._follow_all(hints)
        # A list that is not there yet is made by the set-up, and may say anything.
        there = {base_name(name) for name in hints.requirement_files if self._is_there(name)}
        lists = [name for name in hints.requirement_files if base_name(name) not in there]
        self._opaque += [as_text(name) for name in lists if not ("://" in name or COMPUTED in name)]
        for name in hints.lock_files:
            text = self._text(name, _REQUIREMENTS_BYTES_MAX)
            # Packages that lie beside the project are not in the key.
            self._open += [name] if text is None or _LOCKED_PATH.search(text) else []
        for name in hints.spec_files:
            text = self._text(name, _REQUIREMENTS_BYTES_MAX)
            self._open += [] if text is not None and "@EXPLICIT" in text else [name]
        for word in hints.requirements:
            path = _requirement_path(word)
            is_local = ("/" in word or path in (".", "..")) and self._exists(path)
            # Whose own requirements are looked up.
            if COMPUTED not in word:
                (self._open if is_local else self._requirements).append(as_text(word))
        self._look_at_words(hints)

    def _follow_all(self, hints: Hints) -> None:
        """Adds scripts and programs. One of them may lie in any directory that a `cd` names."""
        odd: dict[str, str] = {}
        known: set[str] = set()
        for name in hints.scripts:
            for path in self._expanded(name) or [name]:
                is_read = self._follow_script(path, hints.directories, is_shell=True)
                known |= {base_name(path)} if is_read else set()
                odd.setdefault(base_name(path), path)
        for name in hints.programs:
            found = self._expanded(name) if "/" in name else [self._find(name) or name]
            for path in found or [name]:
                is_read = self._follow_script(path, hints.directories, is_shell=False)
                known |= {base_name(path)} if is_read else set()
                odd.setdefault(base_name(path), name)
        self._opaque += [as_text(odd[name]) for name in odd if name not in known]

    def _is_there(self, name: str) -> bool:
        return any(self._exists(path) for path in self._expanded(name))

    def _look_at_words(self, hints: Hints) -> None:
        """Adds the files that words name which nothing else tells the meaning of."""
        names = [(name, True) for name in hints.words] + [(name, False) for name in hints.folders]
        self._word_count += len(names) + len(hints.tested)
        if self._word_count > _WORDS_MAX:
            self._opaque.append(f"a command of more than {_WORDS_MAX} words")
            return
        for name, is_file in names:
            for path in self._expanded(_requirement_path(name)):
                self.add(path, wanted=stat.S_IFREG if is_file else stat.S_IFDIR)
        for name in hints.tested:
            for path in self._expanded(name):
                self._test(path)

    def _test(self, name: str) -> None:
        """Adds that a file is there, and of what kind."""
        if self._is_output(name) or "\0" in name or not name:
            return
        try:
            status = self._place.host(name).stat()
        except (OSError, InvalidInputError):
            return
        size = "" if stat.S_ISDIR(status.st_mode) or status.st_size else " empty"
        value = f"{stat.filemode(status.st_mode)}{size}"
        self._parts.setdefault(f"exists {name}", Part(f"exists {name}", value))

    def add(
        self,
        name: str,
        *,
        is_declared: bool = False,
        is_list: bool = False,
        is_indexed: bool = False,
        wanted: int = 0,
    ) -> None:
        """Adds a file or a directory. `is_list`: of requirements or constraints; `is_indexed`:
        which are looked up; `wanted`: the only type that counts."""
        if name in self._parts or "://" in name or "\0" in name or not name:
            return
        if not is_declared and self._is_output(name):
            return
        try:
            path = self._place.host(name)
            mode = path.stat().st_mode
        except (OSError, InvalidInputError) as error:
            if is_declared:
                raise NotFoundError(f"the input {name} cannot be read: {error}") from error
            if isinstance(error, PermissionError):
                self._opaque.append(name)
            return
        if not is_declared and self._is_left_out(name, mode, wanted):
            return
        try:
            if stat.S_ISDIR(mode):
                tops = {str(resolve_in_root(self._place.root, one)) for one in self._outputs}
                digest = tree_digest(path, tops, limited=not is_declared)
                self._has_directory = True
            elif stat.S_ISREG(mode):
                limit_bytes = WORD_BYTES_MAX if wanted else GUESSED_BYTES_MAX
                limit = None if is_declared else limit_bytes
                digest = self._digest(name, path, is_list=is_list, limit_bytes=limit)
            else:
                return
        except OSError as error:
            if is_declared:
                raise from_oserror(error, f"read the input {name}") from error
            self._opaque.append(name)  # of another user: who runs the command may read it
            return
        self._parts[name] = Part(f"input {name}", digest.value)
        if not is_declared:
            self._found.append(name)
            self._lists += [name] if is_list else []
        if digest.is_rough:
            self._rough.append(name)
        if name in self._lines:
            self._follow_list(name, self._lines[name], is_indexed=is_indexed)

    def _is_left_out(self, name: str, mode: int, wanted: int) -> bool:
        """Tell whether a word that names something of this mode is no input."""
        if wanted and stat.S_IFMT(mode) != wanted:
            return True
        absolute = os.path.normpath(self._place.absolute(name))
        is_unstable = absolute.startswith(_KERNEL_FOLDERS) or not (
            stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        )
        # What a tool is known to read as a list, a script or an archive is no secret.
        is_private = wanted == stat.S_IFREG and _PRIVATE.search(absolute)
        if is_unstable or is_private:
            self._opaque += [] if absolute == os.devnull else [name]
            return True
        return False

    def _digest(
        self, name: str, path: Path, *, is_list: bool, limit_bytes: int | None
    ) -> InputDigest:
        if is_list or name.endswith(_REQUIREMENTS):
            text = self._text(name, _REQUIREMENTS_BYTES_MAX)
            if text is not None:
                # Credentials change more often than what an index serves.
                public = without_users(text)
                found = self._lines[name] = read_requirements(public)
                text = found.text if is_list else public
                return bytes_digest(text.encode("utf-8", "surrogateescape"))
        if limit_bytes is not None:
            self._guessed_bytes += path.stat().st_size
            if self._guessed_bytes > GUESSED_BYTES_MAX:
                limit_bytes = 0
        return file_digest(path, limit_bytes=limit_bytes)

    def _text(self, name: str, bytes_max: int) -> str | None:
        """A file's text; None where it is none, too large, or cannot be read."""
        try:
            path = self._place.host(name)
            if not path.is_file() or path.stat().st_size > bytes_max:
                return None
            return path.read_text(encoding="utf-8", errors="surrogateescape")
        except (OSError, InvalidInputError):
            return None

    def _is_output(self, name: str) -> bool:
        path = os.fsencode(os.path.normpath(self._place.absolute(name)))
        return any((path + b"/").startswith(output + b"/") for output in self._outputs)

    def _exists(self, name: str) -> bool:
        try:
            return self._place.host(name).exists()
        except (OSError, InvalidInputError):
            return False

    def _expanded(self, name: str) -> list[str]:
        """A path as a shell would read it: with the home, variables and patterns filled in; none
        where that cannot be told."""
        name = filled(name, self._environ)
        if name.startswith("~/"):
            name = self._environ.get("HOME", "~") + name[1:]
        if has_marks(name) or "\0" in name or not name or len(name) > _PATH_BYTES_MAX:
            return []
        if "://" in name or self._exists(name):
            return [name]
        if name.startswith("~"):
            self._opaque.append(name)  # the home of another user
            return []
        if _BRACES.search(name):
            return [path for one in self._without_braces(name) for path in self._expanded(one)]
        if not ("*" in name or "?" in name or "[" in name):
            return [name]
        fixed, _, pattern = re.split(r"[*?\[]", name)[0].rpartition("/")
        pattern = name[len(fixed) + 1 :] if fixed or name.startswith("/") else name
        try:
            top = self._place.host(fixed or ("/" if name.startswith("/") else "."))
            found = sorted(path.relative_to(top) for path in top.glob(pattern))
        except (OSError, ValueError, InvalidInputError, NotImplementedError):
            return []
        if len(found) > _GLOB_FILES_MAX:
            self._opaque.append(name)
        found = found[:_GLOB_FILES_MAX]
        return [os.path.join(fixed, path) if fixed else str(path) for path in found]

    def _without_braces(self, name: str) -> list[str]:
        """The words that a shell makes of one with `{a,b}`."""
        found = [name]
        while match := _BRACES.search(found[0]):
            inner = match[1].split(",")
            if len(found) * len(inner) > _GLOB_FILES_MAX:
                self._opaque.append(name)
                return []
            texts = found
            found = []
            for text in texts:
                # The same place in all of them: they differ in front of it.
                each = _BRACES.search(text)
                if each is not None:
                    before, after = text[: each.start()], text[each.end() :]
                    found += [f"{before}{one}{after}" for one in each[1].split(",")]
        return found

    def _follow_list(self, name: str, found: Requirements, *, is_indexed: bool) -> None:
        """Adds what a requirements file includes. Any text file may pass here: no errors."""
        is_indexed = is_indexed and found.uses_index
        self._constraints += found.requirements
        self._variables.update(found.variables)
        if is_indexed:
            self._requirements += found.requirements
        directory = name.rpartition("/")[0]
        for included, is_constraint in found.includes:
            # pip takes these relative to the including file,
            included = local_path(included)
            path = included if included.startswith("/") else os.path.join(directory, included)
            self._opaque += [included] if "://" in included else []
            self.add(path, is_list=True, is_indexed=is_indexed and not is_constraint)
        for place in found.links:
            # also these if it is there, else from the working directory,
            relative = os.path.join(directory, place)
            self._add_links(relative if directory and self._exists(relative) else place)
        for path in found.local:
            # and local projects relative to the working directory.
            self.add(path)
            self._open += [path] if is_indexed else []

    def _follow_script(self, name: str, directories: Sequence[str], *, is_shell: bool) -> bool:
        """Adds a script and, if it is a shell's, what it names; False where that cannot be told."""
        text = self._text(name, _SCRIPT_BYTES_MAX)
        first = (text or "").partition("\n")[0]
        if text is None or not (is_shell or first.startswith("#!")):
            return False
        self.add(name)
        if not is_shell and not SHELLS.intersection(map(base_name, first[2:].split())):
            return False
        if name not in self._scripts:
            self._scripts[name] = text
            folder = name.rpartition("/")[0] or "."
            hints = hints_of_script(_OWN_FOLDER.sub(lambda match: folder, text))
            for directory in directories:
                hints = merged(hints, moved_to(hints, directory))
            self.follow(hints)
        return True

    def _add_links(self, name: str) -> None:
        if "://" in name or "\0" in name or name in self._parts:
            return
        try:
            digest = wheels_digest(self._place.host(name))
        except (OSError, InvalidInputError):
            return  # pip says what is wrong with it
        self._parts[name] = Part(f"wheels {name}", digest.value)
        self._found.append(name)
        self._rough += [name] if digest.is_rough else []


def _requirement_path(word: str) -> str:
    """The path in a requirement of a command line, if it is one of this host; else any text."""
    if match := _FILE_URL.search(word):
        word = local_path(match[1])
    return _EXTRAS.sub("", word)
