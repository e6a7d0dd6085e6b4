"""Click commands `bootseer run` and `bootseer standby`, made of the options in `grammar`."""

from collections.abc import Sequence
from typing import Any

import click

from bootseer.cli.command_tree import WrappingCommand, current_config
from bootseer.cli.grammar import RUN, STANDBY, Option
from bootseer.cli.run import hold, start


def _params(options: Sequence[Option]) -> list[click.Parameter]:
    return [
        click.Option(
            [one.flag, one.parameter],
            metavar=one.metavar or None,
            is_flag=not one.metavar,
            multiple=one.repeats,
            type=click.Choice(one.choices) if one.choices else None,
            default=one.default if one.metavar else False,
            show_default=one.default is not None,
            help=one.help,
        )
        for one in options
    ]


def _run(command: tuple[str, ...], **options: Any) -> None:
    """Start a training job: prepare image, environment and checkpoint, then become COMMAND.

    The wrapper replaces itself by COMMAND, so signals and the exit code are COMMAND's own. Without
    COMMAND, the image's own command is started. The first start of a job records; later starts, on
    any node, replay. See `bootseer report`; docs/launch.md lists the job's variables.
    """
    start(current_config(), command, options)


def _standby(command: tuple[str, ...], **options: Any) -> None:
    """Prepare all but COMMAND, and hold it for the job's start on this node.

    Held are the mounts of images, environments and checkpoint folders; if COMMAND is given, also
    its kept caches and, with --preload, its imports. A later `bootseer run` with the same options
    takes them over, as it takes over lingering mounts. The command exits when everything is
    prepared. After the time of --for, everything is released.
    """
    hold(current_config().settings, command, options)


run = WrappingCommand(
    "run",
    params=_params(RUN),
    callback=_run,
    help=_run.__doc__,
    has_own="image",
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt -- python train.py",
)
standby = WrappingCommand(
    "standby",
    params=_params(STANDBY),
    callback=_standby,
    help=_standby.__doc__,
    needs_command=False,
    epilog="Example: bootseer standby --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt --for 2h",
)
