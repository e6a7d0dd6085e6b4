"""`bootseer checkpoint`: striped checkpoints without mounting them: copy and look.

The commands that check checkpoints are in `check_commands`, and mounting in `mount_commands`.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.base.redact import public_url
from bootseer.cli.checkpoint.check_commands import CHECK_COMMANDS
from bootseer.cli.checkpoint.checkpoint_output import described, form_options, opened
from bootseer.cli.checkpoint.convert_command import convert
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import (
    emit_json,
    emit_table,
    human_bytes,
    human_time,
    json_option,
    printable,
    say,
)
from bootseer.errors import BootseerError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from bootseer.fuse.striped.storage import StripedStorage
    from bootseer.fuse.striped.tools.copy_tree import Place
    from bootseer.store.backend import FileInfo


@click.group(
    cls=LazyGroup,
    elsewhere={"mount": ("checkpoint.mount_commands", "mount")},
)
def checkpoint() -> None:
    """Striped checkpoints: mount them, or copy, list, check and convert them without a mount.

    A URL (`hdfs://...`, `file://...`, `s3://...`) names what is stored, striped or not; a path
    without "://" is a local file.
    """


for _command in (*CHECK_COMMANDS, convert):
    checkpoint.add_command(_command)


@checkpoint.command(
    epilog="Example: bootseer checkpoint cp -r step-1000 hdfs://namenode/checkpoints/"
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("target")
@click.option("-r", "--recursive", is_flag=True, help="Copy directories.")
@form_options
@json_option
def cp(
    sources: tuple[str, ...],
    target: str,
    recursive: bool,
    stripe_unit: int | None,
    stripe_count: int | None,
    layout: str,
    as_json: bool,
) -> None:
    """Copy files into, out of or between striped trees.

    Each file appears whole or not at all, also when this is killed; so does a directory that is not
    there yet, where the storage can rename one. An existing TARGET directory, or one that ends
    in "/", gets the sources into it. Names are replaced as by cp.
    """
    from bootseer.base.progress import Progress
    from bootseer.fuse.striped.tools.copy_tree import Place, copy_one, copy_tree, is_url

    if not any(map(is_url, (*sources, target))):
        raise InvalidInputError("none of these is a URL: for local files use cp")
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:

        def place(text: str) -> Place:
            if not is_url(text):
                return Place(None, os.path.abspath(text))
            context = opened(
                text, stripe_unit=stripe_unit, stripe_count=stripe_count, layout=layout
            )
            return stack.enter_context(context)

        into = place(target)
        is_into = target.endswith("/") or into.is_dir()
        if len(sources) > 1 and not is_into:
            raise InvalidInputError(f"{public_url(target)} is not a directory")
        jobs = [_job(place(source), into, is_into, recursive) for source in sources]
        total = sum(sum(sizes.values()) for _, _, sizes in jobs)
        files = size_bytes = 0
        with Progress("copying", total) as progress:
            for source, goal, sizes in jobs:
                if "" in sizes:
                    size_bytes += copy_one(source, goal, progress.advance)
                    files += 1
                    continue
                copied = copy_tree(source, goal, sizes, progress.advance)
                files += copied.file_count
                size_bytes += copied.size_bytes
    seconds = time.monotonic() - started_s
    if as_json:
        emit_json({"files": files, "bytes": size_bytes, "seconds": round(seconds, 3)})
    else:
        rate = human_bytes(size_bytes / max(seconds, 1e-3))
        say(f"copied {files} files, {human_bytes(size_bytes)} in {seconds:.1f} s ({rate}/s)")


def _job(
    source: "Place", into: "Place", is_into: bool, recursive: bool
) -> "tuple[Place, Place, dict[str, int]]":
    """What is copied to where, and its files with their sizes; "" is the source itself."""
    from bootseer.fuse.striped.tools.copy_tree import sizes_below

    goal = into.at(source.name) if is_into and source.name else into
    if not source.is_dir():
        if not source.exists():
            raise NotFoundError(f"{source} does not exist")
        if goal.is_dir():
            raise InvalidInputError(f"{goal} is a directory")
        if source.storage is None:
            return source, goal, {"": Path(source.path).stat().st_size}
        return source, goal, {"": source.storage.tree.stored.status(source.path).size_bytes}
    if not recursive:
        raise InvalidInputError(f"{source} is a directory; give -r to copy it")
    return source, goal, sizes_below(source)


@checkpoint.command(
    epilog="Example: bootseer checkpoint ls -l hdfs://namenode/checkpoints/step-1000"
)
@click.argument("url")
@click.option("-l", "--long", "at_length", is_flag=True, help="Size, time and layout of each.")
@json_option
def ls(url: str, at_length: bool, as_json: bool) -> None:
    """List a directory of a striped tree, or one file."""
    with opened(url) as place:
        assert place.storage is not None
        stored = place.storage.tree.stored
        info = place.storage.backend.stat(place.path) if place.path else None
        infos = [info] if info is not None and not info.is_dir else stored.entries(place.path)
        if not at_length and not as_json:
            for each in infos:
                click.echo(printable(each.path.rpartition("/")[2]))
            return
        found = _described_all(place.storage, infos)
    if as_json:
        emit_json(found)
        return
    emit_table(
        ("size", "modified", "layout", "name"),
        (
            (
                "" if one["type"] == "directory" else human_bytes(one["bytes"]),
                human_time(one["modified_ns"]),
                _layout(one),
                one["name"] + ("/" if one["type"] == "directory" else ""),
            )
            for one in found
        ),
    )


def _described_all(storage: "StripedStorage", infos: "list[FileInfo]") -> list[dict[str, Any]]:
    from concurrent.futures import ThreadPoolExecutor

    def describe(info: "FileInfo") -> dict[str, Any]:
        try:
            view = None if info.is_dir else storage.tree.stored.view_of(info)
        except NotFoundError:
            return {}
        except BootseerError as error:
            return {**described(info, None), "layout": "damaged", "error": str(error)}
        return described(info, view)

    with ThreadPoolExecutor(8) as threads:
        return [one for one in threads.map(describe, infos) if one]


def _layout(one: dict[str, Any]) -> str:
    if one["layout"] != "striped":
        return one["layout"] or ""
    segments = f", {one['segments']} segments" if one["segments"] > 1 else ""
    return f"striped over {one['parts']}{segments}"


@checkpoint.command(
    epilog="Example: bootseer checkpoint stat hdfs://namenode/checkpoints/step-1000/model"
)
@click.argument("url")
@json_option
def stat(url: str, as_json: bool) -> None:
    """Show how one file is stored: generation, segments, parts and their sizes."""
    from bootseer.fuse.striped.view import generation_folder

    with opened(url) as place:
        assert place.storage is not None
        if place.is_dir():
            raise InvalidInputError(f"{public_url(url)} is a directory; use ls")
        info = place.storage.backend.stat(place.path)
        view = place.storage.tree.stored.view_of(info)
    segments = [
        {
            "generation": segment.generation,
            "bytes": segment.size_bytes,
            "stripe_unit_bytes": segment.stripe_unit_bytes,
            "block_bytes": segment.block_bytes,
            "parts": [
                {
                    "path": f"{generation_folder(view.directory, segment.generation)}/{part.name}",
                    "bytes": part.size_bytes,
                }
                for part in segment.parts
            ],
        }
        for segment in (view.layout.segments if view.layout else ())
    ]
    if as_json:
        emit_json({**described(info, view), "segments": segments})
        return
    kind = "striped" if view.layout else "plain (an ordinary file)"
    click.echo(f"{printable(view.path)}: {kind}, {view.size_bytes} bytes")
    click.echo(f"modified {human_time(info.modified_ns)}")
    if view.layout:
        click.echo(f"generation {view.layout.generation}")
        emit_table(
            ("segment", "part", "bytes", "stripe unit bytes"),
            (
                (index, part.name, part.size_bytes, segment.stripe_unit_bytes)
                for index, segment in enumerate(view.layout.segments)
                for part in segment.parts
            ),
        )
