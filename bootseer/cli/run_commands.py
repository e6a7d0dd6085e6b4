"""`bootseer run`, the entrypoint wrapper, and `bootseer standby`, which holds what it needs."""

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from bootseer.cli.lazy_group import WrappingCommand
from bootseer.cli.output import current_config, printable, say
from bootseer.cli.snapshot.snapshot_output import mode_option
from bootseer.settings.config import Settings

if TYPE_CHECKING:
    from bootseer.launch.job import Job


@click.command(
    cls=WrappingCommand,
    has_own="image",
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt -- python train.py",
)
@click.option(
    "--image", metavar="REF", default="", help="Run in this image: an indexed one, or its source."
)
@click.option(
    "--runtime",
    type=click.Choice(("chroot", "runc")),
    help="What starts COMMAND in the image: runc isolates it from all of the host but the "
    "network; chroot, the default, does not.",
)
@click.option(
    "--user", metavar="USER[:GROUP]", help="Run as this user of the image, not as its own."
)
@click.option(
    "--bind",
    "binds",
    metavar="SRC:DST[:ro]",
    multiple=True,
    help="Show a path of this host in the image. A device node that is named may be used.",
)
@click.option(
    "--entrypoint",
    metavar="PROGRAM",
    help="Start COMMAND with this instead of the image's entrypoint; '' for none.",
)
@click.option(
    "--setup",
    "setups",
    metavar="CMD",
    multiple=True,
    help="A set-up command: run once, restored later. In order, where there are several.",
)
@click.option(
    "--target",
    "targets",
    metavar="DIR",
    multiple=True,
    help="A directory that the set-up makes or changes. Without: inferred, and printed.",
)
@click.option(
    "--input",
    "inputs",
    metavar="FILE",
    multiple=True,
    help="A file that decides the set-up's result, besides those that it names.",
)
@click.option(
    "--env",
    "variables",
    metavar="NAME",
    multiple=True,
    help="An environment variable that decides the set-up's result.",
)
@mode_option
@click.option(
    "--checkpoint",
    "checkpoints",
    metavar="URL:DIR",
    multiple=True,
    help="Mount a checkpoint folder on DIR, and read the newest checkpoint ahead.",
)
@click.option(
    "--keep",
    "kept",
    metavar="DIR",
    multiple=True,
    help="Keep this directory between starts, as the caches of compilers are by themselves.",
)
@click.option("--no-keep", is_flag=True, help="Keep no cache but those named with --keep.")
@click.option(
    "--no-trace-python",
    is_flag=True,
    help="Do not note imports, first collectives and steps of the job's Python processes.",
)
@click.option(
    "--preload/--no-preload",
    help="Start the job's Python workers from a process that has imported what their last start "
    "imported. Off by default.",
)
@click.option(
    "--linger",
    metavar="DURATION",
    help="Keep what was mounted for so long after the job, for its next start on this node.",
)
@click.option(
    "--fanout",
    type=click.Choice(("auto", "off")),
    help="Whether the nodes of the job feed each other, where they know each other.",
)
def run(
    no_trace_python: bool,
    linger: str | None,
    fanout: str | None,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Start a training job: prepare image, environment and checkpoint, then become COMMAND.

    The wrapper replaces itself by COMMAND, so signals and the exit code are COMMAND's own. The
    first start of a job records; later starts, on any node, replay. Without COMMAND it is the
    image's own. See `bootseer report`, and docs/launch.md for what the job finds in its
    environment.
    """
    from bootseer.launch.start import launch
    from bootseer.settings.values import parse_linger

    job = _job(command, **options)
    config = current_config()
    settings = _with_options(config.settings, options)
    if config.sources["store_url"] == "default":
        # A folder of this node, as the one where the timeline is.
        settings = replace(settings, publish_timelines=False)
    if no_trace_python:
        settings = replace(settings, trace_python=False)
    if linger is not None:
        settings = replace(settings, linger_s=parse_linger(linger))
    if fanout is not None:
        settings = replace(settings, fanout=fanout == "auto")
    launch(settings, job, say)


def _job(
    command: tuple[str, ...],
    *,
    image: str,
    runtime: str | None,
    user: str | None,
    binds: tuple[str, ...],
    entrypoint: str | None,
    setups: tuple[str, ...],
    targets: tuple[str, ...],
    inputs: tuple[str, ...],
    variables: tuple[str, ...],
    mode: str | None,
    checkpoints: tuple[str, ...],
    kept: tuple[str, ...],
    no_keep: bool,
    preload: bool,
) -> "Job":
    """What the options ask for; see `_with_options`. Raises: UsageError, InvalidInputError."""
    from bootseer.launch.checkpoints import parse_checkpoint
    from bootseer.launch.job import Job

    for name, is_given in (
        *(("--bind", binds), ("--entrypoint", entrypoint is not None)),
        *(("--runtime", runtime is not None), ("--user", user is not None)),
    ):
        if is_given and not image:
            raise click.UsageError(f"{name} needs --image")
    if (targets or inputs or variables or mode) and not setups:
        raise click.UsageError(
            "--target, --input, --env and --mode are about a set-up: add --setup"
        )
    return Job(
        command=command,
        image=image,
        runtime=runtime or "chroot",
        user=user,
        setups=setups,
        targets=targets,
        inputs=inputs,
        variables=variables,
        checkpoints=tuple(parse_checkpoint(text) for text in checkpoints),
        entrypoint=entrypoint,
        binds=binds,
        kept=_directories(kept),
        preload=preload,
    )


def _with_options(settings: Settings, options: Mapping[str, Any]) -> Settings:
    kept = options["kept"]
    if options["mode"] is not None:
        settings = replace(settings, restore_mode=options["mode"])
    if options["no_keep"] or {"auto", "off"}.intersection(kept):
        settings = replace(settings, keep_caches="auto" in kept and not options["no_keep"])
    return settings


def _directories(kept: tuple[str, ...]) -> tuple[str, ...]:
    """Those that `--keep` names. Raises: InvalidInputError."""
    directories = tuple(text for text in kept if text not in ("auto", "off"))
    if directories:
        from bootseer.snapshots.scan import target_path

        for text in directories:
            target_path(text, os.getcwd())
    return directories


_NOT_HELD = ("no_trace_python", "linger", "fanout")


@click.command(
    cls=WrappingCommand,
    needs_command=False,
    params=[one for one in run.params if one.name not in _NOT_HELD],
    epilog="Example: bootseer standby --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt --for 2h",
)
@click.option(
    "--for",
    "duration",
    metavar="DURATION",
    default="1h",
    show_default=True,
    help="How long it is held for a start.",
)
@click.option("--status", "shows", is_flag=True, help="Show what is held for the job, and stop.")
@click.option("--end", "ends", is_flag=True, help="Let go of what is held for the job.")
def standby(
    duration: str, shows: bool, ends: bool, command: tuple[str, ...], **options: Any
) -> None:
    """Prepare all but COMMAND, and hold it for the job's start on this node.

    `bootseer run` with the same options takes it over as it is, as it does what lingers after
    a job: mounts of images, environments and checkpoint folders; where COMMAND is named, its kept
    caches and, with --preload, its imports. Ends when all is there; what is held goes by itself
    after a while.
    """
    from bootseer.launch.attendant import release
    from bootseer.launch.start import launch
    from bootseer.linux.removal import remove_tree
    from bootseer.settings.values import parse_linger

    settings = current_config().settings
    if shows:
        _show_held(settings)
        return
    if ends:
        release(settings)
        return
    if not (options["image"] or options["setups"] or options["checkpoints"] or command):
        raise click.UsageError("nothing to hold: add --image, --setup, --checkpoint, or -- COMMAND")
    if options["preload"] and not command:
        raise click.UsageError("--preload needs COMMAND: its imports are held")
    job = replace(_job(command or ("true",), **options), is_standby=True)
    stages = settings.run_dir / "standby"
    with contextlib.suppress(OSError):
        remove_tree(stages)
    settings = replace(
        _with_options(settings, options),
        linger_s=parse_linger(duration),
        # It is no start of the job, and not to be seen among these.
        timeline_dir=stages,
        submission="standby",
        publish_timelines=False,
        # Nodes are made ready one by one.
        fanout=False,
        # What is held for a start is not what a start reads.
        record="never",
    )
    if not command:
        settings = replace(settings, keep_caches=False)
    launch(settings, job, say)


def _show_held(settings: Settings) -> None:
    from bootseer.cli.node.status_commands import emit_entries, node_entries
    from bootseer.errors import BootseerError, NotFoundError
    from bootseer.launch.standby import expected_s, held_sentence
    from bootseer.served.preload.launching import held as preloaders
    from bootseer.served.status import known_servers

    entries = node_entries(settings.run_dir)
    holders = {
        one.pid
        for one in entries
        if one.kind == "attendant" and one.what == settings.job and one.health == "ok"
    }
    held = [one for one in entries if one.pid in holders or holders.intersection(one.users)]
    if not held:
        raise NotFoundError(f"nothing is held on this node for the job {settings.job}")
    emit_entries(held)
    servers = {one.pid for one in held}
    for known in known_servers(settings.run_dir):
        # The table says who does not answer.
        with contextlib.suppress(BootseerError):
            if known.is_running and known.state.pid in servers and (line := held_sentence(known)):
                click.echo(printable(line))
    for sentence in preloaders(settings):
        click.echo(sentence)
    if (expected := expected_s(settings)) is not None:
        took_s, left_s = expected
        click.echo(
            f"expected: {left_s:.1f} s until the command runs, as far as mounts are concerned; "
            f"the last start on this node took {took_s:.1f} s"
        )
