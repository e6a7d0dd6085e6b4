"""What a set-up command says about itself: input files, directories, and what it leaves open.

Reads the words of a command line, runs and opens nothing. What it finds are hints: `setup.inputs`
and `setup.targets` check them against the file system, and what they use of them is told to the
user. A closed list of forms is understood. Everything else is named in `Hints.opaque`, since
nobody knows what it reads; it is never an error. Pure.
"""

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.snapshots.setup.reading.file_tools import (
    hints_of_file_tool,
    hints_of_unknown,
    made_by,
    named_words,
    option_values,
    positional,
)
from bootseer.snapshots.setup.reading.hints import Hints, merged, moved_to
from bootseer.snapshots.setup.reading.lexer import (
    COMPUTED,
    Token,
    as_text,
    has_marks,
    marks,
    variable,
)
from bootseer.snapshots.setup.reading.tools import (
    FILE_VARIABLES,
    PROJECT_TOOLS,
    PYTHON,
    PYTHON_OPTIONS,
    VENV_VALUE_OPTIONS,
    hints_of_project,
    hints_of_tool,
    is_package_tool,
)
from bootseer.snapshots.setup.reading.words import (
    ASSIGNMENT,
    SHELLS,
    Block,
    Simple,
    base_name,
    parse,
    read_shell,
)
from bootseer.snapshots.setup.reading.wrappers import unwrapped

# Modules of Python that read what they are given, at most.
_OWN_MODULES = {"venv", "virtualenv", "ensurepip", "compileall", "site", "sysconfig"}
# Variables of the shell for its working directory: paths are relative to that here.
_OWN_FOLDERS = {"PWD": ".", "OLDPWD": COMPUTED}
_DECLARE = {"export", "local", "declare", "readonly", "typeset"}
# Variables that decide which programs run, or what these load.
_SEARCH_VARIABLES = {
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "BASH_ENV", "ENV", "IFS"),
    *("HOME", "CDPATH", "PWD"),
}
_NOTHING = Hints()
_DEPTH_MAX = 8
_COMMANDS_MAX = 5000
_PATH_MAX = 4096
_SPREAD_MAX = 8
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def hints_of(command: Sequence[str]) -> Hints:
    """What `command` says about what it reads and writes. Pure."""
    reader = _Reader()
    if any(has_marks(word) for word in command):
        reader.opaque("a word with control characters")
    else:
        reader.run(list(command), Simple())
    return reader.hints


def hints_of_script(text: str) -> Hints:
    """What a shell script says. Pure."""
    reader = _Reader()
    reader.script(text)
    return reader.hints


class _State(Struct):
    """What holds at a place in a script."""

    directory: str = ""
    bound: set[str] = field(default_factory=set)
    """Variables that the script has set for certain."""
    made: set[str] = field(default_factory=set)
    """Files that the script has made for certain, whatever was there before."""

    def copy(self) -> "_State":
        """Return a copy that changes by itself."""
        return _State(self.directory, set(self.bound), set(self.made))


class _Reader:
    """Goes through a script in its order."""

    def __init__(self, parent: "_Reader | None" = None) -> None:
        self._found: list[Hints] = []
        self._depth: int = parent._depth + 1 if parent else 0
        self._state: _State = parent._state.copy() if parent else _State()
        self._assigned: dict[str, list[str]] = dict(parent._assigned) if parent else {}
        self._functions: set[str] = set(parent._functions) if parent else set()
        self._folders: list[str] = list(parent._folders) if parent else []

    @property
    def hints(self) -> Hints:
        """All that was found."""
        return merged(*self._found)

    def add(self, hints: Hints) -> None:
        """Add hints of a command that runs in the present directory."""
        if hints != _NOTHING:
            self._found.append(hints)

    def opaque(self, what: str) -> None:
        """Add something that was not understood."""
        self.add(Hints(opaque=(what,)))

    def script(self, text: str, *, is_output_used: bool = False) -> None:
        """Go through the text of a script."""
        if self._depth > _DEPTH_MAX:
            self.opaque("a script in a script in a script")
            return
        found = parse(text)
        if found.odd:
            self.opaque(found.odd)
        if len(found.events) > _COMMANDS_MAX:
            self.opaque("a very long shell script")
            return
        self._collect(found.events)
        stack: list[tuple[Block, _State]] = []
        is_function = False
        chain = self._state.copy()  # after the first pipeline of a list of "&&" and "||"
        is_certain = True
        for event in found.events:
            if isinstance(event, Simple):
                event.is_output_used |= is_output_used
                if not event.joined and not event.is_piped:
                    self._end_chain(chain)
                    is_certain = True
                is_certain = is_certain and not event.joined
                before = self._state.copy()
                self._simple(event)
                if event.joined == "||":
                    before.directory = self._state.directory
                    self._state = before
                elif is_certain:
                    chain = self._state.copy()
                continue
            self._end_chain(chain)
            if event.kind == "function":
                is_function = True
            elif event.kind in ("begin", "list"):
                kind = Block("begin", event.name) if is_function else event
                is_function = False
                stack.append((kind, self._state.copy()))
            elif event.kind == "branch" and stack:
                self._leave(stack[-1][1])
                self._state = stack[-1][1].copy()
            elif event.kind == "end" and stack:
                block, before = stack.pop()
                if block.kind == "begin":
                    self._leave(before)
                    self._state = before
                elif block.name == ")":
                    self._state = replace(before, made=self._state.made)
            elif event.kind == "for":
                self._state.bound.add(event.name)
                for token in event.values or ():
                    self._inner(token)
                    self.add(
                        moved_to(Hints(words=named_words(self._spread(token))), self._directory)
                    )
            chain = self._state.copy()

    @property
    def _directory(self) -> str:
        return self._state.directory

    def _end_chain(self, first: _State) -> None:
        """End a list of `&&` and `||`: what only its later commands did is not certain."""
        self._state = _State(self._state.directory, set(first.bound), set(first.made))

    def _leave(self, before: _State) -> None:
        """Leave a block that may not have run."""
        if self._state.directory != before.directory:
            self.opaque("a cd that may not happen")

    def _collect(self, events: Iterable[Simple | Block]) -> None:
        """Note all values that the script's variables take, and the names of its functions."""
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
            for text in (*(token.text for token in event.assignments), *_set_by(words)):
                if match := ASSIGNMENT.match(text):
                    is_whole = match[0] == f"{match[1]}="
                    value = text[match.end() :] if is_whole else COMPUTED
                    self._assigned.setdefault(match[1], []).append(value)

    def _simple(self, event: Simple) -> None:
        for token in event.tokens():
            self._inner(token)
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
        self._note(Hints(words=named_words([t.text for t in event.others if not t.scripts])))
        lists = [self._spread(token) for token in event.words]
        count = 1
        for values in lists:
            count *= len(values)
        if words and count <= _SPREAD_MAX:
            for combination in product(*lists):
                self.run(list(combination), event)
        elif words:
            self._note(Hints(words=named_words([one for values in lists for one in values])))
            self.run([one[0] if len(one) == 1 else COMPUTED for one in lists], event)
        if not words:
            self._bind(match[1] for text in assignments if (match := ASSIGNMENT.match(text)))
        else:
            self._bind(match[1] for text in _set_by(words) if (match := ASSIGNMENT.match(text)))
        for token in event.writes:
            for path in self._spread(token):
                self._made(path)

    def _bind(self, names: Iterable[str]) -> None:
        self._state.bound.update(names)

    def _made(self, path: str) -> None:
        if not path.startswith("/dev/") and COMPUTED not in path:
            self._state.made.add(_place(self._directory, path))

    def _inner(self, token: Token) -> None:
        """Go through the scripts in a word, and note the variables that come from outside."""
        free = [name for name in token.variables if name not in self._state.bound]
        self.add(Hints(variables=tuple(free)))
        for text in token.scripts:
            inner = _Reader(self)
            inner.script(text, is_output_used=True)
            self.add(inner.hints)

    def _spread(self, token: Token) -> list[str]:
        """Return all values that a word may have, as far as the script tells."""
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
                self._note(Hints(words=named_words(words)))
        if name in _SEARCH_VARIABLES and not self._is_search_path(values, name):
            self.opaque(name)

    def _is_search_path(self, values: Sequence[str], name: str) -> bool:
        """Return whether a value adds nothing but folders of environments that are made here."""
        made = {f"{one}/bin" for found in self._found for one in found.environment_dirs}
        parts = {part for value in values for part in value.split(":")}
        return name == "PATH" and parts <= made | {variable(name)}

    def _note(self, hints: Hints) -> None:
        """Add hints whose paths may be made by the script itself."""
        directory = self._directory
        made = self._state.made
        if made:
            is_made = {
                name
                for name in (*hints.files, *hints.words, *hints.scripts, *hints.programs)
                if _place(directory, name) in made
            }
            if is_made:
                known = {
                    *hints.requirement_files,
                    *hints.scripts,
                    *hints.programs,
                    *hints.spec_files,
                }
                hints = replace(
                    hints,
                    files=_without(hints.files, is_made),
                    words=_without(hints.words, is_made),
                    scripts=_without(hints.scripts, is_made),
                    programs=_without(hints.programs, is_made),
                    requirement_files=_without(hints.requirement_files, is_made),
                    indexed_files=_without(hints.indexed_files, is_made),
                    folders=tuple(one for one in hints.files if one in is_made),
                    opaque=(*hints.opaque, *sorted(known & is_made)),
                )
        hints = moved_to(hints, directory)
        for folder in self._folders:
            hints = moved_to(hints, folder)
        self.add(hints)

    def run(self, words: list[str], event: Simple) -> None:
        """Go through one command, behind the wrappers in front of it."""
        outer = unwrapped(words)
        program_words = list(outer.words)
        for text in outer.assignments:
            self._assign(text)
        self._note(Hints(words=named_words(outer.own_words), opaque=outer.opaque))
        self._folders += outer.directories
        if any(COMPUTED in one for one in outer.directories):
            self.opaque("a directory that the shell computes")
        if program_words:
            self._command(program_words, event, is_wrapped=program_words != words)
        if outer.directories:
            del self._folders[-len(outer.directories) :]
        if outer.written:
            for path in outer.written:
                self._state.made.add(_place(self._directory, path))

    def _command(self, words: list[str], event: Simple, *, is_wrapped: bool) -> None:
        program = base_name(words[0])
        if program in ("cd", "pushd", "popd") and not is_wrapped:
            self._change_directory(words, event)
            return
        if program in self._functions:
            self._note(Hints(words=named_words(words[1:])))
            return
        script = _script_in(program, words)
        if script is not None:
            if program in SHELLS:
                self._note(Hints(words=named_words(read_shell(words).arguments)))
            if COMPUTED in script:
                self.opaque(f"{program} of what the shell computes")
            inner = _Reader(self)
            inner.script(as_text(script), is_output_used=event.is_output_used)
            self.add(inner.hints)
            return
        hints = _hints_of_simple(words, shows=not event.is_output_used)
        self._note(hints)
        for path in made_by(program, words[1:]):
            self._made(path)

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
    """The text of a script among the words of a command."""
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


def _set_by(words: Sequence[str]) -> Iterator[str]:
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
        return Hints(opaque=(as_text(words[0]),), words=named_words(words[1:]))
    if program in (".", "source"):
        return _hints_of_source(words)
    if program in SHELLS:
        shell = read_shell(words)
        named = named_words(shell.arguments)
        if shell.file and COMPUTED not in shell.file and not shell.file.startswith(_STREAMS):
            return Hints(files=(shell.file,), scripts=(shell.file,), words=named)
        return Hints(opaque=(program,), words=named)
    if PYTHON.fullmatch(program):
        return _hints_of_python(program, words)
    hints = _hints_of_packages(program, words)
    if hints is None:
        hints = hints_of_file_tool(program, words[1:], shows=shows)
        if hints is None:
            hints = hints_of_unknown(words[0], words[1:])
        return hints
    return _checked(hints, program, words)


def _checked(hints: Hints, program: str, words: Sequence[str]) -> Hints:
    """Hints of a tool that installs, without what only a shell can tell."""
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
    named = named_words(words[2:])
    if COMPUTED in file or file.startswith(_STREAMS):
        return Hints(opaque=("a script that the shell computes",), words=named)
    if rest == "activate" and directory:
        return Hints(environment_dirs=(directory,))
    return Hints(files=(file,), scripts=(file,), words=named) if file else Hints()


def _hints_of_python(program: str, words: Sequence[str]) -> Hints:
    module = _module(words)
    if module is None:
        script_words = tuple(positional(words[1:], {"-W", "-X", "-c"})[:1])
        is_asked = {"-V", "--version"}.intersection(words)
        shown = [base_name(as_text(one)) for one in script_words]
        what = f"{program} -c" if "-c" in words else " ".join((program, *shown))
        files = tuple(one for one in script_words if COMPUTED not in one and "-c" not in words)
        read = hints_of_unknown(program, words[1:]).words
        return Hints((words[0],), files=files, words=read, opaque=() if is_asked else (what,))
    name, rest_words = module
    hints = hints_of_tool(name, words[0], rest_words) if is_package_tool(name) else None
    if hints is None:
        is_known = name in _OWN_MODULES
        named = named_words(rest_words)
        return Hints((words[0],), words=named, opaque=() if is_known else (f"{program} -m {name}",))
    return _checked(hints, name, words)


def _hints_of_packages(program: str, words: Sequence[str]) -> Hints | None:
    """The hints of a tool that makes or fills an environment; None for any other program."""
    if program in PROJECT_TOOLS and (hints_or_none := hints_of_project(program, list(words))):
        return hints_or_none
    if program == "uv" and len(words) > 1 and words[1] in ("pip", "venv"):
        if words[1] == "venv":
            directories = positional(words[2:], VENV_VALUE_OPTIONS) or [".venv"]
            return Hints(("python3",), (directories[0],), tools=("uv",))
        hints = hints_of_tool("pip", "python3", list(words[2:]))
        # Told which interpreter, it does not look for an active environment.
        is_told = "--system" in words or bool(option_values(words, PYTHON_OPTIONS))
        return replace(hints, uses_uv=not is_told, tools=("uv",))
    if program in PROJECT_TOOLS and words[1:2] == ["run"] and len(words) > 2:
        inner = _hints_of_simple(words[2:], shows=False)
        # It brings the project's environment up to date before.
        opaque = (*inner.opaque, f"{program} run")
        return replace(inner, tools=("uv",) if program == "uv" else (), opaque=opaque)
    return hints_of_tool(program, words[0], list(words[1:])) if is_package_tool(program) else None


def _module(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """("pip", arguments) of "python -I -m pip ..."; None where a script is run."""
    for i, word in enumerate(words[1:], 1):
        if word == "-m":
            return (words[i + 1], list(words[i + 2 :])) if i + 1 < len(words) else None
        if not word.startswith("-") or word == "-c":
            return None
    return None
