"""`bootseer image mount | unmount | run | warm`: images in use on this node.

`COMMANDS` are added to the group `image` by `image_commands`.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import click
from msgspec.structs import replace

from bootseer.cli.output import (
    Seconds,
    Size,
    current_settings,
    emit_json,
    entrypoint_option,
    json_option,
    open_current_store,
)
from bootseer.errors import NotFoundError
from bootseer.settings.config import Settings

_WINDOW_HELP = "End the record after this many seconds, if ready() was not called."


def _record_mode(choice: bool | None) -> str:
    return {None: "auto", True: "always", False: "never"}[choice]


_record_option = click.option(
    "--record/--no-record",
    "record",
    default=None,
    help="Record what is read; by default where no bundle exists or it missed much.",
)
_prefetch_option = click.option(
    "--prefetch/--no-prefetch", default=True, help="Stream the workload's bundle, if there is one."
)
_window_option = click.option(
    "--window", "window_s", type=Seconds(0.1, 86_400), default=120.0, help=_WINDOW_HELP
)
_fill_option = click.option(
    "--fill",
    "fill_bytes_per_s",
    type=Size(),
    metavar="SIZE",
    help="Complete the image in the background by so much per second; 0: do not.",
)


_no_index_option = click.option(
    "--no-index",
    is_flag=True,
    help="Do not publish what had to be pulled of the image for later starts.",
)


def _with(settings: Settings, fill_bytes_per_s: int | None, no_index: bool) -> Settings:
    if fill_bytes_per_s is not None:
        settings = replace(settings, fill_bytes_per_s=fill_bytes_per_s)
    return replace(settings, auto_index=False) if no_index else settings


@click.command(epilog="Example: bootseer image mount train:v1 /mnt/train")
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@_record_option
@_prefetch_option
@_window_option
@_fill_option
@_no_index_option
@click.option("--foreground", is_flag=True, help="Stay until unmounted; Ctrl-C unmounts.")
@json_option
def mount(
    reference: str,
    directory: Path,
    record: bool | None,
    prefetch: bool,
    window_s: float,
    fill_bytes_per_s: int | None,
    no_index: bool,
    foreground: bool,
    as_json: bool,
) -> None:
    """Mount the image REF, an indexed one or its source, on the directory DIR, read-only.

    An image that nobody has indexed is pulled first, and indexed in the background. Returns at once
    otherwise: what is read is fetched when it is first touched, and what earlier starts of
    the workload (`bootseer --workload NAME image mount ...`) read is fetched ahead.
    """
    from bootseer.prefetch.resolve.mount import mount_image
    from bootseer.prefetch.serve.serve_plan import ServeOptions

    settings = _with(current_settings(), fill_bytes_per_s, no_index)
    options = ServeOptions(record=_record_mode(record), prefetch=prefetch, window_s=window_s)
    image = mount_image(settings, reference, directory, options)
    if as_json:
        emit_json(
            {
                "directory": image.directory,
                "id": image.state.id,
                "reference": image.state.reference,
                "index_digest": image.state.index_digest,
            }
        )
        sys.stdout.flush()
    if foreground:
        _stay(settings, image.directory)


def _stay(settings: Settings, directory: Path) -> None:
    from bootseer.prefetch.resolve.mount import find_live_mount, unmount_image

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            find_live_mount(settings, directory)
            time.sleep(0.5)
    except NotFoundError:
        return
    except KeyboardInterrupt:
        with contextlib.suppress(NotFoundError):
            unmount_image(settings, directory)


@click.command(epilog="Example: bootseer image unmount /mnt/train")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0, 3600),
    default=10.0,
    help="Give open files this many seconds, then abort them.",
)
@json_option
def unmount(directory: Path, timeout_s: float, as_json: bool) -> None:
    """Unmount an image from DIR, whatever state its server is in."""
    from bootseer.linux.mount_table import absolute
    from bootseer.prefetch.resolve.mount import unmount_image

    unmount_image(current_settings(), directory, timeout_s=timeout_s)
    if as_json:
        emit_json({"directory": absolute(directory)})


@click.command(
    epilog="Example: bootseer image run --bind /data:/data:ro train:v1 -- python3 train.py",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("reference", metavar="REF")
@click.argument("command", metavar="[-- CMD...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--runtime",
    type=click.Choice(("auto", "runc", "chroot")),
    default="auto",
    help="runc isolates all but the network; chroot has the host's network, devices and "
    "privileges. By default runc, where root finds it installed.",
)
@click.option(
    "--bind",
    "binds",
    multiple=True,
    metavar="SRC:DST[:ro]",
    help="Show a path of this host in the image. A device node that is named may be used.",
)
@click.option(
    "--env",
    "-e",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable; without VALUE, to the host's value.",
)
@click.option("--user", metavar="USER[:GROUP]", help="Run as this user, not as the image's.")
@entrypoint_option
@_record_option
@_prefetch_option
@_window_option
@_fill_option
@_no_index_option
def run(
    reference: str,
    command: tuple[str, ...],
    runtime: str,
    binds: tuple[str, ...],
    variables: tuple[str, ...],
    user: str | None,
    entrypoint: str | None,
    record: bool | None,
    prefetch: bool,
    window_s: float,
    fill_bytes_per_s: int | None,
    no_index: bool,
) -> int:
    """Run CMD (default: the image's own command) in the image REF, an indexed one or its source.

    The image is mounted for it, with a writable layer that is thrown away afterwards. The exit code
    is the command's own; 127 where there is no such command, 126 where it cannot be run.
    """
    from bootseer.served.processes import TREE, start

    settings = _with(current_settings(), fill_bytes_per_s, no_index)
    # Its code loads while ours does.
    with start(TREE, settings.run_dir, copy=True) as process:
        from bootseer.prefetch.container.process_spec import parse_environment
        from bootseer.prefetch.container.run import run_image
        from bootseer.prefetch.serve.serve_plan import ServeOptions

        return run_image(
            settings,
            reference,
            command,
            ServeOptions(record=_record_mode(record), prefetch=prefetch, window_s=window_s),
            runtime=runtime,
            binds=binds,
            environment=parse_environment(variables, os.environ),
            user=user,
            entrypoint=entrypoint,
            process=process,
        )


@click.command(epilog="Example: bootseer image fetch train:v1")
@click.argument("reference", metavar="REF")
@json_option
def fetch(reference: str, as_json: bool) -> None:
    """Bring all of the image REF into this node's cache, so that it starts without the store.

    REF is an indexed image or a source, such as registry://HOST/NAME:TAG.
    """
    from bootseer.prefetch.resolve.found_image import image_on_node, publish_later
    from bootseer.prefetch.resolve.resolve import resolve_image
    from bootseer.prefetch.streams.fetching import fetch_tree

    settings = current_settings()
    resolved = resolve_image(settings, reference)
    try:
        record, is_local = resolved.record, not resolved.is_published
        # A layer that this node pulled serves, whoever has published it.
        here = image_on_node(settings, resolved)
        if here is not None:
            here.release()
            size_bytes = sum(layer.blob_size_bytes for layer in record.layers)
        else:
            with open_current_store() as store:
                size_bytes = fetch_tree(
                    settings, store, record.index_digest, record.reference, is_local=is_local
                )
    finally:
        resolved.release()
    publish_later(settings, resolved)
    if as_json:
        emit_json(
            {
                "reference": record.reference,
                "index_digest": record.index_digest,
                "blob_bytes": size_bytes,
            }
        )


COMMANDS = (mount, unmount, run, fetch)
