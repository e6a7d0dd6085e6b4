"""Inputs of a set-up: files that decide its result, as digests in the key.

Inputs are what the user declared and what the command names: files, directories, wheels,
requirement files with what they include, shell scripts with what they name, and settings of pip, uv
and conda. Credentials in URLs do not count. Paths are the job's: relative ones start at its working
directory, and all are resolved inside its root. Reads files, runs and changes nothing.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from bootseer.base.package_names import normal_name
from bootseer.base.redact import HIDDEN, secret_values, strip_logins
from bootseer.base.short_digest import Sha256
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.linux.root_paths import WorkingDirectory, resolve_in_root
from bootseer.snapshots.command_parts import PartsAndSecrets
from bootseer.snapshots.commands import Hints, hints_of_script, is_on, merged, moved_to
from bootseer.snapshots.key_parts import Part
from bootseer.snapshots.shell import COMPUTED, SHELLS, as_text, base_name, filled, has_marks
from bootseer.snapshots.shown import shown_values

# Limits for files that were not declared: a word of the command may happen to name a data set.
_GUESSED_BYTES_MAX = 256 * 1024 * 1024
# Limit for a file that a word names and the command may not read.
_WORD_BYTES_MAX = 16 * 1024 * 1024
_GUESSED_FILES_MAX = 20_000
_GUESSED_NAMES_MAX = 200_000
_READ_BYTES = 1024 * 1024
# The end of a wheel has the checksum of RECORD, which has the digests of all its files; a tar.gz
# ends with its own checksum. Reading gigabytes of wheels at every start would take too long.
_END_BYTES = 16 * 1024
# Limits for a folder of wheels: ends that are read, and names that count.
_WHEELS_READ_MAX = 4096
_WHEELS_NAMED_MAX = 100_000
# On a network file system each wheel costs one to three round trips, so threads look at them.
_THREADS_MAX = 16
_THREADS_FROM = 64
# Names in source trees that tools change by themselves.
_IGNORED = {".git", "__pycache__", ".venv", ".tox", ".mypy_cache", ".ruff_cache"}
# Folders that installing a project writes, beside one of `_PROJECT_FILES`.
_BUILT = {"build", "dist"}
_PROJECT_FILES = {"pyproject.toml", "setup.py", "setup.cfg"}


class _InputDigest(Struct, frozen=True):
    """Value of an input in the key."""

    value: str
    is_rough: bool = False
    """Whether the input was too large: beyond the bounds, only names, sizes and ends count."""


def _bytes_digest(data: bytes) -> _InputDigest:
    return _InputDigest("sha256:" + Sha256(data).hexdigest())


def _file_digest(path: Path, *, limit_bytes: int | None = None) -> _InputDigest:
    """Return the digest of a file's content; of a file beyond the limit, of its size and end.

    Raises: OSError.
    """
    size_bytes = path.stat().st_size
    if limit_bytes is not None and size_bytes > limit_bytes:
        found = _bytes_digest(b"%d:%b" % (size_bytes, _end(path)))
        return _InputDigest(f"end {found.value}", is_rough=True)
    return _InputDigest(_content_digest(path))


def _content_digest(path: Path) -> str:
    digest = Sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return "sha256:" + digest.hexdigest()


def _tree_digest(top: Path, without: Collection[str], *, limited: bool) -> _InputDigest:
    """Return the digest of names, modes and contents, without the folders `without`.

    `limited`: the directory was not declared, so bounds apply, and the output of a project's build
    is left out. Raises: OSError.
    """
    digest = Sha256()
    file_count = size_bytes = 0
    is_rough = False
    for directory, folders, names in os.walk(top):
        ignored = _IGNORED | _BUILT if limited and _PROJECT_FILES.intersection(names) else _IGNORED
        folders[:] = sorted(
            name
            for name in folders
            if name not in ignored
            and not name.endswith(".egg-info")
            and os.path.join(directory, name) not in without
        )
        for name in sorted(names):
            if name.endswith(".pyc"):
                continue
            path = Path(directory, name)
            info = path.lstat()
            file_count += 1
            size_bytes += info.st_size
            is_rough = is_rough or (
                limited and (file_count > _GUESSED_FILES_MAX or size_bytes > _GUESSED_BYTES_MAX)
            )
            if stat.S_ISREG(info.st_mode):
                content = f"size {info.st_size}" if is_rough else _content_digest(path)
            elif stat.S_ISLNK(info.st_mode):
                content = "link " + os.readlink(path)
            else:
                continue
            relative = os.fsencode(path.relative_to(top))
            data = os.fsencode(content)
            mode = info.st_mode & 0o111
            digest.update(b"%d:%b,%d,%d:%b," % (len(relative), relative, mode, len(data), data))
        if limited and file_count > _GUESSED_NAMES_MAX:
            break
    return _InputDigest("sha256:" + digest.hexdigest(), is_rough)


def _wheels_digest(path: Path) -> _InputDigest:
    """Return the digest of a folder of wheels.

    It covers names, sizes and ends, which differ between builds of one version. For a very large
    folder it covers less. Raises: OSError.
    """
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries)
    is_rough = len(names) > _WHEELS_READ_MAX
    read, named = names[:_WHEELS_READ_MAX], names[_WHEELS_READ_MAX:_WHEELS_NAMED_MAX]
    folder = str(path)
    if len(names) < _THREADS_FROM:
        lines = [_wheel_line(folder, name) for name in read]
    else:
        from concurrent.futures import ThreadPoolExecutor  # here: hardly anybody has so many

        with ThreadPoolExecutor(_THREADS_MAX) as pool:
            lines = list(pool.map(lambda name: _wheel_line(folder, name), read))
            lines += pool.map(lambda name: _wheel_line(folder, name, has_end=False), named)
    digest = Sha256()
    for line in lines:
        digest.update(line)
    return _InputDigest("sha256:" + digest.hexdigest(), is_rough)


def _wheel_line(folder: str, name: str, *, has_end: bool = True) -> bytes:
    """Return name, size and end of a file in a folder of wheels, encoded. Raises: OSError."""
    path = Path(folder, name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return b""  # a link to nothing
    if not stat.S_ISREG(status.st_mode):
        return b""
    line = os.fsencode(name)
    end = _end(path) if has_end else b""
    return b"%d:%b,%d,%d:%b," % (len(line), line, status.st_size, len(end), end)


def _end(path: Path) -> bytes:
    """Return the last bytes of a file; b"" if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return file.read(_END_BYTES)
    except OSError:
        return b""


_COMMENT = re.compile(r"(^|\s+)#.*$")
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s#]+)"
# Long options may be abbreviated.
_INCLUDE = re.compile(
    rf"(?P<option>-r|--req[a-z]*|-c|--con[a-z]*)(?:\s+|=|(?<=-[rc]))(?P<file>{_VALUE})"
)
_LINKS = re.compile(rf"(?:-f|--fi[a-z-]*)(?:\s+|=|(?<=-f))(?P<place>{_VALUE})")
_EDITABLE = re.compile(rf"(?:-e|--ed[a-z]*)(?:\s+|=|(?<=-e))(?P<place>{_VALUE})")
# A project or an archive on this host: "./project[extra]", "name @ file:///wheel", "a-1.0.whl".
_LOCAL = re.compile(
    r"(?:[\w.,\[\]-]+\s*@\s*)?(?P<path>file:[^\s;#\[]+|[^\s;#\[@:]*/[^\s;#\[]*|\.)"
    r"|(?P<archive>[^\s;#\[@:/]+\.(?:whl|zip|tar|tgz|tbz|txz|tlz|tar\.(?:gz|bz2|xz|lzma|lz)))(?=[\s;#\[]|$)"
)
# pip replaces these by the variables' values.
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXACT = re.compile(
    r"[A-Za-z0-9][\w.-]*\s*(?:\[[^\]]*\])?\s*\(?(?:===?)\s*[^\s*,;=]+\s*\)?(?:[;\s]|$)"
    r"|[\w.:-]+=[^=*\s]+=[^=*\s]+$"  # of conda, with the build
)
# A commit of a repository, or a file with its digest: the same for ever.
_FIXED_URL = re.compile(r"://\S*(?:@[0-9a-f]{40}(?:[#\s;&]|$)|#\S*(?:sha256|sha384|sha512)=)")


class _Requirements(Struct, frozen=True):
    """Content of one requirements file."""

    text: str
    """Text without comments and blank lines; sorted, if every version is exact."""
    includes: tuple[tuple[str, bool], ...]
    """Included files, and whether each is a constraints file."""
    links: tuple[str, ...]
    """Folders or URLs of wheels (--find-links)."""
    local: tuple[str, ...]
    """Paths of projects and archives."""
    requirements: tuple[str, ...]
    """Requirements of other kinds."""
    variables: tuple[str, ...]
    """Variables whose values pip inserts."""
    uses_index: bool


def _local_path(text: str) -> str:
    """Return a place on this host as a path; it may be a file URL."""
    if not text.startswith("file:"):
        return text
    path = text.removeprefix("file:")
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        # The text in the place of the host may be a variable that begins a path.
        path = ("" if host == "localhost" else host) + slash + rest
    return unquote(path)


def _read_requirements(text: str) -> _Requirements:
    """Return the requirements in a text, which may be any text."""
    # As in pip, lines are joined before comments are removed.
    lines = text.removeprefix("\ufeff").replace("\\\n", " ").splitlines()
    lines = [_COMMENT.sub("", line) if "#" in line else line for line in lines]
    lines = [" ".join(line.split()) for line in lines]
    lines = [line for line in lines if line]
    options = [line for line in lines if line.startswith("-")]
    others = [line for line in lines if not line.startswith("-")]
    includes, links, local, requirements = [], [], [], []
    for line in lines:
        is_option = line.startswith("-")
        if is_option and (match := _INCLUDE.match(line)):
            includes.append((_unquoted(match["file"]), "-c" in match["option"]))
        elif is_option and (match := _LINKS.match(line)):
            links.append(_local_path(_unquoted(match["place"])))
        elif is_option and (match := _EDITABLE.match(line)):
            # The URL may follow a name: "name @ file:...".
            place = re.sub(r"^[^/]*@(?=file:)", "", _unquoted(match["place"]))
            if "://" in place and not place.startswith("file:"):
                requirements.append(line)
            else:
                local.append(_local_path(re.split(r"[\[#]", place, maxsplit=1)[0]))
        elif not is_option and (match := _LOCAL.match(line)):
            local.append(_local_path(match["path"] or match["archive"]))
        elif not is_option:
            requirements.append(line)
    # The order of options may matter, and so may that of version ranges; options apply to the whole
    # file.
    if all(map(_is_exact, others)):
        lines = [*options, *sorted(others)]
    return _Requirements(
        text="".join(f"{line}\n" for line in lines),
        includes=tuple(includes),
        links=tuple(links),
        local=tuple(local),
        requirements=tuple(requirements),
        variables=tuple(sorted(set(_VARIABLE.findall(text)))),
        uses_index="--no-index" not in options,
    )


def _unquoted(value: str) -> str:
    return value[1:-1] if value[0] in "'\"" else value


def _is_exact(requirement: str) -> bool:
    """Return whether a requirement always means the same archive, in an index of fixed archives."""
    return bool(_EXACT.match(requirement) or _FIXED_URL.search(requirement))


def _name_of(requirement: str) -> str:
    """Return a requirement's name, normalised (PEP 503), or the requirement itself."""
    match = _NAME.match(requirement)
    return normal_name(match[0]) if match else requirement


def open_requirements(requirements: Iterable[str], constraints: Iterable[str]) -> list[str]:
    """Return the names that may mean another version tomorrow, in spite of the constraints."""
    exact = {_name_of(line) for line in constraints if _is_exact(line)}
    found = (_name_of(one) for one in requirements if not _is_exact(one))
    return sorted({name for name in found if name not in exact})


def folderless_names(lists: Sequence[str], part_names: Sequence[str]) -> dict[str, str]:
    """Return requirement file path -> name that stands for it in the key.

    The same requirements in another folder have the same key: pip records nowhere in which folder
    the file lay. Files whose names would meet another input's name keep their paths.
    """
    names = [(path, path.rpartition("/")[2]) for path in lists if "/" in path]
    counts = Counter(name for _, name in names)
    return {
        path: name
        for path, name in names
        if counts[name] == 1 and f"input {name}" not in part_names and name
    }


def shared_part_name(part_name: str, names: Mapping[str, str]) -> str:
    """Return a part's name with the path replaced by its name from `folderless_names`."""
    kind, _, path = part_name.partition(" ")
    return f"{kind} {names.get(path, path)}" if kind == "input" else part_name


def with_names(word: str, names: Mapping[str, str]) -> str:
    """Return a word of a command, or a script, with its paths replaced by `names`."""
    for path, name in names.items():
        plain = name.replace("\\", r"\\")  # as a template of re.sub
        word = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])", plain, word)
    return word


TOOLS = ("pip", "uv", "conda")
_SETTINGS_BYTES_MAX = 1024 * 1024
# Options of pip that do not decide what is installed.
_PIP_INDIFFERENT = {
    *("cache-dir", "no-cache-dir", "timeout", "retries", "progress-bar", "quiet", "verbose", "log"),
    *("disable-pip-version-check", "no-color", "no-input", "proxy", "cert", "client-cert"),
    *("root-user-action", "require-virtualenv", "keyring-provider", "trusted-host", "debug"),
    *("no-python-version-warning", "no-warn-script-location", "no-warn-conflicts", "exists-action"),
    *("default-timeout", "format", "resume-retries", "use-feature"),
}
# Options of pip whose values may be shown: requirements, paths, URLs and switches.
_PIP_SHOWN = {
    *("index-url", "extra-index-url", "find-links", "no-index", "pre", "no-binary", "only-binary"),
    *("prefer-binary", "constraint", "requirement", "target", "prefix", "root", "user", "no-deps"),
    *("upgrade", "upgrade-strategy", "platform", "python-version", "implementation", "abi", "src"),
    *("no-build-isolation", "require-hashes", "no-compile", "break-system-packages", "editable"),
}


def settings_parts(
    place: WorkingDirectory,
    tools: Collection[str],
    environ: Mapping[str, str],
    prefix: str,
    outputs: Sequence[bytes],
) -> PartsAndSecrets:
    """Return the parts for files with settings of `tools`. `prefix` is the interpreter's.

    Files in `outputs`, the targets, are made by the set-up, and left out. Never raises.
    """
    parts: dict[str, Part] = {}
    secrets: list[str] = []
    for tool, path in _candidates(place, tools, environ, prefix):
        absolute = os.fsencode(os.path.normpath(place.absolute(path)))
        text = _read_settings(place, path)
        if not text or any(absolute.startswith(output + b"/") for output in outputs):
            continue
        value = None
        if tool == "pip":
            value, found = _pip_options(text, secret_values(environ))
            secrets += found
        elif path.endswith("pyproject.toml"):
            value = _uv_table(text)
        else:
            value = _bytes_digest(strip_logins(text).encode("utf-8", "surrogateescape")).value
        if value:
            name = f"settings {_path_in_home(path, environ)}"
            parts.setdefault(name, Part(name, value))
    return PartsAndSecrets(tuple(sorted(parts.values())), tuple(secrets))


def _path_in_home(path: str, environ: Mapping[str, str]) -> str:
    """Return a path with the user's home as "~", so that it is equal for all users."""
    home = environ.get("HOME", "").rstrip("/")
    return f"~{path[len(home) :]}" if home and path.startswith(f"{home}/") else path


def _candidates(
    place: WorkingDirectory, tools: Collection[str], environ: Mapping[str, str], prefix: str
) -> Iterator[tuple[str, str]]:
    """Yield (tool, path) of every file that may exist."""
    home = environ.get("HOME", "").rstrip("/")
    config = environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    shared = [one for one in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if one]
    if "pip" in tools and environ.get("PIP_CONFIG_FILE") != os.devnull:
        site = dict.fromkeys(filter(None, (prefix, environ.get("VIRTUAL_ENV", ""))))
        named = filter(None, [environ.get("PIP_CONFIG_FILE", "")])
        for path in (
            *(f"{folder}/pip/pip.conf" for folder in shared),
            "/etc/pip.conf",
            f"{home}/.pip/pip.conf",
            f"{config}/pip/pip.conf",
            *(f"{folder}/pip.conf" for folder in site),
            *named,
        ):
            yield "pip", path
    if "uv" in tools and not is_on(environ, "UV_NO_CONFIG"):
        folders = [place.directory]
        while folders[-1] not in ("/", ""):
            folders.append(os.path.dirname(folders[-1]))
        for path in (
            *filter(None, [environ.get("UV_CONFIG_FILE", "")]),
            *(os.path.join(folder, "uv.toml") for folder in folders),
            *(os.path.join(folder, "pyproject.toml") for folder in folders),
            f"{config}/uv/uv.toml",
            *(f"{folder}/uv/uv.toml" for folder in shared),
            "/etc/uv/uv.toml",
        ):
            yield "uv", path
    if "conda" in tools:
        roots = filter(None, (environ.get("CONDA_ROOT", ""), environ.get("CONDA_PREFIX", "")))
        for path in (
            "/etc/conda/.condarc",
            "/etc/conda/condarc",
            *(f"{root}/{name}" for root in roots for name in (".condarc", "condarc")),
            *(f"{config}/conda/{name}" for name in (".condarc", "condarc")),
            *(f"{home}/{name}" for name in (".conda/.condarc", ".condarc", ".mambarc")),
            *filter(None, (environ.get("CONDARC", ""), environ.get("MAMBARC", ""))),
        ):
            yield "conda", path


def _read_settings(place: WorkingDirectory, path: str) -> str:
    try:
        file = place.host(path)
        if not file.is_file() or file.stat().st_size > _SETTINGS_BYTES_MAX:
            return ""
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, InvalidInputError):
        return ""


def _pip_options(text: str, known: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Return the options that decide the result, as JSON, and their secrets.

    For a text that pip would refuse, return its digest.
    """
    import configparser  # here: most nodes have no such file

    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text)
        options = {
            f"{section}.{option}": " ".join(parser.get(section, option).split())
            for section in sorted(parser.sections())
            for option in sorted(parser.options(section))
            if option.replace("_", "-") not in _PIP_INDIFFERENT
        }
    except configparser.Error:
        return _bytes_digest(strip_logins(text).encode("utf-8", "surrogateescape")).value, ()
    secrets: list[str] = []
    for name, value in options.items():
        if name.rpartition(".")[2].replace("_", "-") in _PIP_SHOWN:
            options[name], found = shown_values(value, known)
            secrets += found
        else:
            options[name] = HIDDEN
            secrets.append(value)
    return json.dumps(options, ensure_ascii=True) if options else "", tuple(secrets)


def _uv_table(text: str) -> str:
    """Return the digest of a project's table `[tool.uv]`; "" without one."""
    if "tool.uv" not in text:
        return ""
    import tomllib  # here: most set-ups have none

    try:
        table = tomllib.loads(text).get("tool", {}).get("uv", {})
        data = strip_logins(json.dumps(table, sort_keys=True, default=str))
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError):
        data = text
    return _bytes_digest(data.encode("utf-8", "surrogateescape")).value if data != "{}" else ""


_REQUIREMENTS_BYTES_MAX = 16 * 1024 * 1024
_SCRIPT_BYTES_MAX = 1024 * 1024
_GLOB_FILES_MAX = 1000
_PATH_BYTES_MAX = 4096
# Limit for the words that may name a file.
_WORDS_MAX = 2000
_REQUIREMENT_SUFFIXES = (".txt", ".in", ".pip")
_FILE_URL = re.compile(r"(?:^|[@=+\s])(file:[^#]*)")
_EXTRAS = re.compile(r"\[[\w.,\s-]*\]$")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
# Folders of the kernel, whose files change at each look.
_KERNEL_FOLDERS = ("/proc/", "/sys/", "/dev/")
# Files that hold a secret, whose digest must not be in the key.
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
    """Inputs of a set-up, and the reads that could not be determined."""

    parts: tuple[Part, ...]
    found: tuple[str, ...]
    """Inputs that were not declared."""
    open_requirements: tuple[str, ...]
    """Requirements whose version depends on the contents of an index."""
    opaque: tuple[str, ...]
    """Programs and scripts that are run without being understood."""
    rough: tuple[str, ...]
    """Inputs that were not read completely."""
    variables: tuple[str, ...]
    """Variables whose values requirement files use."""
    tools: frozenset[str]
    """Tools whose settings decide the result."""
    lists: tuple[str, ...]
    """Files of requirements among the inputs that were not declared."""
    free: tuple[str, ...]
    """Variables that the command and its scripts take from their environment."""
    scripts: tuple[str, ...] = ()
    """Texts of scripts that the command runs."""


def collect_inputs(
    place: WorkingDirectory,
    declared: Iterable[str],
    hints: Hints,
    outputs: Sequence[bytes],
    environ: Mapping[str, str] | None = None,
    find: Callable[[str], str | None] = lambda program: None,
) -> Inputs:
    """Return the parts for every input file, and the names found without being declared.

    Files in `outputs`, the targets, are inputs only if they are declared. `find` gives the path of
    a program. A file that the command only seems to name is left out if it does not exist.

    Raises: NotFoundError for a declared file that is missing, or another error of reading it.
    """
    collector = _Collector(place, outputs, environ or {}, find)
    for name in declared:
        collector.add(name, is_declared=True)
    collector.follow(hints)
    return collector.collected()


class _Collector(Struct):
    """Collector of the inputs of one set-up."""

    _place: WorkingDirectory
    _outputs: Sequence[bytes]
    _environ: Mapping[str, str]
    _find: Callable[[str], str | None]
    _parts: dict[str, Part] = {}
    _found: list[str] = []
    _has_directory: bool = False
    _requirements: list[str] = []
    _constraints: list[str] = []
    _open: list[str] = []
    _opaque: list[str] = []
    _rough: list[str] = []
    _variables: set[str] = set()
    _scripts: dict[str, str] = {}
    _tools: set[str] = set()
    _lists: list[str] = []
    _lines: dict[str, _Requirements] = {}
    _free: set[str] = set()
    _guessed_bytes: int = 0
    _word_count: int = 0

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
        """Add the existing files that hints name."""
        self._opaque += hints.opaque
        self._tools.update(hints.tools)
        self._free.update(hints.variables)
        for name in hints.files:
            is_list = name in hints.requirement_files
            paths = self._expanded(_requirement_path(name))
            if _FILE_URL.search(name) and not any(map(self._exists, paths)):
                self._opaque.append(as_text(name))  # a form of URL whose path is not understood
            for path in paths:
                self.add(path, is_list=is_list, is_indexed=name in hints.indexed_files)
        for name in hints.link_dirs:
            for path in self._expanded(_local_path(name)):
                self._add_links(path)
        self._follow_programs(hints)
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
            # The requirements of a local project are looked up in an index.
            if COMPUTED not in word:
                (self._open if is_local else self._requirements).append(as_text(word))
        self._look_at_words(hints)

    def _follow_programs(self, hints: Hints) -> None:
        """Add scripts and programs, which may lie in any directory that a `cd` names."""
        paths: dict[str, str] = {}
        read_names: set[str] = set()
        for name in hints.scripts:
            for path in self._expanded(name) or [name]:
                is_read = self._follow_script(path, hints.directories, is_shell=True)
                read_names |= {base_name(path)} if is_read else set()
                paths.setdefault(base_name(path), path)
        for name in hints.programs:
            found = self._expanded(name) if "/" in name else [self._find(name) or name]
            for path in found or [name]:
                is_read = self._follow_script(path, hints.directories, is_shell=False)
                read_names |= {base_name(path)} if is_read else set()
                paths.setdefault(base_name(path), name)
        self._opaque += [as_text(paths[name]) for name in paths if name not in read_names]

    def _is_there(self, name: str) -> bool:
        return any(self._exists(path) for path in self._expanded(name))

    def _look_at_words(self, hints: Hints) -> None:
        """Add the files that words of unknown meaning name."""
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
                self._add_tested(path)

    def _add_tested(self, name: str) -> None:
        """Add the existence and the kind of a file."""
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
        """Add a file or a directory.

        Args:
            is_list: The file is a list of requirements or constraints.
            is_indexed: The requirements in it are looked up in an index.
            wanted: The only file type that counts.
        """
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
                digest = _tree_digest(path, tops, limited=not is_declared)
                self._has_directory = True
            elif stat.S_ISREG(mode):
                limit_bytes = _WORD_BYTES_MAX if wanted else _GUESSED_BYTES_MAX
                limit = None if is_declared else limit_bytes
                digest = self._digest(name, path, is_list=is_list, limit_bytes=limit)
            else:
                return
        except OSError as error:
            if is_declared:
                raise from_oserror(error, f"read the input {name}") from error
            self._opaque.append(name)  # the user of the command may be able to read it
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
        """Return whether a word that names something of this mode is no input.

        A word that may be read nevertheless is noted as opaque.
        """
        if wanted and stat.S_IFMT(mode) != wanted:
            return True
        absolute = os.path.normpath(self._place.absolute(name))
        is_unstable = absolute.startswith(_KERNEL_FOLDERS) or not (
            stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        )
        # Files that a tool is known to read as a list, script or archive hold no secret.
        is_private = wanted == stat.S_IFREG and _PRIVATE.search(absolute)
        if is_unstable or is_private:
            self._opaque += [] if absolute == os.devnull else [name]
            return True
        return False

    def _digest(
        self, name: str, path: Path, *, is_list: bool, limit_bytes: int | None
    ) -> _InputDigest:
        if is_list or name.endswith(_REQUIREMENT_SUFFIXES):
            text = self._text(name, _REQUIREMENTS_BYTES_MAX)
            if text is not None:
                # Credentials change without another result of the set-up.
                public = strip_logins(text)
                found = self._lines[name] = _read_requirements(public)
                text = found.text if is_list else public
                return _bytes_digest(text.encode("utf-8", "surrogateescape"))
        if limit_bytes is not None:
            self._guessed_bytes += path.stat().st_size
            if self._guessed_bytes > _GUESSED_BYTES_MAX:
                limit_bytes = 0
        return _file_digest(path, limit_bytes=limit_bytes)

    def _text(self, name: str, bytes_max: int) -> str | None:
        """Return a file's text; None if it is no file, too large, or unreadable."""
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
        """Return a path as a shell would read it: with home, variables and patterns expanded.

        Empty if that cannot be determined.
        """
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
        """Return the words that a shell makes of a word with `{a,b}`."""
        found = [name]
        while match := _BRACES.search(found[0]):
            inner = match[1].split(",")
            if len(found) * len(inner) > _GLOB_FILES_MAX:
                self._opaque.append(name)
                return []
            texts = found
            found = []
            for text in texts:
                # All texts have the next braces; they differ only before them.
                each = _BRACES.search(text)
                if each is not None:
                    before, after = text[: each.start()], text[each.end() :]
                    found += [f"{before}{one}{after}" for one in each[1].split(",")]
        return found

    def _follow_list(self, name: str, found: _Requirements, *, is_indexed: bool) -> None:
        """Add the files that a requirements file includes. Any text file may pass: no errors."""
        is_indexed = is_indexed and found.uses_index
        self._constraints += found.requirements
        self._variables.update(found.variables)
        if is_indexed:
            self._requirements += found.requirements
        directory = name.rpartition("/")[0]
        for included, is_constraint in found.includes:
            # pip resolves included files relative to the including file.
            included = _local_path(included)
            path = included if included.startswith("/") else os.path.join(directory, included)
            self._opaque += [included] if "://" in included else []
            self.add(path, is_list=True, is_indexed=is_indexed and not is_constraint)
        for place in found.links:
            # pip resolves a folder of wheels relative to the file if it exists there, else relative
            # to the working directory.
            relative = os.path.join(directory, place)
            self._add_links(relative if directory and self._exists(relative) else place)
        for path in found.local:
            # pip resolves local projects relative to the working directory.
            self.add(path)
            self._open += [path] if is_indexed else []

    def _follow_script(self, name: str, directories: Sequence[str], *, is_shell: bool) -> bool:
        """Add a script, and the files that it names; return whether a shell runs it."""
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
            digest = _wheels_digest(self._place.host(name))
        except (OSError, InvalidInputError):
            return  # pip says what is wrong with it
        self._parts[name] = Part(f"wheels {name}", digest.value)
        self._found.append(name)
        self._rough += [name] if digest.is_rough else []


def _requirement_path(word: str) -> str:
    """Return the path in a requirement of a command line; any text if it has none."""
    if match := _FILE_URL.search(word):
        word = _local_path(match[1])
    return _EXTRAS.sub("", word)
