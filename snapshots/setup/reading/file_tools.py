"""Words of the programs that handle files: which they read, which they write. Pure (no I/O).

A closed list: of a program or an option that is not in these tables nobody knows what it reads.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from bootseer.snapshots.setup.reading.hints import Hints
from bootseer.snapshots.setup.reading.lexer import COMPUTED, has_marks


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Programs whose words name nothing that they read.
_READS_NOTHING = _set("""
    mkdir rm rmdir touch chmod chown chgrp truncate sync echo printf true false : exit return unset
    umask ulimit wait shift exec which type hash sleep date id whoami uname dirname basename mktemp
    nproc deactivate hostname shopt export local readonly declare typeset read tee pwd command
    let break continue
    """)
# Programs that show what is there: nobody knows what, where something reads it.
_SHOWS = _set("ls du df stat ps free uptime tty file jobs readlink realpath printenv groups")
_CHECKSUMS = "md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum cksum"
# Programs that read files among their words, and the options with which they read others, too.
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
# Options of `grep` and the like that take a value, so that letters behind them are no options.
_LETTER_VALUES = {
    "grep": "eABCfm",
    "egrep": "eABCfm",
    "fgrep": "eABCfm",
    "head": "nc",
    "tail": "nc",
}
_TEST_FILES = _set("-e -f -d -r -w -x -s -L -h -b -c -p -S -a")
_TESTS = _set(
    "-n -z = == != =~ -eq -ne -lt -le -gt -ge ! -o && || ( ) < > -v [ [[ ] ]] -t -k -u -g"
)
_TAR_RUNS = ("-T", "--files-from", "-I", "--use-compress-program", "--to-command", "--checkpoint")
# Commands of sed that read and write nothing but the stream: "1d", "/x/,$p", "s/a/b/g".
_ADDRESS = r"(?:\d+|\$|/(?:[^/\\]|\\.)*/)"
_SED_COMMAND = re.compile(
    rf"(?:{_ADDRESS}(?:,{_ADDRESS})?)?\s*!?\s*"
    r"(?:[dDpPqQ=]|s([/|,#:@])(?:(?!\1)[^\\]|\\.)*\1(?:(?!\1)[^\\;]|\\.)*\1[gpiI\d]*)",
    re.DOTALL,
)
# So many options are looked at in one word, as in "-xzf".
_LETTERS_MAX = 6
# In front of "t", the folder that is copied to, as in "cp -at".
_COPY_LETTERS = re.compile(r"-([abcdfilnprsuvxCDHLPRTZ]+)(t.*)", re.DOTALL)
# Options of programs that nobody knows, and names of files, that tell that a file is written.
_WRITTEN_OPTION = re.compile(r"--?\w*-?(o|out|output|log|logs|logfile|report|trace)(-\w+)?")
_WRITTEN_NAME = re.compile(r".*\.(log|out|err|pid|lock)")
_LOCK_FILE = re.compile(
    r".*(requirements|conda|poetry|pdm|uv|versions?|package).*\.lock", re.IGNORECASE
)


class _Words(Struct, frozen=True):
    """Words that are no options, and the values of options, as (option, value)."""

    plain: tuple[str, ...]
    values: tuple[tuple[str, str], ...]


def option_values(words: Sequence[str], options: set[str]) -> list[str]:
    """The values of `options`, given as "-r x", "-rx" or "--requirement=x"."""
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


def positional(words: Sequence[str], value_options: set[str]) -> list[str]:
    """The words that are no options and no values of `value_options`."""
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


def named_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words, and parts of words, that may name a file: also "x" of "--file=x", "-fx",
    "if=x" and "@x"."""
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
    """What may be the value of an option in "-fx", and in "-qrx", where letters come before it."""
    letters = re.match(rf"-[A-Za-z]{{1,{_LETTERS_MAX}}}", word)
    return [word[at:] for at in range(2, letters.end() + 1) if word[at:]] if letters else []


def hints_of_file_tool(tool: str, words: Sequence[str], *, shows: bool = True) -> Hints | None:
    """Return the hints of a program of the tables; None for any other. `shows`: its output goes to
    people."""
    computed = any(COMPUTED in word for word in words)
    if tool in _READS_NOTHING:
        return Hints()
    if tool in _SHOWS:
        return Hints() if shows else None
    if tool in ("test", "[", "[["):
        return _hints_of_test(tool, words)
    if tool in _READERS:
        if _has_option(words, _READERS[tool].split(), _LETTER_VALUES.get(tool, "")) or computed:
            return None
        return Hints(words=named_words(words))
    if tool == "uniq":
        plain = positional(words, {"-f", "-s", "-w"})
        return None if computed else Hints(words=tuple(plain[:1]))
    if tool in ("cp", "mv", "ln", "install"):
        return None if computed else _hints_of_copy(tool, words)
    if tool == "unzip":
        plain = positional(words, {"-d", "-x"})
        archives = (plain[0], f"{plain[0]}.zip") if plain else ()
        return None if computed else Hints(files=archives, words=named_words(words))
    if tool == "tar":
        runs = any(one.startswith(_TAR_RUNS) for one in words)
        return None if computed or runs else _hints_of_tar(words)
    if tool == "sed":
        return None if computed else _hints_of_sed(words)
    return None


def hints_of_unknown(program: str, words: Sequence[str]) -> Hints:
    """Return the hints of a program of the user's. What its words mean is unknown, but it may be a
    script of a shell, and each word that names a file may be read."""
    read: list[str] = []
    is_written = False
    for word in words:
        option = word.partition("=")[0]
        if not (is_written and not word.startswith("-")) and not _WRITTEN_OPTION.fullmatch(option):
            read.append(word)
        is_written = word.startswith("-") and bool(_WRITTEN_OPTION.fullmatch(word))
    found = tuple(
        one
        for one in named_words(read)
        if not _WRITTEN_NAME.fullmatch(one) or _LOCK_FILE.fullmatch(one)
    )
    files = (program,) if "/" in program and not has_marks(program) else ()
    return Hints(files=files, programs=(program,), words=found)


def made_by(tool: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the files that a program of the tables makes anew, whatever was there."""
    if tool == "tee":
        return tuple(positional(words, set())) if not {"-a", "--append"}.intersection(words) else ()
    words = _apart(words)
    if tool in ("cp", "mv", "ln", "install") and not option_values(
        words, {"-t", "--target-directory"}
    ):
        *sources, last = positional(words, {"-S", "-m", "-o", "-g"}) or [""]
        return (last,) if len(sources) == 1 else ()
    return ()


def _has_option(words: Sequence[str], options: Sequence[str], letter_values: str) -> bool:
    """Return whether a word gives one of `options`. `letter_values`: letters of options whose value
    may follow in the same word."""
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
    """`test -f FILE`: that a file is there decides."""
    tested: list[str] = []
    for i, word in enumerate(words):
        if word in _TEST_FILES:
            if i + 1 < len(words) and words[i + 1] not in ("]", "]]"):
                tested.append(words[i + 1])
        elif word.startswith("-") and word not in _TESTS and not (i and words[i - 1] in _TESTS):
            return None
    if any(COMPUTED in word for word in tested):
        return None
    return Hints(tested=tuple(tested))


def _hints_of_copy(tool: str, words: Sequence[str]) -> Hints | None:
    """`cp SOURCE... TARGET`: the sources are read."""
    words = _apart(words)
    if tool == "install" and {"-d", "--directory"}.intersection(words):
        return Hints()
    values = {"-t", "--target-directory", "-S", "--suffix"}
    values |= {"-m", "-o", "-g", "--mode", "--owner", "--group"} if tool == "install" else set()
    plain = positional(words, values)
    has_target = bool(option_values(words, {"-t", "--target-directory"}))
    if not has_target and len(plain) == 1:
        return None  # a pattern, such as "x{,.bak}"
    sources = tuple(plain if has_target else plain[:-1])
    return Hints(words=sources) if tool == "ln" else Hints(files=sources)


def _apart(words: Sequence[str]) -> list[str]:
    """Words of `cp` and the like with "-at" as "-a -t"."""
    found: list[str] = []
    for word in words:
        match = _COPY_LETTERS.fullmatch(word)
        found += [f"-{match[1]}", f"-{match[2]}"] if match else [word]
    return found


def _hints_of_tar(words: Sequence[str]) -> Hints:
    """`tar -xf FILE` reads one file; all else that a word names is packed."""
    first = words[0] if words else ""
    extracts = "x" in first.lstrip("-") and not first.startswith("--")
    if extracts or {"-x", "--extract", "--get"}.intersection(words):
        return Hints(words=tuple(one for one in named_words(words) if one != first))
    plain = positional(words[1:], {"-f", "--file", "-C", "--directory"})
    return Hints(files=tuple(plain[1:] if "f" in first and not first.startswith("--") else plain))


def _hints_of_sed(words: Sequence[str]) -> Hints | None:
    """`sed 1d FILE`: only scripts are understood that touch nothing but the stream."""
    scripts = option_values(words, {"-e", "--expression"})
    plain = positional(words, {"-e", "--expression", "-f", "--file", "-l"})
    if option_values(words, {"-f", "--file"}):
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
