"""Files of requirements, as pip and uv read them: what they include, and what they leave open.

Pure (no I/O). `setup.inputs` reads the files.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from msgspec import Struct

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


class Requirements(Struct, frozen=True):
    """What one file says."""

    text: str
    """Without what makes no difference: comments, blank lines, and, where every version is exact,
    the order."""
    includes: tuple[tuple[str, bool], ...]
    """Files, and whether they are constraints."""
    links: tuple[str, ...]
    """Places of wheels (--find-links)."""
    local: tuple[str, ...]
    """Paths of projects and archives."""
    requirements: tuple[str, ...]
    """All others."""
    variables: tuple[str, ...]
    """Whose values are put in."""
    uses_index: bool


def local_path(text: str) -> str:
    """A place on this host as a path, also where it is a file URL."""
    if not text.startswith("file:"):
        return text
    path = text.removeprefix("file:")
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        # What stands for the host may also be the beginning of a path that is filled in.
        path = ("" if host == "localhost" else host) + slash + rest
    return unquote(path)


def read_requirements(text: str) -> Requirements:
    """What the file with this text says; any text may come."""
    # As pip: lines are joined before comments go.
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
            links.append(local_path(_unquoted(match["place"])))
        elif is_option and (match := _EDITABLE.match(line)):
            # Behind its name, too: "name @ file:...".
            place = re.sub(r"^[^/]*@(?=file:)", "", _unquoted(match["place"]))
            if "://" in place and not place.startswith("file:"):
                requirements.append(line)
            else:
                local.append(local_path(re.split(r"[\[#]", place, maxsplit=1)[0]))
        elif not is_option and (match := _LOCAL.match(line)):
            local.append(local_path(match["path"] or match["archive"]))
        elif not is_option:
            requirements.append(line)
    # Of several options of one kind the order may count, and of ranges pip's search begins with the
    # first; options hold for the whole file.
    if all(map(is_exact, others)):
        lines = [*options, *sorted(others)]
    return Requirements(
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


def is_exact(requirement: str) -> bool:
    """Whether a requirement always means the same archive, if its index never changes one."""
    return bool(_EXACT.match(requirement) or _FIXED_URL.search(requirement))


def name_of(requirement: str) -> str:
    """A requirement's name, normalised (PEP 503), or the requirement itself."""
    match = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else requirement


def open_requirements(requirements: Iterable[str], constraints: Iterable[str]) -> list[str]:
    """Returns the names that may mean another version tomorrow, though constraints hold."""
    exact = {name_of(line) for line in constraints if is_exact(line)}
    found = (name_of(one) for one in requirements if not is_exact(one))
    return sorted({name for name in found if name not in exact})


def folderless_names(lists: Sequence[str], part_names: Sequence[str]) -> dict[str, str]:
    """What stands in the key for the paths of requirement files: their names, so that the same
    requirements in another folder have the same key. Pip records nowhere where such a file lay.

    Those that would meet another input's name keep their paths.
    """
    names = [(path, path.rpartition("/")[2]) for path in lists if "/" in path]
    counts = Counter(name for _, name in names)
    return {
        path: name
        for path, name in names
        if counts[name] == 1 and f"input {name}" not in part_names and name
    }


def shared_part_name(part_name: str, names: Mapping[str, str]) -> str:
    """A part's name with what `folderless_names` gave."""
    kind, _, path = part_name.partition(" ")
    return f"{kind} {names.get(path, path)}" if kind == "input" else part_name


def with_names(word: str, names: Mapping[str, str]) -> str:
    """A word of a command, or a script, with the paths in it replaced likewise."""
    for path, name in names.items():
        plain = name.replace("\\", r"\\")  # as a template of re.sub
        word = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])", plain, word)
    return word
