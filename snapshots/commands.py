"""Reading of a set-up's command: input files, directories, and programs that are not understood.

Reads the words of a command line and of its shell scripts; runs and opens nothing. The findings are
hints: `inputs` and `target_inference` compare them with the file system, and the user is told which
of them are used. A closed list of forms is understood. Everything else is named in `Hints.opaque`,
since its inputs are unknown; that is never an error. Pure.

The tables: wrappers such as `sudo` and `timeout`, programs that handle files, and the tools that
make environments (pip, uv, conda, poetry, pdm, venv).
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, product
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.linux.interpreters import PYTHON
from bootseer.snapshots.shell import (
    ASSIGNMENT,
    COMPUTED,
    SHELLS,
    Block,
    Simple,
    Token,
    as_text,
    base_name,
    has_marks,
    marks,
    parse,
    read_shell,
    variable,
)


class Hints(Struct, frozen=True):
    """Hints from the words of a set-up command. Paths are as written, relative ones included."""

    python_words: tuple[str, ...] = ()
    """Programs that are the interpreter in use, or lie beside it: "python3", "/opt/v/bin/pip"."""
    environment_dirs: tuple[str, ...] = ()
    """Environments that the command makes or activates."""
    install_dirs: tuple[str, ...] = ()
    """Values of --target and --prefix."""
    files: tuple[str, ...] = ()
    """Words that may be input files or directories."""
    link_dirs: tuple[str, ...] = ()
    """Folders of wheels (--find-links)."""
    uses_pip: bool = False
    """Whether the command installs into the environment of the interpreter in use."""
    uses_user_site: bool = False
    """Whether the command is `pip install --user`."""
    uses_uv: bool = False
    """Whether the command is `uv pip`, which prefers the active environment to PATH."""
    projects: tuple[tuple[str, str], ...] = ()
    """Projects whose environment is filled: "uv", "poetry" or "pdm", and the project's folder."""
    uses_conda: bool = False
    """Whether the command changes the active conda environment."""
    names_conda_environment: bool = False
    """Whether the command changes a conda environment that is given by name: only conda knows its
    path."""
    requirement_files: tuple[str, ...] = ()
    """Members of `files` that are lists of requirements or constraints."""
    indexed_files: tuple[str, ...] = ()
    """Members of `requirement_files` whose requirements are looked up in an index."""
    requirements: tuple[str, ...] = ()
    """Words that are looked up in an index, unless they name a file."""
    lock_files: tuple[str, ...] = ()
    """Members of `files` that fix all versions; without them, versions are looked up."""
    spec_files: tuple[str, ...] = ()
    """Members of `files` that are lists of conda packages."""
    scripts: tuple[str, ...] = ()
    """Members of `files` that a shell runs or reads."""
    programs: tuple[str, ...] = ()
    """Unknown programs; those with a "/" are in `files` as well."""
    opaque: tuple[str, ...] = ()
    """Programs and scripts that are run without being understood, for people."""
    tools: tuple[str, ...] = ()
    """Tools whose settings decide the result: "pip", "uv", "conda"."""
    words: tuple[str, ...] = ()
    """Words that are inputs if they name a file, and not if they name a directory."""
    folders: tuple[str, ...] = ()
    """Words that are inputs if they name a directory; the command makes a file of that name."""
    tested: tuple[str, ...] = ()
    """Files whose existence and kind are inputs, not their contents."""
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
    """Return the union of hints, in this order."""
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


# Hints that are paths: in the directory of the command; and, since "cd" may have been meant for
# another command, perhaps where they were before.
_MOVED = ("environment_dirs", "install_dirs", "lock_files", "spec_files")
_PERHAPS_MOVED = (
    *("files", "link_dirs", "requirement_files", "indexed_files", "scripts", "words"),
    *("folders", "tested"),
)
# Hints about files that are inputs unless the command makes them.
_READ = ("files", "words", "scripts", "programs", "requirement_files", "indexed_files")


def moved_to(hints: Hints, directory: str) -> Hints:
    """Return the hints of a command that runs in `directory`."""
    if not directory:
        return hints

    def moved(name: str) -> tuple[str, ...]:
        return tuple(
            path if ":/" in path and not path.startswith("file://.") else _joined(directory, path)
            for path in getattr(hints, name)
        )

    def called(words: Sequence[str]) -> tuple[str, ...]:
        return tuple(posixpath.join(directory, word) if "/" in word else word for word in words)

    paths = {name: moved(name) for name in _MOVED}
    for name in _PERHAPS_MOVED:
        paths[name] = tuple(dict.fromkeys((*getattr(hints, name), *moved(name))))
    return replace(
        hints,
        python_words=called(hints.python_words),
        projects=tuple((tool, posixpath.join(directory, path)) for tool, path in hints.projects),
        programs=tuple(dict.fromkeys((*hints.programs, *called(hints.programs)))),
        directories=(directory, *moved("directories")) if hints.runs_files else (),
        **paths,
    )


# Modules of Python that read no other files than those that their arguments name.
_OWN_MODULES = {"venv", "virtualenv", "ensurepip", "compileall", "site", "sysconfig"}
# Variables of the shell for its working directory, to which paths here are relative.
_OWN_FOLDERS = {"PWD": ".", "OLDPWD": COMPUTED}
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
# Variables that decide which programs run, or which code programs load.
_SEARCH_VARIABLES = {
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "BASH_ENV", "ENV", "IFS"),
    *("HOME", "CDPATH", "PWD"),
}
_DEPTH_MAX = 8
_COMMANDS_MAX = 5000
_PATH_MAX = 4096
_SPREAD_MAX = 8
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is switched on, as pip and uv read it (strtobool). Pure."""
    return environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def hints_of(command: Sequence[str]) -> Hints:
    """Return the hints of `command` about files that it reads and writes. Pure."""
    reader = _Reader()
    if any(has_marks(word) for word in command):
        reader.opaque("a word with control characters")
    else:
        reader.run(list(command), Simple())
    return reader.hints


def hints_of_script(text: str) -> Hints:
    """Return the hints of a shell script. Pure."""
    reader = _Reader()
    reader.script(text)
    return reader.hints


class _State(Struct):
    """State of a script at one place."""

    directory: str = ""
    bound: set[str] = field(default_factory=set)
    """Variables that the script has certainly set."""
    made: set[str] = field(default_factory=set)
    """Files that the script has certainly made or replaced."""

    def copy(self) -> "_State":
        return _State(self.directory, set(self.bound), set(self.made))


class _Reader:
    """Reader of a script, which collects the hints of its commands in order."""

    def __init__(self, parent: "_Reader | None" = None) -> None:
        self._found: list[Hints] = []
        self._depth: int = parent._depth + 1 if parent else 0
        self._state: _State = parent._state.copy() if parent else _State()
        self._assigned: dict[str, list[str]] = dict(parent._assigned) if parent else {}
        self._functions: set[str] = set(parent._functions) if parent else set()
        self._folders: list[str] = list(parent._folders) if parent else []

    @property
    def hints(self) -> Hints:
        return merged(*self._found)

    def add(self, hints: Hints) -> None:
        """Add hints of a command that runs in the present directory."""
        if hints != _NOTHING:
            self._found.append(hints)

    def opaque(self, what: str) -> None:
        self.add(Hints(opaque=(what,)))

    def script(self, text: str, *, is_output_used: bool = False) -> None:
        if self._depth > _DEPTH_MAX:
            self.opaque("scripts that are nested too deeply")
            return
        found = parse(text)
        if found.not_understood:
            self.opaque(found.not_understood)
        if len(found.events) > _COMMANDS_MAX:
            self.opaque("a very long shell script")
            return
        self._collect_values(found.events)
        stack: list[tuple[Block, _State]] = []
        is_function = False
        first_state = self._state.copy()  # after the first pipeline of a list of "&&" and "||"
        is_certain = True
        for event in found.events:
            if isinstance(event, Simple):
                event.is_output_used |= is_output_used
                if not event.joined and not event.is_piped:
                    self._end_chain(first_state)
                    is_certain = True
                is_certain = is_certain and not event.joined
                before = self._state.copy()
                self._read_simple(event)
                if event.joined == "||":
                    before.directory = self._state.directory
                    self._state = before
                elif is_certain:
                    first_state = self._state.copy()
                continue
            self._end_chain(first_state)
            if event.kind == "function":
                is_function = True
            elif event.kind in ("begin", "list"):
                kind = Block("begin", event.name) if is_function else event
                is_function = False
                stack.append((kind, self._state.copy()))
            elif event.kind == "branch" and stack:
                self._leave_block(stack[-1][1])
                self._state = stack[-1][1].copy()
            elif event.kind == "end" and stack:
                block, before = stack.pop()
                if block.kind == "begin":
                    self._leave_block(before)
                    self._state = before
                elif block.name == ")":
                    self._state = replace(before, made=self._state.made)
            elif event.kind == "for":
                self._state.bound.add(event.name)
                for token in event.values or ():
                    self._add_scripts_in(token)
                    self.add(
                        moved_to(Hints(words=_named_words(self._spread(token))), self._directory)
                    )
            first_state = self._state.copy()

    @property
    def _directory(self) -> str:
        return self._state.directory

    def _end_chain(self, first: _State) -> None:
        """End a list of `&&` and `||`: only the effects of its first command are certain."""
        self._state = _State(self._state.directory, set(first.bound), set(first.made))

    def _leave_block(self, before: _State) -> None:
        """Leave a block that may not have run."""
        if self._state.directory != before.directory:
            self.opaque("a cd that may not happen")

    def _collect_values(self, events: Iterable[Simple | Block]) -> None:
        """Note all values of the script's variables, and the names of its functions."""
        for event in events:
            if isinstance(event, Block):
                if event.kind == "function":
                    self._functions.add(event.name)
                elif event.kind == "for":
                    values = [COMPUTED] if event.values is None else [t.text for t in event.values]
                    is_pattern = any(c in one for one in values for c in "*?[{")
                    self._assigned.setdefault(event.name, []).extend(
                        [*values, *([COMPUTED] if is_pattern else [])]
                    )
                continue
            words = [token.text for token in event.words]
            for text in (*(token.text for token in event.assignments), *_assignments_by(words)):
                if match := ASSIGNMENT.match(text):
                    is_whole = match[0] == f"{match[1]}="
                    value = text[match.end() :] if is_whole else COMPUTED
                    self._assigned.setdefault(match[1], []).append(value)

    def _read_simple(self, event: Simple) -> None:
        for token in event.tokens():
            self._add_scripts_in(token)
        words = [token.text for token in event.words]
        assignments = [token.text for token in event.assignments]
        if words and base_name(words[0]) in _DECLARE:
            assignments += [word for word in words[1:] if ASSIGNMENT.match(word)]
        for text in assignments:
            self._assign(text)
        for token in event.reads:
            spread = self._spread(token)
            self._note(Hints(files=tuple(one for one in spread if COMPUTED not in one)))
            if any(COMPUTED in one for one in spread):
                self.opaque("a file that the shell computes")
        self._note(Hints(words=_named_words([t.text for t in event.others if not t.scripts])))
        lists = [self._spread(token) for token in event.words]
        count = 1
        for values in lists:
            count *= len(values)
        if words and count <= _SPREAD_MAX:
            for combination in product(*lists):
                self.run(list(combination), event)
        elif words:
            self._note(Hints(words=_named_words([one for values in lists for one in values])))
            self.run([one[0] if len(one) == 1 else COMPUTED for one in lists], event)
        if not words:
            self._note_bound(match[1] for text in assignments if (match := ASSIGNMENT.match(text)))
        else:
            self._note_bound(
                match[1] for text in _assignments_by(words) if (match := ASSIGNMENT.match(text))
            )
        for token in event.writes:
            for path in self._spread(token):
                self._note_made(path)

    def _note_bound(self, names: Iterable[str]) -> None:
        self._state.bound.update(names)

    def _note_made(self, path: str) -> None:
        if not path.startswith("/dev/") and COMPUTED not in path:
            self._state.made.add(_place(self._directory, path))

    def _add_scripts_in(self, token: Token) -> None:
        """Add the hints of the scripts in a word, and note the variables that come from outside."""
        free = [name for name in token.variables if name not in self._state.bound]
        self.add(Hints(variables=tuple(free)))
        for text in token.scripts:
            inner = _Reader(self)
            inner.script(text, is_output_used=True)
            self.add(inner.hints)

    def _spread(self, token: Token) -> list[str]:
        """Return all values that the script may give to a word."""
        return self._values(token.text, ()) or [COMPUTED]

    def _values(self, word: str, within: tuple[str, ...]) -> list[str]:
        found = [word]
        for mark, name, default in marks(word):
            if name in _OWN_FOLDERS and name not in self._assigned:
                found = [one.replace(mark, _OWN_FOLDERS[name]) for one in found]
                continue
            if not name or name not in self._assigned or name in within or len(within) > 4:
                continue
            values = []
            assigned = dict.fromkeys(self._assigned[name])
            if len(assigned) > 4 * _SPREAD_MAX:
                return [COMPUTED]
            for text in assigned:
                values += self._values(text, (*within, name))
            if name not in self._state.bound:
                values.append(variable(name, default))
            values = [one if not one.split()[1:] else COMPUTED for one in values]
            found = [one.replace(mark, value) for one in found for value in dict.fromkeys(values)]
            if len(found) > 4 * _SPREAD_MAX:
                return [COMPUTED]
        return list(dict.fromkeys(found))

    def _assign(self, text: str) -> None:
        """Note the files that the value of a variable names."""
        name, _, value = text.partition("=")
        name = name.rstrip("+")
        values = self._values(value, (name,))
        for one in values:
            words = tuple(one.split())
            if name in FILE_VARIABLES:
                lists = Hints(files=words, requirement_files=words)
                is_indexed = name == "PIP_REQUIREMENT"
                self._note(replace(lists, indexed_files=words) if is_indexed else lists)
                if COMPUTED in one:
                    self.opaque(name)
            elif name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
                self._note(Hints(link_dirs=words))
            else:
                self._note(Hints(words=_named_words(words)))
        if name in _SEARCH_VARIABLES and not self._is_search_path(values, name):
            self.opaque(name)

    def _is_search_path(self, values: Sequence[str], name: str) -> bool:
        """Return whether a value adds only folders of environments that the script makes."""
        made = {f"{one}/bin" for found in self._found for one in found.environment_dirs}
        parts = {part for value in values for part in value.split(":")}
        return name == "PATH" and parts <= made | {variable(name)}

    def _note(self, hints: Hints) -> None:
        """Add hints; paths that the script itself has made are no inputs."""
        directory = self._directory
        named = {*hints.files, *hints.words, *hints.scripts, *hints.programs}
        made = {name for name in named if _place(directory, name) in self._state.made}
        if made:
            lists = {*hints.requirement_files, *hints.spec_files}
            opaque = made & {*lists, *hints.scripts, *hints.programs}
            hints = replace(
                hints,
                folders=tuple(one for one in hints.files if one in made),
                opaque=(*hints.opaque, *sorted(opaque)),
                **{name: _without(getattr(hints, name), made) for name in _READ},
            )
        hints = moved_to(hints, directory)
        for folder in self._folders:
            hints = moved_to(hints, folder)
        self.add(hints)

    def run(self, words: list[str], event: Simple) -> None:
        """Add the hints of one command, without the wrappers in front of it."""
        outer = _unwrapped(words)
        for text in outer.assignments:
            self._assign(text)
        self._note(Hints(words=_named_words(outer.own_words), opaque=tuple(outer.opaque)))
        self._folders += outer.directories
        if any(COMPUTED in one for one in outer.directories):
            self.opaque("a directory that the shell computes")
        if outer.words:
            self._command(outer.words, event, is_wrapped=outer.words != words)
        if outer.directories:
            del self._folders[-len(outer.directories) :]
        self._state.made.update(_place(self._directory, path) for path in outer.written)

    def _command(self, words: list[str], event: Simple, *, is_wrapped: bool) -> None:
        program = base_name(words[0])
        if program in ("cd", "pushd", "popd") and not is_wrapped:
            self._change_directory(words, event)
            return
        if program in self._functions:
            self._note(Hints(words=_named_words(words[1:])))
            return
        script = _script_in(program, words)
        if script is not None:
            if program in SHELLS:
                self._note(Hints(words=_named_words(read_shell(words).arguments)))
            if COMPUTED in script:
                self.opaque(f"{program} of what the shell computes")
            inner = _Reader(self)
            inner.script(as_text(script), is_output_used=event.is_output_used)
            self.add(inner.hints)
            return
        hints = _hints_of_simple(words, shows=not event.is_output_used)
        self._note(hints)
        for path in _made_by(program, words[1:]):
            self._note_made(path)

    def _change_directory(self, words: list[str], event: Simple) -> None:
        state = self._state
        plain = [word for word in words[1:] if word not in ("-P", "-L", "-e", "--")]
        if words[0] == "popd" or plain[:1] == ["-"] or event.joined == "||":
            self.opaque(words[0])
            return
        folder = plain[0] if plain else variable("HOME")
        if COMPUTED in folder:
            self.opaque("a cd to where the shell computes")
        elif len(state.directory) + len(folder) > _PATH_MAX:
            self.opaque("a cd to a very long path")
        else:
            state.directory = posixpath.join(state.directory, folder)


def _script_in(program: str, words: Sequence[str]) -> str | None:
    """Return the text of the script among the words of a command; None without one."""
    if program in SHELLS:
        return read_shell(words).script
    if program in ("su", "runuser") and "-c" in words[:-1]:
        return words[words.index("-c") + 1]
    if program == "eval":
        return " ".join(words[1:])
    if program == "trap" and len(words) > 2 and words[1] not in ("-", "-p", "-l", ""):
        return words[1]
    if words[0] == "-c" and len(words) > 1:
        return words[1]  # of flock(1)
    return None


def _assignments_by(words: Sequence[str]) -> Iterator[str]:
    """Yield the assignments, as texts, that a builtin of the shell makes."""
    program = words[0] if words else ""
    if program in _DECLARE:
        yield from words[1:]
    elif program in ("read", "mapfile", "readarray", "getopts"):
        yield from (f"{word}={COMPUTED}" for word in words[1:] if word.isidentifier())
    elif program == "printf" and "-v" in words[:-1]:
        yield f"{words[words.index('-v') + 1]}={COMPUTED}"
    elif program == "let":
        yield from (f"{word.partition('=')[0]}={COMPUTED}" for word in words[1:])


def _place(directory: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(directory, path))


def _without(names: Sequence[str], others: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def _hints_of_simple(words: Sequence[str], *, shows: bool) -> Hints:
    program = base_name(words[0])
    if COMPUTED in words[0]:
        return Hints(opaque=(as_text(words[0]),), words=_named_words(words[1:]))
    if program in (".", "source"):
        return _hints_of_source(words)
    if program in SHELLS:
        shell = read_shell(words)
        named = _named_words(shell.arguments)
        if shell.file and COMPUTED not in shell.file and not shell.file.startswith(_STREAMS):
            return Hints(files=(shell.file,), scripts=(shell.file,), words=named)
        return Hints(opaque=(program,), words=named)
    if PYTHON.fullmatch(program):
        return _hints_of_python(program, words)
    hints = _hints_of_packages(program, words)
    if hints is None:
        hints = _hints_of_file_tool(program, words[1:], shows=shows)
        if hints is None:
            hints = _hints_of_unknown(words[0], words[1:])
        return hints
    return _checked(hints, program, words)


def _checked(hints: Hints, program: str, words: Sequence[str]) -> Hints:
    """Return the hints of a tool that installs; opaque, if only a shell can expand its words."""
    what = [word for word in words[1:] if COMPUTED in word or word.startswith(_STREAMS)]
    lists = [*hints.requirement_files, *hints.spec_files]
    what += [one for one in lists if one in ("-", "") or ("://" in one and "file:///" not in one)]
    if not what:
        return hints
    shown = "the words" if any(COMPUTED in one for one in what) else "the files"
    return replace(hints, opaque=(*hints.opaque, f"{shown} of {program}"))


def _hints_of_source(words: Sequence[str]) -> Hints:
    file = words[1] if len(words) > 1 else ""
    directory, _, rest = file.rpartition("/bin/")
    named = _named_words(words[2:])
    if COMPUTED in file or file.startswith(_STREAMS):
        return Hints(opaque=("a script that the shell computes",), words=named)
    if rest == "activate" and directory:
        return Hints(environment_dirs=(directory,))
    return Hints(files=(file,), scripts=(file,), words=named) if file else Hints()


def _hints_of_python(program: str, words: Sequence[str]) -> Hints:
    module = _module(words)
    if module is None:
        script_words = tuple(_positional(words[1:], {"-W", "-X", "-c"})[:1])
        is_asked = {"-V", "--version"}.intersection(words)
        shown = [base_name(as_text(one)) for one in script_words]
        what = f"{program} -c" if "-c" in words else " ".join((program, *shown))
        files = tuple(one for one in script_words if COMPUTED not in one and "-c" not in words)
        read = _hints_of_unknown(program, words[1:]).words
        return Hints((words[0],), files=files, words=read, opaque=() if is_asked else (what,))
    name, rest_words = module
    hints = _hints_of_package_tool(name, words[0], rest_words) if _is_package_tool(name) else None
    if hints is None:
        is_known = name in _OWN_MODULES
        named = _named_words(rest_words)
        return Hints((words[0],), words=named, opaque=() if is_known else (f"{program} -m {name}",))
    return _checked(hints, name, words)


def _hints_of_packages(program: str, words: Sequence[str]) -> Hints | None:
    """Return the hints of a tool that makes or fills an environment; None for other programs."""
    if program in _PROJECT_TOOLS and (hints_or_none := _hints_of_project(program, list(words))):
        return hints_or_none
    if program == "uv" and len(words) > 1 and words[1] in ("pip", "venv"):
        if words[1] == "venv":
            directories = _positional(words[2:], _VENV_VALUE_OPTIONS) or [".venv"]
            return Hints(("python3",), (directories[0],), tools=("uv",))
        hints = _hints_of_package_tool("pip", "python3", list(words[2:]))
        # With a named interpreter, uv does not look for an active environment.
        is_told = "--system" in words or bool(_option_values(words, _PYTHON_OPTIONS))
        return replace(hints, uses_uv=not is_told, tools=("uv",))
    if program in _PROJECT_TOOLS and words[1:2] == ["run"] and len(words) > 2:
        inner = _hints_of_simple(words[2:], shows=False)
        # `run` first updates the project's environment.
        opaque = (*inner.opaque, f"{program} run")
        return replace(inner, tools=("uv",) if program == "uv" else (), opaque=opaque)
    return (
        _hints_of_package_tool(program, words[0], list(words[1:]))
        if _is_package_tool(program)
        else None
    )


def _module(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return ("pip", arguments) for "python -I -m pip ..."; None if a script is run."""
    for i, word in enumerate(words[1:], 1):
        if word == "-m":
            return (words[i + 1], list(words[i + 2 :])) if i + 1 < len(words) else None
        if not word.startswith("-") or word == "-c":
            return None
    return None


class Wrapper(Struct, frozen=True):
    """Known options of a wrapper, without options that run another program."""

    values: frozenset[str] = frozenset()
    """Options that take a value."""
    flags: frozenset[str] = frozenset()
    own_count: int = 0
    """Number of the wrapper's own words before the command, which may be files that it writes."""
    written: frozenset[str] = frozenset()
    """Options whose value names a file that is written."""
    directories: frozenset[str] = frozenset()
    """Options whose value is the directory in which the command runs."""


def _wrapper(
    values: str = "", flags: str = "", own: int = 0, written: str = "", directories: str = ""
) -> Wrapper:
    return Wrapper(
        frozenset((*values.split(), *written.split(), *directories.split())),
        frozenset(flags.split()),
        own,
        frozenset(written.split()),
        frozenset(directories.split()),
    )


WRAPPERS = {
    **dict.fromkeys(("builtin", "nohup", "catatonit", "command", "unbuffer"), _wrapper(flags="-p")),
    "exec": _wrapper("-a", "-c -l"),
    "setsid": _wrapper(flags="-c -f -w --ctty --fork --wait"),
    "dumb-init": _wrapper(flags="-v -c --verbose --single-child"),
    "tini": _wrapper("-p -e", "-s -g -v -w"),
    "gosu": _wrapper(own=1),
    "su-exec": _wrapper(own=1),
    "setarch": _wrapper(flags="-R -v --addr-no-randomize --verbose", own=1),
    "taskset": _wrapper(flags="-a -c --all-tasks --cpu-list", own=1),
    "chrt": _wrapper(flags="-b -f -i -o -r -v --batch --fifo --idle --other --rr", own=1),
    "time": _wrapper("-f --format", "-a -p -v --append --portability --verbose", 0, "-o --output"),
    "nice": _wrapper("-n --adjustment"),
    "ionice": _wrapper("-c -n --class --classdata", "-t --ignore"),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "env": _wrapper(
        "-u --unset", "- -i -0 -v --ignore-environment --null --debug", 0, "", "-C --chdir"
    ),
    "sudo": _wrapper(
        "-u -g -h -p -C -T -R -U -r -t --user --group --prompt --host",
        "-A -b -E -H -k -n -P -S -B --preserve-env --non-interactive --set-home --stdin",
        directories="-D --chdir",
    ),
    "doas": _wrapper("-u -C", "-n"),
    "timeout": _wrapper(
        "-k -s --kill-after --signal", "-v --verbose --foreground --preserve-status", 1
    ),
    "numactl": _wrapper(
        "-N -m -C -p -i -P --cpunodebind --membind --physcpubind --preferred --interleave",
        "-l -a --localalloc --all",
    ),
    "flock": _wrapper(
        "-w -E --timeout --wait --conflict-exit-code",
        "-n -x -e -s -u -o -F -v --nonblock --exclusive --shared --close --no-fork --verbose",
        1,
    ),
    "xargs": _wrapper(
        "-n -I -P -L -d -a -E -s --arg-file --delimiter --max-args --max-lines --max-procs",
        "-0 -r -t -x -p -o --null --no-run-if-empty --verbose --exit --open-tty",
    ),
    "srun": _wrapper(
        "-n -N -c -p -A -t -J -w -x --ntasks --nodes --cpus-per-task --partition --account --time "
        "--job-name --nodelist --exclude --ntasks-per-node --export --gres --mem --cpu-bind --mpi",
        "-l -u -O -s -K -k -Q -v --label --unbuffered --overlap --exclusive --quiet --exact",
        0,
        "-o -e --output --error",
        "-D --chdir",
    ),
}


class _Unwrapped(Struct):
    """Command without the wrappers in front of it."""

    words: list[str]
    assignments: list[str] = []
    """Assignments of `env` and `sudo` for the command."""
    own_words: list[str] = []
    """Words of the wrappers that may name files to read."""
    written: list[str] = []
    """Files that the wrappers write."""
    directories: list[str] = []
    """Directories that the wrappers enter, in order."""
    opaque: list[str] = []
    """Wrappers that were not understood."""


def _unwrapped(words: Sequence[str]) -> _Unwrapped:
    """Return the command behind `sudo`, `timeout` and their like."""
    found = _Unwrapped(list(words))
    rest = found.words
    while rest:
        name = base_name(rest[0])
        wrapper = WRAPPERS.get(name)
        if wrapper is None or (name == "command" and rest[1:2] in (["-v"], ["-V"])):
            break
        if name == "xargs":
            found.opaque.append(name)  # a program that turns its input into words
        del rest[0]
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if option == "--":
                break
            name_of_option, value = _option(option, wrapper)
            if name_of_option is None:
                found.opaque.append(f"{name} {option.partition('=')[0]}")
                found.own_words.append(option)
            elif name_of_option in wrapper.values:
                if value is None:
                    value = rest.pop(0) if rest else ""
                if name_of_option in wrapper.directories:
                    found.directories.append(value)
                elif name_of_option in wrapper.written:
                    found.written.append(value)
                else:
                    found.own_words.append(value)
        found.written += rest[: wrapper.own_count]
        del rest[: wrapper.own_count]
        while name in ("env", "sudo", "doas") and rest and ASSIGNMENT.match(rest[0]):
            found.assignments.append(rest.pop(0))
    return found


def _option(word: str, wrapper: Wrapper) -> tuple[str | None, str | None]:
    """Return (option, value in the same word); (None, None) for an unknown option."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        is_known = name in wrapper.values or name in wrapper.flags
        return (name, value if equals else None) if is_known else (None, None)
    if word[1:].isdigit() or word in wrapper.flags:  # of nice
        return word, None
    for i in range(1, len(word)):
        option = f"-{word[i]}"
        if option in wrapper.values:
            return option, word[i + 1 :] or None
        if option not in wrapper.flags:
            return None, None
    return word, None


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Programs whose words name no file that is read.
_READS_NOTHING = _set("""
    mkdir rm rmdir touch chmod chown chgrp truncate sync echo printf true false : exit return unset
    umask ulimit wait shift exec which type hash sleep date id whoami uname dirname basename mktemp
    nproc deactivate hostname shopt export local readonly declare typeset read tee pwd command
    let break continue
    """)
# Programs that show the state of the machine; if their output is used, their input is unknown.
_STATE_PROGRAMS = _set(
    "ls du df stat ps free uptime tty file jobs readlink realpath printenv groups"
)
_CHECKSUMS = "md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum cksum"
# Programs that read the files among their words, and the options that make them read others.
_READERS: dict[str, str] = {
    **dict.fromkeys(_set("cat head tac nl cut tr paste join comm cmp fold fmt expand"), ""),
    **dict.fromkeys(_set("base64 od xxd hexdump strings rev column zcat bzcat xzcat"), ""),
    **dict.fromkeys(_set(_CHECKSUMS), "-c --check"),
    **dict.fromkeys(("grep", "egrep", "fgrep"), "-r -R -d --recursive --dereference-recursive"),
    "tail": "-f -F --follow --retry",
    "sort": "-o -T --output --files0-from --compress-program --temporary-directory",
    "wc": "--files0-from",
    "diff": "--to-file --from-file",
    "set": "",
}
# Letters of options with a value, behind which no further letter is an option.
_LETTER_VALUES = {
    "grep": "eABCfm",
    "egrep": "eABCfm",
    "fgrep": "eABCfm",
    "head": "nc",
    "tail": "nc",
}
_FILE_TESTS = _set("-e -f -d -r -w -x -s -L -h -b -c -p -S -a")
_TEST_OPERATORS = _set(
    "-n -z = == != =~ -eq -ne -lt -le -gt -ge ! -o && || ( ) < > -v [ [[ ] ]] -t -k -u -g"
)
_TAR_RUNS = ("-T", "--files-from", "-I", "--use-compress-program", "--to-command", "--checkpoint")
# Commands of sed that use only the stream: "1d", "/x/,$p", "s/a/b/g".
_ADDRESS = r"(?:\d+|\$|/(?:[^/\\]|\\.)*/)"
_SED_COMMAND = re.compile(
    rf"(?:{_ADDRESS}(?:,{_ADDRESS})?)?\s*!?\s*"
    r"(?:[dDpPqQ=]|s([/|,#:@])(?:(?!\1)[^\\]|\\.)*\1(?:(?!\1)[^\\;]|\\.)*\1[gpiI\d]*)",
    re.DOTALL,
)
# Limit for the options in one word, such as "-xzf".
_LETTERS_MAX = 6
# Options in one word with "-t", the target folder, such as "cp -at".
_COPY_LETTERS = re.compile(r"-([abcdfilnprsuvxCDHLPRTZ]+)(t.*)", re.DOTALL)
# Options of unknown programs, and names of files, which show that a file is written.
_WRITTEN_OPTION = re.compile(r"--?\w*-?(o|out|output|log|logs|logfile|report|trace)(-\w+)?")
_WRITTEN_NAME = re.compile(r".*\.(log|out|err|pid|lock)")
_LOCK_FILE = re.compile(
    r".*(requirements|conda|poetry|pdm|uv|versions?|package).*\.lock", re.IGNORECASE
)


def _option_values(words: Sequence[str], options: Set[str]) -> list[str]:
    """Return the values of `options`, given as "-r x", "-rx" or "--requirement=x"."""
    values = []
    for i, word in enumerate(words):
        if word in options:
            if i + 1 < len(words):
                values.append(words[i + 1])
        elif word.startswith("--") and "=" in word:
            option, _, value = word.partition("=")
            if option in options:
                values.append(value)
        elif len(word) > 2 and word[0] == "-" and word[1] != "-" and word[:2] in options:
            values.append(word[2:])
    return values


def _positional(words: Sequence[str], value_options: Set[str]) -> list[str]:
    """Return the words that are neither options nor values of `value_options`."""
    found = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in value_options
        else:
            found.append(word)
    return found


def _named_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words, and parts of words, that may name a file.

    Parts are the "x" of "--file=x", "-fx", "if=x" and "@x".
    """
    found: list[str] = []
    for word in words:
        if word.startswith("-") and "=" not in word:
            found += _glued_values(word)
            continue
        value = word.partition("=")[2]
        found += [] if word.startswith("-") else [word]
        for text in (word, value):
            found += [text.lstrip("@")] if text.startswith("@") else []
        if value:
            found += [value, *(value.split() if " " in value else ())]
    return tuple(
        dict.fromkeys(one for one in found if one and one not in (".", "..", "/", COMPUTED))
    )


def _glued_values(word: str) -> list[str]:
    """Return possible values of an option in one word: "-fx", or "-qrx" with letters before it."""
    letters = re.match(rf"-[A-Za-z]{{1,{_LETTERS_MAX}}}", word)
    return [word[at:] for at in range(2, letters.end() + 1) if word[at:]] if letters else []


def _hints_of_file_tool(tool: str, words: Sequence[str], *, shows: bool = True) -> Hints | None:
    """Return the hints of a program in the tables; None for other programs.

    `shows`: whether the program's output is only shown.
    """
    computed = any(COMPUTED in word for word in words)
    if tool in _READS_NOTHING:
        return Hints()
    if tool in _STATE_PROGRAMS:
        return Hints() if shows else None
    if tool in ("test", "[", "[["):
        return _hints_of_test(tool, words)
    if tool in _READERS:
        if _has_option(words, _READERS[tool].split(), _LETTER_VALUES.get(tool, "")) or computed:
            return None
        return Hints(words=_named_words(words))
    if tool == "uniq":
        plain = _positional(words, {"-f", "-s", "-w"})
        return None if computed else Hints(words=tuple(plain[:1]))
    if tool in ("cp", "mv", "ln", "install"):
        return None if computed else _hints_of_copy(tool, words)
    if tool == "unzip":
        plain = _positional(words, {"-d", "-x"})
        archives = (plain[0], f"{plain[0]}.zip") if plain else ()
        return None if computed else Hints(files=archives, words=_named_words(words))
    if tool == "tar":
        runs = any(one.startswith(_TAR_RUNS) for one in words)
        return None if computed or runs else _hints_of_tar(words)
    if tool == "sed":
        return None if computed else _hints_of_sed(words)
    return None


def _hints_of_unknown(program: str, words: Sequence[str]) -> Hints:
    """Return the hints of a program that Bootseer does not know.

    The meaning of its words is unknown, but it may be a script of a shell, and each word that names
    a file may be read.
    """
    read: list[str] = []
    is_written = False
    for word in words:
        option = word.partition("=")[0]
        if not (is_written and not word.startswith("-")) and not _WRITTEN_OPTION.fullmatch(option):
            read.append(word)
        is_written = word.startswith("-") and bool(_WRITTEN_OPTION.fullmatch(word))
    found = tuple(
        one
        for one in _named_words(read)
        if not _WRITTEN_NAME.fullmatch(one) or _LOCK_FILE.fullmatch(one)
    )
    files = (program,) if "/" in program and not has_marks(program) else ()
    return Hints(files=files, programs=(program,), words=found)


def _made_by(tool: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the files that a program in the tables makes or replaces."""
    if tool == "tee":
        return (
            tuple(_positional(words, set())) if not {"-a", "--append"}.intersection(words) else ()
        )
    words = _split_copy_options(words)
    if tool in ("cp", "mv", "ln", "install") and not _option_values(
        words, {"-t", "--target-directory"}
    ):
        *sources, last = _positional(words, {"-S", "-m", "-o", "-g"}) or [""]
        return (last,) if len(sources) == 1 else ()
    return ()


def _has_option(words: Sequence[str], options: Sequence[str], letter_values: str) -> bool:
    """Return whether a word gives one of `options`.

    `letter_values`: letters of options whose value may follow in the same word.
    """
    letters = {option[1] for option in options if len(option) == 2}
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            # An option may be abbreviated.
            if len(name) > 2 and any(one.startswith(name) for one in options):
                return True
        elif word.startswith("-"):
            for letter in word[1:]:
                if letter in letters:
                    return True
                if letter in letter_values:
                    break
    return False


def _hints_of_test(tool: str, words: Sequence[str]) -> Hints | None:
    """Return the hints of `test -f FILE`: the existence of a file decides."""
    tested: list[str] = []
    for i, word in enumerate(words):
        if word in _FILE_TESTS:
            if i + 1 < len(words) and words[i + 1] not in ("]", "]]"):
                tested.append(words[i + 1])
        elif (
            word.startswith("-")
            and word not in _TEST_OPERATORS
            and not (i and words[i - 1] in _TEST_OPERATORS)
        ):
            return None
    if any(COMPUTED in word for word in tested):
        return None
    return Hints(tested=tuple(tested))


def _hints_of_copy(tool: str, words: Sequence[str]) -> Hints | None:
    """Return the hints of `cp SOURCE... TARGET`: the sources are read."""
    words = _split_copy_options(words)
    if tool == "install" and {"-d", "--directory"}.intersection(words):
        return Hints()
    values = {"-t", "--target-directory", "-S", "--suffix"}
    values |= {"-m", "-o", "-g", "--mode", "--owner", "--group"} if tool == "install" else set()
    plain = _positional(words, values)
    has_target = bool(_option_values(words, {"-t", "--target-directory"}))
    if not has_target and len(plain) == 1:
        return None  # a pattern, such as "x{,.bak}"
    sources = tuple(plain if has_target else plain[:-1])
    return Hints(words=sources) if tool == "ln" else Hints(files=sources)


def _split_copy_options(words: Sequence[str]) -> list[str]:
    """Return the words of `cp` and similar programs with "-at" as "-a -t"."""
    found: list[str] = []
    for word in words:
        match = _COPY_LETTERS.fullmatch(word)
        found += [f"-{match[1]}", f"-{match[2]}"] if match else [word]
    return found


def _hints_of_tar(words: Sequence[str]) -> Hints:
    """Return the hints of tar: `tar -xf FILE` reads one file; otherwise files are packed."""
    first = words[0] if words else ""
    extracts = "x" in first.lstrip("-") and not first.startswith("--")
    if extracts or {"-x", "--extract", "--get"}.intersection(words):
        return Hints(words=tuple(one for one in _named_words(words) if one != first))
    plain = _positional(words[1:], {"-f", "--file", "-C", "--directory"})
    return Hints(files=tuple(plain[1:] if "f" in first and not first.startswith("--") else plain))


def _hints_of_sed(words: Sequence[str]) -> Hints | None:
    """Return the hints of `sed 1d FILE`; None for a script that uses more than the stream."""
    scripts = _option_values(words, {"-e", "--expression"})
    plain = _positional(words, {"-e", "--expression", "-f", "--file", "-l"})
    if _option_values(words, {"-f", "--file"}):
        return None
    if not scripts:
        scripts, plain = plain[:1], plain[1:]
    for script in scripts:
        at = 0
        while at < len(script):
            match = _SED_COMMAND.match(script, at)
            if match is None:
                return None
            at = match.end()
            while at < len(script) and script[at] in "; \n\t":
                at += 1
    return Hints(words=tuple(plain))


PIP = re.compile(r"pip(\d+(\.\d+)?)?")
# Options of pip, uv, conda and others whose value is a file that decides what is installed.
_FILE_OPTIONS = _set("""
    -r --requirement --requirements -c --constraint --constraints --build-constraint --override -f
    --file -e --editable
    """)
_REQUIREMENT_OPTIONS = {"-r", "--requirement", "--requirements"}
_LINKS_OPTIONS = {"-f", "--find-links"}
# Options of `pip install` whose value is no requirement.
_PIP_VALUE_OPTIONS = _set("""
    -i --index-url --extra-index-url --cache-dir --log --python -p --root --src --platform
    --python-version --implementation --abi --timeout --retries --proxy --trusted-host --cert
    --report --no-binary --only-binary --progress-bar --upgrade-strategy --config-settings -C
    --target -t --prefix --find-links --group
    """)
# Options of `venv` and `virtualenv` that take a value.
_VENV_VALUE_OPTIONS = {"--prompt", "-p", "--python", "--upgrade-deps", "--app-data", "--seeder"}
# Options of uv and pip that name an interpreter, or its environment.
_PYTHON_OPTIONS = {"-p", "--python"}
# Variables of pip and uv with lists of files, separated by blanks.
FILE_VARIABLES = (
    *("PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"),
    *("UV_CONSTRAINT", "UV_BUILD_CONSTRAINT", "UV_OVERRIDE"),
)
# Tool -> lock file, commands that fill the project's environment, options that name the project.
_PROJECT_TOOLS = {
    "uv": ("uv.lock", {"sync", "add", "remove"}, {"--project", "--directory"}),
    "poetry": (
        "poetry.lock",
        {"install", "sync", "add", "update", "remove"},
        {"-C", "--directory", "-P", "--project"},
    ),
    "pdm": ("pdm.lock", {"install", "sync", "add", "update", "remove"}, {"-p", "--project"}),
}
_LOCKED_VERBS = {"sync", "install"}
_UPGRADE_OPTIONS = {"-U", "--upgrade", "--upgrade-package", "--no-lock"}
_CONDA_VERBS = {"create", "install", "update", "upgrade", "remove", "uninstall", "env"}
_CONDA_READS_NOTHING = {"list", "info", "clean", "search", "compare", "deactivate"}
_ENVIRONMENT_TOOLS = {"venv", "virtualenv", "conda", "mamba", "micromamba"}
_KNOWN_OPTIONS = _FILE_OPTIONS | _PIP_VALUE_OPTIONS | _VENV_VALUE_OPTIONS
# Lists that `conda env` reads by default.
_CONDA_LISTS = ("environment.yml", "environment.yaml")
_PIP_INSTALLS = {"install", "sync"}
_PIP_READS_NOTHING = {"list", "check", "freeze", "show", "cache", "config", "debug", "inspect"}


def _is_local(requirement: str) -> bool:
    return requirement.startswith((".", "/", "file:")) or requirement.endswith((".whl", ".tar.gz"))


def _hints_of_project(tool: str, words: list[str]) -> Hints | None:
    """Return the hints of "uv sync" and similar commands.

    None for a command that does not fill a project's environment.
    """
    lock, verbs, options = _PROJECT_TOOLS[tool]
    if not verbs.intersection(_positional(words[1:], options)[:1]):
        return None
    folder = (_option_values(words, options) or [""])[-1]
    files = tuple(posixpath.join(folder, name) for name in (lock, "pyproject.toml"))
    # Without --no-editable, the environment only refers to the project's folder.
    copied = (folder or ".",) if "--no-editable" in words else ()
    verb, *added = _positional(words[1:], options)
    version = (posixpath.join(folder, ".python-version"),) if tool == "uv" else ()
    is_locked = verb in _LOCKED_VERBS and not _UPGRADE_OPTIONS.intersection(words)
    hints = Hints(
        ("python3",),
        files=(*files, *copied),
        words=(*version, *_named_words(words[1:])),
        link_dirs=tuple(_option_values(words, _LINKS_OPTIONS)) if tool == "uv" else (),
        # A lock file fixes all versions; without one, the project's requirements decide.
        requirements=() if is_locked else (f"what {tool} {verb} asks for", *added),
        lock_files=files[:1] if verb in _LOCKED_VERBS else (),
        tools=("uv",) if tool == "uv" else (),
    )
    if "--active" in words:
        return replace(hints, uses_uv=True)
    # "-g" is the Python on PATH, "--venv" an environment of pdm's own.
    elsewhere = tool == "pdm" and {"-g", "--global", "--venv"}.intersection(words)
    return replace(hints, projects=() if elsewhere else ((tool, folder),))


def _is_package_tool(tool: str) -> bool:
    """Return whether `_hints_of_package_tool` knows a tool."""
    return bool(PIP.fullmatch(tool)) or tool in _ENVIRONMENT_TOOLS


def _hints_of_package_tool(tool: str, program: str, words: list[str]) -> Hints:
    """Return the hints of `tool` with the arguments `words`, in the interpreter of `program`."""
    # Unknown options may name files.
    unknown = [word for word in words if word.startswith("-") and not _is_known(word)]
    # In a word of several letters, a value may follow the last option.
    with_value = _FILE_OPTIONS | _PIP_VALUE_OPTIONS
    unknown += [one for one in words if re.match("-[A-Za-z]{2}", one) and one[:2] not in with_value]
    hints = _hints_of_tool(tool, program, words)
    return replace(hints, words=_named_words(words if hints.opaque else unknown))


def _is_known(option: str) -> bool:
    name = option.partition("=")[0]
    return name in _KNOWN_OPTIONS or (not option.startswith("--") and option[:2] in _KNOWN_OPTIONS)


def _hints_of_tool(tool: str, program: str, words: list[str]) -> Hints:
    if tool in ("venv", "virtualenv"):
        directories = _positional(words, _VENV_VALUE_OPTIONS)
        interpreter = _option_values(words, _PYTHON_OPTIONS) if tool == "virtualenv" else []
        return Hints((interpreter[0] if interpreter else program,), tuple(directories))
    if PIP.fullmatch(tool):
        return _hints_of_pip(tool, program, words)
    return _hints_of_conda(tool, words)


def _hints_of_pip(tool: str, program: str, words: list[str]) -> Hints:
    if not {"install", "sync", "uninstall"}.intersection(words):
        verb = (_positional(words, _PIP_VALUE_OPTIONS) or [""])[0]
        is_closed = not verb or verb in _PIP_READS_NOTHING
        return Hints((program,), opaque=() if is_closed else (f"{tool} {verb}",))
    links = _option_values(words, _LINKS_OPTIONS)
    options = _FILE_OPTIONS - _LINKS_OPTIONS
    skipped = options | _LINKS_OPTIONS | _PIP_VALUE_OPTIONS
    lists = _option_values(words, options - {"-e", "--editable"})
    groups = _option_values(words, {"--group"})
    projects = [one.rpartition(":")[0] or "pyproject.toml" for one in groups]
    indexed = _option_values(words, _REQUIREMENT_OPTIONS)
    named = [*_option_values(words, {"-e", "--editable"}), *_positional(words, skipped)]
    named = [word for word in named if word not in ("install", "sync", "uninstall")]
    if "sync" in words:
        lists, indexed = [*lists, *named], [*indexed, *named]
    asks = bool(_PIP_INSTALLS.intersection(words)) and "--no-index" not in words
    has_deps = "--no-deps" not in words
    asked = [one for one in named if has_deps or not _is_local(one)]
    places = _option_values(words, {"-t", "--target", "--prefix"})
    environments = []
    for python in _option_values(words, _PYTHON_OPTIONS):
        if PYTHON.fullmatch(base_name(python)):
            program = python
        elif "/" in python:
            environments.append(python)
    return Hints(
        python_words=(program,),
        environment_dirs=tuple(environments),
        install_dirs=tuple(places),
        files=tuple(dict.fromkeys((*lists, *named, *projects))),
        link_dirs=tuple(links),
        uses_pip=not places,
        uses_user_site="--user" in words,
        requirement_files=tuple(lists),
        indexed_files=tuple(indexed) if asks else (),
        requirements=(*asked, *groups) if asks and "sync" not in words else (),
        tools=("pip",),
    )


def _hints_of_conda(tool: str, words: list[str]) -> Hints:
    prefixes = _option_values(words, {"-p", "--prefix"})
    changes = bool(_CONDA_VERBS.intersection(words[:1]))
    # A new environment without -p has a name, on the command line or in environment.yml.
    is_named = bool(_option_values(words, {"-n", "--name"})) or "create" in words[:2]
    verbs = [word for word in words if not word.startswith("-")][:1]
    opaque = " ".join((tool, *verbs))
    lists = _option_values(words, {"-f", "--file"})
    if not lists and {"create", "update"}.intersection(words[1:2]) and words[0] == "env":
        lists = list(_CONDA_LISTS)
    options = _FILE_OPTIONS | {"-p", "--prefix", "-n", "--name", "-c", "--channel"}
    specs = [one for one in _positional(words, options) if one not in _CONDA_VERBS]
    return Hints(
        environment_dirs=tuple(prefixes),
        files=tuple(dict.fromkeys((*_option_values(words, _FILE_OPTIONS), *lists))),
        requirements=tuple(specs) if changes and "--offline" not in words else (),
        spec_files=tuple(lists) if changes and "--offline" not in words else (),
        opaque=() if changes or _CONDA_READS_NOTHING.intersection(verbs) else (opaque,),
        tools=("conda",),
        uses_conda=changes and not prefixes and not is_named,
        names_conda_environment=changes and not prefixes and is_named,
    )
