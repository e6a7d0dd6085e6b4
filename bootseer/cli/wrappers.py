"""Click commands `bootseer run` and `bootseer standby`, made of the options in `grammar`."""

from typing import Any

from bootseer.cli.command_tree import WrappingCommand, current_config
from bootseer.cli.grammar import RUN, STANDBY
from bootseer.cli.options import params_of
from bootseer.cli.run import hold, start


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
    params=params_of(RUN),
    callback=_run,
    help=_run.__doc__,
    has_own="image",
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt -- python train.py",
)
standby = WrappingCommand(
    "standby",
    params=params_of(STANDBY),
    callback=_standby,
    help=_standby.__doc__,
    needs_command=False,
    epilog="Example: bootseer standby --setup 'pip install -r requirements.txt' "
    "--checkpoint hdfs://namenode:8020/ckpt:/mnt/ckpt --for 2h",
)
