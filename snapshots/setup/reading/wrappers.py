"""Programs that run the command behind their own words, such as `sudo` and `timeout`. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from bootseer.snapshots.setup.reading.words import ASSIGNMENT, base_name

_BUILTINS = {"builtin", "nohup", "unbuffer", "catatonit", "command", "exec"}


class _Wrapper(Struct, frozen=True):
    """The options that a wrapper is known to have, without those that run something else."""

    values: frozenset[str] = frozenset()
    """Options that take a value."""
    flags: frozenset[str] = frozenset()
    own_count: int = 0
    """How many words of its own come before the command."""
    written: frozenset[str] = frozenset()
    """Options whose value names a file that is written; "" for its own words."""
    directories: frozenset[str] = frozenset()
    """Options whose value is the directory in which the command runs."""


def _wrapper(
    values: str = "", flags: str = "", own: int = 0, written: str = "", directories: str = ""
) -> _Wrapper:
    return _Wrapper(
        frozenset((*values.split(), *written.split(), *directories.split())),
        frozenset(flags.split()),
        own,
        frozenset((*written.split(), *([""] if own else []))),
        frozenset(directories.split()),
    )


_WRAPPERS = {
    **dict.fromkeys(_BUILTINS - {"exec", "unbuffer"}, _wrapper(flags="-p")),
    "unbuffer": _wrapper(flags="-p"),
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


class Unwrapped(Struct, frozen=True):
    """A command without the wrappers in front of it."""

    words: tuple[str, ...]
    assignments: tuple[str, ...] = ()
    """What `env` and `sudo` set for it."""
    own_words: tuple[str, ...] = ()
    """Words of the wrappers that may name files which they read."""
    written: tuple[str, ...] = ()
    """Files that the wrappers write."""
    directories: tuple[str, ...] = ()
    """The directories that they enter, in this order."""
    opaque: tuple[str, ...] = ()
    """Wrappers that were not understood."""


def unwrapped(words: Sequence[str]) -> Unwrapped:
    """Return the command behind `sudo`, `timeout` and their like."""
    rest = list(words)
    assignments: list[str] = []
    own: list[str] = []
    written: list[str] = []
    directories: list[str] = []
    opaque: list[str] = []
    while rest:
        name = base_name(rest[0])
        wrapper = _WRAPPERS.get(name)
        if wrapper is None or (name == "command" and rest[1:2] in (["-v"], ["-V"])):
            break
        if name == "xargs":
            opaque.append(name)  # its input becomes words
        rest = rest[1:]
        while rest and rest[0].startswith("-"):
            option, rest = rest[0], rest[1:]
            if option == "--":
                break
            name_of_option, value = _option(option, wrapper)
            if name_of_option is None:
                opaque.append(f"{name} {option.partition('=')[0]}")
                own.append(option)
            elif name_of_option in wrapper.values:
                if value is None:
                    value, rest = (rest[0], rest[1:]) if rest else ("", rest)
                if name_of_option in wrapper.directories:
                    directories.append(value)
                else:
                    (written if name_of_option in wrapper.written else own).append(value)
        written += rest[: wrapper.own_count]
        rest = rest[wrapper.own_count :]
        while name in ("env", "sudo", "doas") and rest and ASSIGNMENT.match(rest[0]):
            assignments.append(rest.pop(0))
    return Unwrapped(
        tuple(rest),
        tuple(assignments),
        tuple(own),
        tuple(written),
        tuple(directories),
        tuple(opaque),
    )


def _option(word: str, wrapper: _Wrapper) -> tuple[str | None, str | None]:
    """Return (option, its value in the same word); (None, None) for an option that is not known."""
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
