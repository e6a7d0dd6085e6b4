"""`bootseer run`: the entrypoint wrapper."""

import os

import click
from msgspec.structs import replace

from bootseer.cli.lazy_group import WrappingCommand
from bootseer.cli.output import current_config, entrypoint_option, say
from bootseer.cli.snapshot.snapshot_output import mode_option


@click.command(
    cls=WrappingCommand,
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt -- python train.py",
)
@click.option(
    "--image", metavar="REF", default="", help="Run in this image: an indexed one, or its source."
)
@click.option(
    "--no-index",
    is_flag=True,
    help="Do not publish what had to be pulled of the image for later starts.",
)
@click.option(
    "--bind",
    "binds",
    metavar="SRC:DST[:ro]",
    multiple=True,
    help="Show a path of this host in the image.",
)
@entrypoint_option
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
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    image: str,
    no_index: bool,
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
    no_trace_python: bool,
    preload: bool,
    linger: str | None,
    command: tuple[str, ...],
) -> None:
    """Start a training job: prepare image, environment and checkpoint, then become COMMAND.

    The wrapper replaces itself by COMMAND, so signals and the exit code are COMMAND's own. The
    first start of a job records; later starts, on any node, replay. See `bootseer report`, and
    docs/launch.md for what the job finds in its environment.
    """
    from bootseer.launch.checkpoints import parse_checkpoint
    from bootseer.launch.start import Job, launch
    from bootseer.settings.config import parse_linger
    from bootseer.snapshots.targets.paths import target_path

    if binds and not image:
        raise click.UsageError("--bind needs --image")
    if entrypoint is not None and not image:
        raise click.UsageError("--entrypoint needs --image")
    if no_index and not image:
        raise click.UsageError("--no-index needs --image")
    if (targets or inputs or variables or mode) and not setups:
        raise click.UsageError(
            "--target, --input, --env and --mode are about a set-up: add --setup"
        )
    directories = tuple(text for text in kept if text not in ("auto", "off"))
    for text in directories:
        target_path(text, os.getcwd())
    job = Job(
        command=command,
        image=image,
        setups=setups,
        targets=targets,
        inputs=inputs,
        variables=variables,
        checkpoints=tuple(parse_checkpoint(text) for text in checkpoints),
        entrypoint=entrypoint,
        binds=binds,
        kept=directories,
        preload=preload,
    )
    config = current_config()
    settings = config.settings
    if config.sources["store_url"] == "default":
        # A folder of this node, as the one where the timeline is.
        settings = replace(settings, publish_timelines=False)
    if mode is not None:
        settings = replace(settings, restore_mode=mode)
    if no_index:
        settings = replace(settings, auto_index=False)
    if no_keep or {"auto", "off"}.intersection(kept):
        settings = replace(settings, keep_caches="auto" in kept and not no_keep)
    if no_trace_python:
        settings = replace(settings, trace_python=False)
    if linger is not None:
        settings = replace(settings, linger_s=parse_linger(linger))
    launch(settings, job, say)
