"""`bootseer snapshot run` and `explain`: a set-up command, run once, and why it would run."""

import os
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.display import format_age
from bootseer.cli.command_tree import command, current_settings
from bootseer.cli.options import Seconds, mode_option, options
from bootseer.cli.show import document_of, emit_table, shows
from bootseer.cli.snapshot import ShownSnapshot, snapshot_of
from bootseer.cli.text import human_bytes, human_time, printable, say

if TYPE_CHECKING:
    from bootseer.snapshots.key import Request

# All words after the first word of the command belong to the command, with or without "--".
_CONTEXT = {"allow_interspersed_args": False}
_VALUE_CHARACTERS = 60
"""Length to which a table cuts a part's value; `--json` has all of it."""


class Ran(Struct):
    """Set-up that was run, or restored."""

    how: str
    """`captured`, `restored`, `in place` or `ran`."""
    hit: bool
    """Whether the set-up was spared."""
    fingerprint: str
    targets: tuple[str, ...]
    file_count: int
    content_bytes: int
    moved_bytes: int
    """Bytes moved to or from the store."""
    seconds: float
    """Duration of everything."""
    setup_seconds: float
    """Duration of the command, now or when the snapshot was made."""
    mode: str
    """Mode in which it was restored: `mount`, `link`, `extract`; empty where it was not."""
    mode_reason: str
    """Reason for the mode."""
    changed_outside: tuple[str, ...]
    """Names that changed outside the targets while it ran, as far as a short look told; of a
    restored one the first hundred that its snapshot names."""


class PartDifference(Struct):
    """Part of a fingerprint that differs from the nearest snapshot."""

    part: str
    then: str | None
    """Value in the nearest snapshot; null if it has no such part."""
    now: str | None
    note: str
    """Meaning of the difference, or empty."""


class ExplainedSetup(Struct):
    """Parts that decide the result of a set-up, and its snapshot if there is one."""

    outcome: str
    """`in place`, `would restore` or `would run`."""
    reason: str
    """Reason in a sentence."""
    fingerprint: str
    targets: tuple[str, ...]
    parts: dict[str, str]
    """Parts of the fingerprint, by name."""
    unknown: tuple[str, ...]
    """Things that may decide the result and are not among the parts, in a few words each."""
    max_age_seconds: float
    """Maximum age of a stored snapshot; 0: any age."""
    created: str | None
    """Time at which its snapshot was made; null without one."""
    snapshot: ShownSnapshot | None
    """Snapshot of the set-up in the store."""
    nearest: str | None
    """Fingerprint of the snapshot that differs least, if there is none."""
    nearest_snapshot: ShownSnapshot | None
    differences: list[PartDifference]
    """Empty where there is nothing to compare."""


_set_up_options = options(
    click.option(
        "--target",
        "targets",
        metavar="DIR",
        multiple=True,
        help="Directory that the command makes or changes. Default: inferred, and printed.",
    ),
    click.option(
        "--input",
        "inputs",
        metavar="FILE",
        multiple=True,
        help="File or directory that decides the result, besides those named in the command.",
    ),
    click.option(
        "--input-env",
        "variables",
        metavar="NAME",
        multiple=True,
        help="Environment variable that decides the result; its value is not stored.",
    ),
    click.argument("command", nargs=-1, required=True),
)


def _request(values: dict[str, Any]) -> "Request":
    from bootseer.snapshots.key import Request

    return Request(**{**values, "command": _command(values["command"])})


def _command(words: tuple[str, ...]) -> list[str]:
    """Return the words of the set-up."""
    # A line in one word is read as by `bootseer run --setup`, so that both have one snapshot.
    from bootseer.launch.job import setup_command

    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.exists(words[0]):
        return setup_command(words[0])
    return list(words)


@command(
    "snapshot run",
    context_settings=_CONTEXT,
    epilog="Example: bootseer snapshot run --target /opt/env -- "
    "sh -c 'python3 -m venv /opt/env && /opt/env/bin/pip install -r requirements.txt'",
)
@click.option(
    "--wait",
    "wait_s",
    metavar="TIME",
    type=Seconds(min=0, max=30 * 86_400),
    default=1800.0,
    show_default=True,
    help="Longest wait for another node or process that runs the same set-up.",
)
@mode_option
@_set_up_options
@shows(Ran)
def snapshot_run(wait_s: float, mode: str | None, **values: Any) -> Ran:
    """Run a set-up COMMAND once; later, and on other nodes, restore its result.

    COMMAND is a program and its words, or a line in quotes, which is read as that of
    `bootseer run --setup`. Exits with the command's own code when it fails. Trouble with the store
    only costs the restore: the command then runs as usual.
    """
    from bootseer.launch.signals import StartStoppedError, StopSignals, end_by
    from bootseer.snapshots.environment import run_setup

    settings = current_settings()
    if mode is not None:
        settings = replace(settings, restore_mode=mode)
    try:
        # A signal also ends the processes of the command, and the lease is given back.
        with StopSignals():
            result = run_setup(settings, _request(values), report=say, wait_s=wait_s, forks=True)
    except StartStoppedError as stopped:
        say(f"the set-up was {stopped}; nothing was stored")
        end_by(stopped.number)
    return document_of(Ran, result)


def _show_explained(found: ExplainedSetup) -> None:
    emit_table(("part", "value"), found.parts.items())
    click.echo()
    for what in found.unknown:
        click.echo(printable(f"not in the key: {what}"))
    if found.max_age_seconds:
        click.echo(f"made anew once it is {format_age(int(found.max_age_seconds * 1e9))} old")
    click.echo(printable(_sentence(found)))
    if found.nearest_snapshot is not None:
        near = found.nearest_snapshot
        made = f"of {near.created}, made by {printable(near.node)}"
        click.echo(f"nearest: {near.fingerprint[:12]} {made}; it differs in")
        emit_table(
            ("part", "then", "now", "that is"),
            ((one.part, _short(one.then), _short(one.now), one.note) for one in found.differences),
        )


def _sentence(found: ExplainedSetup) -> str:
    from bootseer.snapshots.explain import IN_PLACE, RESTORE

    key = found.fingerprint[:12]
    if found.outcome == IN_PLACE:
        return f"snapshot {key} is in place: {found.reason}"
    if found.outcome == RESTORE and found.snapshot is not None:
        return (
            f"would restore snapshot {key}: {found.snapshot.file_count} files, "
            f"{human_bytes(found.snapshot.whole_bytes)} to fetch at most instead of a set-up of "
            f"{found.snapshot.setup_seconds:.1f} s; {found.reason}"
        )
    return f"would run the set-up and store it as snapshot {key}: {found.reason}"


def _short(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= _VALUE_CHARACTERS else f"{value[: _VALUE_CHARACTERS - 3]}..."


@command(
    "snapshot explain",
    context_settings=_CONTEXT,
    epilog="Example: bootseer snapshot explain -- pip install -r requirements.txt",
)
@_set_up_options
@shows(ExplainedSetup, text=_show_explained)
def snapshot_explain(**values: Any) -> ExplainedSetup:
    """Show the parts that decide the result of a set-up COMMAND, and whether it has a snapshot.

    If there is none: the differences from the stored snapshot that comes nearest. Nothing is run
    and nothing changes. COMMAND may be a line in quotes, such as that of a `bootseer run --setup`.
    """
    from bootseer.snapshots.explain import explain_setup

    found = explain_setup(current_settings(), _request(values), say)
    return ExplainedSetup(
        outcome=found.outcome,
        reason=found.reason,
        fingerprint=found.fingerprint,
        targets=found.targets,
        parts={part.name: part.value for part in found.parts},
        unknown=found.unknown,
        max_age_seconds=found.max_age_s,
        created=human_time(found.snapshot.created_ns) if found.snapshot else None,
        snapshot=snapshot_of(found.snapshot) if found.snapshot else None,
        nearest=found.nearest.fingerprint if found.nearest else None,
        nearest_snapshot=snapshot_of(found.nearest) if found.nearest else None,
        differences=[
            PartDifference(one.part, one.stored, one.now, one.note) for one in found.differences
        ],
    )
