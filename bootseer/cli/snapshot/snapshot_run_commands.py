"""`bootseer snapshot run` and `explain`: a set-up command, run once, and why it would run.

The group `snapshot` is in `snapshot_commands`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec.structs import replace

from bootseer.cli.output import (
    MaxAge,
    Seconds,
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    human_time,
    json_option,
    printable,
    say,
)
from bootseer.cli.snapshot.snapshot_output import mode_option
from bootseer.settings.config import Settings

if TYPE_CHECKING:
    from bootseer.snapshots.explain import Explanation
    from bootseer.snapshots.key import Request

_F = TypeVar("_F", bound=Callable[..., Any])
# Behind its first word everything belongs to the command, "--" or not.
_CONTEXT = {"allow_interspersed_args": False}
_VALUE_CHARACTERS = 60
"""How much of a part's value a table shows; `--json` has all of it."""


_OPTIONS = (
    click.option(
        "--target",
        "targets",
        metavar="DIR",
        multiple=True,
        help="A directory that the command makes or changes. Without: inferred, and printed.",
    ),
    click.option(
        "--input",
        "inputs",
        metavar="FILE",
        multiple=True,
        help="A file or directory that decides the result, besides those named in the command.",
    ),
    click.option(
        "--env",
        "variables",
        metavar="NAME",
        multiple=True,
        help="An environment variable that decides the result; its value is not stored.",
    ),
    click.option("--salt", metavar="TEXT", default="", help="Another salt, another snapshot."),
    click.option(
        "--base", metavar="DIGEST", default="", help="The image. Default: BOOTSEER_IMAGE."
    ),
    click.option(
        "--max-age",
        "max_age_s",
        metavar="TIME",
        type=MaxAge(),
        help="An older snapshot does not count: it is made anew. 12h, 7d, 4w, off, or auto: 7d "
        "where the result may change without notice. Default: BOOTSEER_SNAPSHOT_MAX_AGE.",
    ),
    click.argument("command", nargs=-1, required=True),
)


def _set_up_options(command: _F) -> _F:
    """What `run` and `explain` take: a set-up command and what decides its result."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _request(options: dict[str, Any]) -> tuple[Settings, "Request"]:
    """The request that the parameters of `_set_up_options` make, which are taken out of
    `options`."""
    from bootseer.snapshots.key import Request

    settings = current_settings()
    options["command"] = _command(options["command"])
    max_age_s = options.pop("max_age_s")
    if max_age_s is not None:
        settings = replace(settings, snapshot_max_age_s=max_age_s)
    return settings, Request(**options)


def _command(words: tuple[str, ...]) -> list[str]:
    """The words of the set-up. A line in one word is read as `bootseer run --setup` reads it, so
    that both have one snapshot."""
    import os

    from bootseer.launch.job import setup_command

    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.exists(words[0]):
        return setup_command(words[0])
    return list(words)


@click.command(
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
    help="How long to wait for another node or process that runs the same set-up.",
)
@mode_option
@click.option("--dry-run", is_flag=True, help="Only say what would happen; change nothing.")
@_set_up_options
@json_option
def run(wait_s: float, mode: str | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Run a set-up COMMAND once; later, and on other nodes, restore what it made.

    COMMAND is a program and its words, or a line in quotes, which is read as that of
    `bootseer run --setup`. Exits with the command's own code when it fails. Trouble with the store
    only costs the restore: the command then runs as usual.
    """
    settings, request = _request(options)
    if mode is not None:
        settings = replace(settings, restore_mode=mode)
    if dry_run:
        _tell(settings, request, as_json)
        return
    from bootseer.launch.signals import StoppedError, StopSignals, end_by
    from bootseer.snapshots.environment import run_setup

    try:
        # What the command has started ends, too, and the lease is given back.
        with StopSignals():
            result = run_setup(settings, request, report=say, wait_s=wait_s, forks=True)
    except StoppedError as stopped:
        say(f"the set-up was {stopped}; nothing was stored")
        end_by(stopped.number)
    if as_json:
        emit_json(
            {
                "how": result.how,
                "hit": result.hit,
                "fingerprint": result.fingerprint,
                "targets": result.targets,
                "file_count": result.file_count,
                "content_bytes": result.content_bytes,
                "moved_bytes": result.moved_bytes,
                "seconds": result.seconds,
                "setup_seconds": result.setup_seconds,
                "mode": result.mode,
                "mode_reason": result.mode_reason,
                "changed_outside": list(result.changed_outside),
            }
        )


def _tell(settings: Settings, request: "Request", as_json: bool) -> None:
    """A dry run: the keys of a run, with what it would come to."""
    from bootseer.snapshots.explain import RESTORE, RUN, explain_setup

    found = explain_setup(settings, request, say)
    snapshot = found.snapshot if found.outcome != RUN else None
    if as_json:
        restored = snapshot if found.outcome == RESTORE else None
        emit_json(
            {
                "how": found.outcome,
                "hit": found.outcome != RUN,
                "fingerprint": found.fingerprint,
                "targets": found.targets,
                "file_count": snapshot.file_count if snapshot else 0,
                "content_bytes": snapshot.content_bytes if snapshot else 0,
                "moved_bytes": restored.whole_bytes if restored else 0,
                "seconds": 0.0,
                "setup_seconds": snapshot.setup_ns / 1e9 if snapshot else 0.0,
                "mode": "",
                "mode_reason": "",
                "changed_outside": [],
            }
        )
        return
    click.echo(printable(_sentence(found)))


def _sentence(found: "Explanation") -> str:
    from bootseer.snapshots.explain import IN_PLACE, RESTORE

    key = found.fingerprint[:12]
    if found.outcome == IN_PLACE:
        return f"snapshot {key} is in place: {found.reason}"
    if found.outcome == RESTORE and found.snapshot is not None:
        return (
            f"would restore snapshot {key}: {found.snapshot.file_count} files, "
            f"{human_bytes(found.snapshot.whole_bytes)} to fetch at most instead of a set-up of "
            f"{found.snapshot.setup_ns / 1e9:.1f} s; {found.reason}"
        )
    return f"would run the set-up and store it as snapshot {key}: {found.reason}"


@click.command(
    context_settings=_CONTEXT,
    epilog="Example: bootseer snapshot explain -- pip install -r requirements.txt",
)
@_set_up_options
@json_option
def explain(as_json: bool, **options: Any) -> None:
    """Show what decides the result of a set-up COMMAND, and whether there is a snapshot of it.

    Where there is none: what differs from the stored snapshot that comes nearest. Nothing is run
    and nothing changes. COMMAND may be a line in quotes, such as that of a `bootseer run --setup`.
    """
    from bootseer.base.shown import shown_age
    from bootseer.snapshots.explain import explain_setup

    settings, request = _request(options)
    found = explain_setup(settings, request, say)
    if as_json:
        emit_json(_document(found))
        return
    emit_table(("part", "value"), ((part.name, part.value) for part in found.parts))
    click.echo()
    for what in found.unknown:
        click.echo(printable(f"not in the key: {what}"))
    if found.max_age_s:
        click.echo(f"made anew once it is {shown_age(int(found.max_age_s * 1e9))} old")
    click.echo(printable(_sentence(found)))
    if found.nearest is not None:
        click.echo(
            f"nearest: {found.nearest.fingerprint[:12]} of {human_time(found.nearest.created_ns)}, "
            f"made by {printable(found.nearest.node)}; it differs in"
        )
        emit_table(
            ("part", "then", "now", "that is"),
            (
                (one.part, _short(one.stored), _short(one.now), one.note)
                for one in found.differences
            ),
        )


def _short(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= _VALUE_CHARACTERS else f"{value[: _VALUE_CHARACTERS - 3]}..."


def _document(found: "Explanation") -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "reason": found.reason,
        "fingerprint": found.fingerprint,
        "targets": found.targets,
        "parts": {part.name: part.value for part in found.parts},
        "unknown": list(found.unknown),
        "max_age_seconds": found.max_age_s,
        "created": human_time(found.snapshot.created_ns) if found.snapshot else None,
        "nearest": found.nearest.fingerprint if found.nearest else None,
        "differences": [
            {"part": one.part, "then": one.stored, "now": one.now, "note": one.note}
            for one in found.differences
        ],
    }
