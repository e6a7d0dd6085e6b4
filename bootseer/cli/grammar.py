"""Grammar of the command line as plain data: every command, and the options of some.

The click commands (`command_tree`), the kill switch (`disabled`) and the early reading of
`bootseer run` and `bootseer snapshot restore`, which loads no click, are all made from these
tables. Imports nothing of Bootseer. Pure.
"""

from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("wrappers", "Start a training job: image, environment, checkpoint, then exec."),
    "standby": ("wrappers", "Hold the mounts of a job for its start on this node."),
    "warm": ("warm", "Directories of other tools: record once, read ahead later."),
    "status": ("node", "Show mounts and background processes of this node."),
    "unmount": ("node", "Unmount an image, environment or checkpoint folder."),
    "report": ("report", "Explain where the time of a start went."),
    "watch": ("report", "Follow a start that is under way."),
    "doctor": ("doctor", "Check this machine and say what to do."),
    "config": ("config", "Show the settings and where each came from."),
    "gc": ("gc", "Delete unused objects from the shared store."),
    "demo": ("demo", "Launch a job twice on this machine and compare."),
    "image": ("", "Container images: index once, then mount and run lazily on any node."),
    "image cache": ("image", ""),
    "image fetch": ("image", ""),
    "image index": ("image", ""),
    "image list": ("image", ""),
    "image ls": ("image", ""),
    "image mount": ("image", ""),
    "image show": ("image", ""),
    "image trace": ("", "Traces: the reads of starts, recorded or listed by other tools."),
    "image trace export": ("image_trace", ""),
    "image trace import": ("image_trace", ""),
    "image trace list": ("image_trace", ""),
    "image trace show": ("image_trace", ""),
    "snapshot": ("", "Environments: capture once, restore everywhere."),
    "snapshot create": ("snapshot", ""),
    "snapshot diff": ("snapshot", ""),
    "snapshot explain": ("snapshot", ""),
    "snapshot export": ("snapshot", ""),
    "snapshot fetch": ("snapshot", ""),
    "snapshot import": ("snapshot", ""),
    "snapshot list": ("snapshot", ""),
    "snapshot restore": ("snapshot", ""),
    "snapshot run": ("snapshot", ""),
    "snapshot show": ("snapshot", ""),
    "snapshot verify": ("snapshot", ""),
    "checkpoint": (
        "",
        "Striped checkpoints: mount, copy, check, convert.\n\n"
        "A URL (`hdfs://...`, `file://...`, `s3://...`) names what is stored, striped or not; a "
        'path without "://" is a local file.',
    ),
    "checkpoint convert": ("checkpoint", ""),
    "checkpoint cp": ("checkpoint", ""),
    "checkpoint fsck": ("checkpoint", ""),
    "checkpoint ls": ("checkpoint", ""),
    "checkpoint mount": ("checkpoint", ""),
    "checkpoint restart": ("checkpoint", ""),
    "checkpoint stat": ("checkpoint", ""),
    "checkpoint verify": ("checkpoint", ""),
    "cache": (
        "",
        "Caches of compilers and frameworks, kept between starts.\n\n"
        "`bootseer run` restores them before its command and publishes what is new behind it. Each "
        "is a snapshot, too: `snapshot show KEY` and `snapshot export KEY` take its key.",
    ),
    "cache delete": ("cache", ""),
    "cache explain": ("cache", ""),
    "cache import": ("cache", ""),
    "cache list": ("cache", ""),
    "snapshotter": ("cluster", "Serve images to containerd, without pulling them."),
    "kubernetes": ("", "Services of Bootseer's own pods on a cluster."),
    "kubernetes containerd": ("", "Snapshotter and runtime class in a node's containerd."),
    "kubernetes containerd install": ("cluster", ""),
    "kubernetes containerd remove": ("cluster", ""),
    "kubernetes containerd status": ("cluster", ""),
    "kubernetes csi": ("cluster", ""),
    "kubernetes spawner": ("cluster", ""),
    "kubernetes webhook": ("cluster", ""),
    "slurm": (
        "",
        "Before and after a job of Slurm, on each of its nodes.\n\n"
        "The script docker/slurm/bootseer runs these as the user of the job. See docs/slurm.md.",
    ),
    "slurm epilog": ("node", ""),
    "slurm prolog": ("node", ""),
}
"""Module in `bootseer.cli` and line of help of each command, by the words that call it. Groups have
no module. The function of a command has its words as its name, joined by "_". If the line of help
is empty, the first line of the function's docstring is listed."""

SETTINGS: Mapping[str, str] = {
    "--store": "store_url",
    "--cache-dir": "cache_dir",
    "--run-dir": "run_dir",
    "--timeline-dir": "timeline_dir",
    "--job": "job",
    "--attempt": "attempt",
    "--workload": "workload",
}
"""Field of `settings.config.Settings` by the option that sets it."""
SET = "--set"
"""The option that sets any setting: NAME=VALUE."""
WRAPPERS = ("run", "warm")
"""Commands that end by executing the command after `--` in their own process."""


class Option:
    """Option of `run`, `standby` or `snapshot restore`.

    Args:
        metavar: Placeholder of the value; empty for an option without a value.
    """

    def __init__(
        self,
        flag: str,
        parameter: str,
        text: str,
        metavar: str = "",
        *,
        repeats: bool = False,
        choices: tuple[str, ...] = (),
        default: str | None = None,
    ) -> None:
        self.flag = flag
        self.parameter = parameter
        self.help = text
        self.metavar = metavar
        self.repeats = repeats
        self.choices = choices
        self.default = default


_MODE = Option(
    "--mode",
    "mode",
    "How to restore: auto, mount, link or extract. Default: BOOTSEER_RESTORE_MODE.",
    "MODE",
    choices=("auto", "mount", "link", "extract"),
)
_PREPARED = (
    Option("--image", "image", "Run in this image: an indexed one, or its source.", "REF"),
    Option(
        "--runtime",
        "runtime",
        "Program that starts COMMAND in the image: runc isolates it from all of the host but the "
        "network; chroot, the default, does not.",
        "RUNTIME",
        choices=("chroot", "runc"),
    ),
    Option("--user", "user", "Run as this user of the image, not as its own.", "USER[:GROUP]"),
    Option(
        "--bind",
        "binds",
        "Show a path of this host in the image; a named device node may be used.",
        "SRC:DST[:ro]",
        repeats=True,
    ),
    Option(
        "--entrypoint",
        "entrypoint",
        "Start COMMAND with this instead of the image's entrypoint; '' for none.",
        "PROGRAM",
    ),
    Option(
        "--setup",
        "setups",
        "Set-up command: run once, restored later. Several run in order.",
        "CMD",
        repeats=True,
    ),
    Option(
        "--target",
        "targets",
        "Directory that the set-up makes or changes. Default: inferred, and printed.",
        "DIR",
        repeats=True,
    ),
    Option(
        "--input",
        "inputs",
        "File that decides the set-up's result, besides those that the set-up names.",
        "FILE",
        repeats=True,
    ),
    Option(
        "--input-env",
        "variables",
        "Environment variable that decides the set-up's result.",
        "NAME",
        repeats=True,
    ),
    _MODE,
    Option(
        "--checkpoint",
        "checkpoints",
        "Mount a checkpoint folder on DIR, and read the newest checkpoint ahead.",
        "URL:DIR",
        repeats=True,
    ),
    Option(
        "--keep",
        "kept",
        "Keep this directory between starts, in addition to the caches of compilers.",
        "DIR",
        repeats=True,
    ),
    Option(
        "--preload",
        "preload",
        "Start the job's Python workers from a process that has imported what their last start "
        "imported.",
    ),
)
RUN = (
    *_PREPARED,
    Option(
        "--linger",
        "linger",
        "Keep mounts for this time after the job, for its next start on this node.",
        "DURATION",
    ),
)
STANDBY = (
    *_PREPARED,
    Option(
        "--for",
        "duration",
        "Time for which the mounts are held for a start.",
        "DURATION",
        default="1h",
    ),
    Option("--status", "shows", "Show the mounts that are held for the job, then exit."),
    Option("--end", "ends", "Release the mounts that are held for the job."),
)


RESTORE = (
    Option(
        "--to",
        "directory",
        "Restore to this directory; without --relocate only if no file contains its own path.",
        "DIR",
    ),
    Option(
        "--relocate",
        "relocates",
        "Change the paths in an environment, so that it works in the directory of --to.",
    ),
    Option(
        "--system",
        "allows_system",
        "Allow directories of the system, such as /usr/bin and /etc, and of a user's settings.",
    ),
    _MODE,
)


class CommandLine:
    """Command line that was read without click.

    Attributes:
        settings: Values by field of `Settings`.
        assignments: Values of `--set`.
        options: Values of all options of the command, by parameter.
        verbosity: Number of `-v`.
        words: Arguments of the command that are not options.
        command: Words after `--`.
    """

    def __init__(self, options: Sequence[Option]) -> None:
        self.settings: dict[str, str] = {}
        self.assignments: list[str] = []
        self.options = defaults(options)
        self.verbosity = 0
        self.words: list[str] = []
        self.command: tuple[str, ...] = ()


def read_run(words: Sequence[str]) -> CommandLine | None:
    """Return the command line of a `bootseer run`; None if click must read it.

    Click reads other commands, requests for help, and lines with mistakes.
    """
    if "--" not in words:
        return None
    end = words.index("--")
    line = _read(words[:end], ("run",), RUN)
    if line is None or line.words:
        return None
    line.command = tuple(words[end + 1 :])
    return line if line.command or line.options["image"] else None


def read_restore(words: Sequence[str]) -> CommandLine | None:
    """Return the command line of a `bootseer snapshot restore KEY` to the snapshot's own places.

    None if click must read it, as in `read_run`.
    """
    line = _read(words, ("snapshot", "restore"), RESTORE)
    if line is None or len(line.words) != 1:
        return None
    return None if line.options["directory"] or line.options["relocates"] else line


def _read(
    words: Sequence[str], command: Sequence[str], options: Sequence[Option]
) -> CommandLine | None:
    line = CommandLine(options)
    values = line.options
    missing = list(command)
    known: dict[str, Option] = {}
    rest = iter(words)
    for word in rest:
        is_first = len(missing) == len(command)
        if is_first and word.startswith("-v") and word == "-" + "v" * (len(word) - 1):
            line.verbosity += len(word) - 1
            continue
        if not word.startswith("-"):
            if not missing:
                line.words.append(word)
            elif word != missing.pop(0):
                return None
            elif not missing:
                known = {one.flag: one for one in options}
            continue
        flag, has_value, value = word.partition("=")
        option = known.get(flag)
        if option is not None and not option.metavar:
            if has_value:
                return None
            values[option.parameter] = True
            continue
        is_setting = flag in SETTINGS or flag == SET
        if option is None and not (is_setting and (is_first or not missing)):
            return None
        if not has_value:
            value = next(rest, "--")
            if value == "--":
                return None
        if flag == SET:
            line.assignments.append(value)
        elif option is None:
            line.settings[SETTINGS[flag]] = value
        elif option.choices and value not in option.choices:
            return None
        elif option.repeats:
            values[option.parameter] = (*_texts(values[option.parameter]), value)
        else:
            values[option.parameter] = value
    return None if missing else line


def defaults(options: Sequence[Option]) -> dict[str, object]:
    """Return the default of each option, by parameter."""
    return {
        one.parameter: () if one.repeats else one.default if one.metavar else False
        for one in options
    }


def _texts(value: object) -> tuple[str, ...]:
    assert isinstance(value, tuple)
    return value


def behind_settings(words: Sequence[str]) -> Sequence[str]:
    """Return the words from the command on, without the options of `bootseer` itself."""
    # All long options but `--verbose` have a value.
    at = 0
    while at < len(words) and words[at].startswith("-"):
        has_value = words[at].startswith("--") and "=" not in words[at]
        at += 2 if has_value and words[at] != "--verbose" else 1
    return words[at:]


def members(group: str) -> list[str]:
    """Return the names of a group's commands; "" is the program itself."""
    prefix = f"{group} " if group else ""
    below = [path.removeprefix(prefix) for path in COMMANDS if path.startswith(prefix)]
    return [name for name in below if name and " " not in name]
