"""What the commands of `bootseer checkpoint` share: opening URLs, options, tables of files."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bootseer.cli.output import Size, current_settings

if TYPE_CHECKING:
    from bootseer.fuse.striped.tools.copy_tree import Place
    from bootseer.fuse.striped.view import FileView
    from bootseer.store.backend import FileInfo

_F = TypeVar("_F", bound=Callable[..., Any])


def form_options(command: _F) -> _F:
    """Adds how new files are stored, as the parameters that `opened` takes."""
    for option in (
        click.option(
            "--layout",
            type=click.Choice(("striped", "plain")),
            default="striped",
            show_default=True,
            help="Striped over parts, or one ordinary file that every tool reads.",
        ),
        click.option("--stripe-count", type=int, metavar="N", help="Parts of a file (8)."),
        click.option("--stripe-unit", type=Size(), metavar="SIZE", help="Bytes per piece (4MiB)."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def opened(
    url: str,
    *,
    stripe_unit: int | None = None,
    stripe_count: int | None = None,
    layout: str = "striped",
) -> "Iterator[Place]":
    """Yield the place that `url` names. The storage is closed in the end."""
    from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
    from bootseer.fuse.striped.tools.copy import open_storage
    from bootseer.fuse.striped.tools.copy_tree import Place, split_url

    folder, name = split_url(url)
    with open_storage(
        current_settings(),
        folder,
        stripe_unit_bytes=DEFAULT_STRIPE_UNIT_BYTES if stripe_unit is None else stripe_unit,
        stripe_count=DEFAULT_STRIPE_COUNT if stripe_count is None else stripe_count,
        layout="plain" if layout == "plain" else "striped",
    ) as storage:
        yield Place(storage, name)


def described(info: "FileInfo", view: "FileView | None") -> dict[str, Any]:
    """A name in a tree, as `ls --json` and `stat --json` show it."""
    layout = view.layout if view else None
    segments = layout.segments if layout else ()
    return {
        "name": info.path.rpartition("/")[2],
        "type": "directory" if info.is_dir else "file",
        "bytes": view.size_bytes if view else 0,
        "modified_ns": info.modified_ns,
        "layout": None if view is None else "striped" if layout else "plain",
        "generation": layout.generation if layout else None,
        "segments": len(segments),
        "parts": sum(len(segment.parts) for segment in segments),
    }
