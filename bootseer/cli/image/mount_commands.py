"""`bootseer image mount | fetch`: images in use on this node.

`COMMANDS` are added to the group `image` by `image_commands`.
"""

import contextlib
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import click

from bootseer.cli.output import (
    current_settings,
    emit_json,
    json_option,
    open_current_store,
)
from bootseer.errors import NotFoundError
from bootseer.settings.config import Settings


@click.command(epilog="Example: bootseer image mount train:v1 /mnt/train")
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--foreground", is_flag=True, help="Stay until unmounted; Ctrl-C unmounts.")
@json_option
def mount(reference: str, directory: Path, foreground: bool, as_json: bool) -> None:
    """Mount the image REF, an indexed one or its source, on the directory DIR, read-only.

    An image that nobody has indexed is pulled first, and indexed in the background. Returns at once
    otherwise: what is read is fetched when it is first touched, and what earlier starts of
    the workload (`bootseer --workload NAME image mount ...`) read is fetched ahead.
    """
    from bootseer.prefetch.images.mount import mount_image

    settings = current_settings()
    image = mount_image(settings, reference, directory)
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
    from bootseer.prefetch.images.mount import find_live_mount, unmount_image

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


@click.command(epilog="Example: bootseer image fetch train:v1")
@click.argument("reference", metavar="REF")
@json_option
def fetch(reference: str, as_json: bool) -> None:
    """Bring all of the image REF into this node's cache, so that it starts without the store.

    REF is an indexed image or a source, such as registry://HOST/NAME:TAG.
    """
    from bootseer.prefetch.images.find import image_on_node, publish_later, resolve_image
    from bootseer.prefetch.reading.fill import fetch_tree

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


COMMANDS = (mount, fetch)
