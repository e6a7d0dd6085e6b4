"""`bootseer checkpoint convert`: stores files in another form."""

import time

import click

from bootseer.cli.checkpoint.checkpoint_output import form_options, opened
from bootseer.cli.output import (
    Seconds,
    emit_json,
    human_bytes,
    json_option,
    one_line,
    say,
)
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    exit_code_of,
)


@click.command(epilog="Example: bootseer checkpoint convert -r hdfs://namenode/models/llama")
@click.argument("url")
@click.option("-r", "--recursive", is_flag=True, help="Convert all files of a directory.")
@form_options
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(0, 86_400),
    default=30.0,
    show_default=True,
    metavar="TIME",
    help="How long the parts of a converted file stay for those who read it.",
)
@json_option
def convert(
    url: str,
    recursive: bool,
    stripe_unit: int | None,
    stripe_count: int | None,
    layout: str,
    grace_s: float,
    as_json: bool,
) -> int:
    """Store files in another form: striped, plain, or with another unit or count.

    A file is replaced in one step, once its new form is whole and durable, and only if nobody else
    has replaced it meanwhile (exit code 19; theirs stays). Killed at any time, each file is in the
    old form or the new one. Files that fit into one stripe unit are always plain.
    """
    from bootseer.base.progress import Progress
    from bootseer.fuse.striped.tools.convert import convert_file, is_stored_as
    from bootseer.fuse.striped.tools.copy_tree import views_below

    started_s = time.monotonic()
    converted: list[str] = []
    size_bytes = 0
    failed: list[tuple[str, BootseerError]] = []
    had_parts_s: float | None = None
    with opened(url, stripe_unit=stripe_unit, stripe_count=stripe_count, layout=layout) as place:
        storage = place.storage
        assert storage is not None
        if place.is_dir() and not recursive:
            raise InvalidInputError(f"{place} is a directory; give -r to convert its files")
        views, damaged = views_below(storage, place.path)
        failed += [(info.path, error) for info, error in damaged]
        todo = [view for view in views if not is_stored_as(view, storage.settings)]
        with Progress("converting", sum(view.size_bytes for view in todo)) as progress:
            for view in todo:
                try:
                    if convert_file(storage, view.path, storage.settings, progress.advance):
                        converted.append(view.path)
                        size_bytes += view.size_bytes
                        if view.layout is not None:
                            had_parts_s = time.monotonic()
                except (BusyError, CorruptError) as error:
                    failed.append((view.path, error))
        if had_parts_s is not None:
            # The storage deletes them when it is closed.
            time.sleep(max(0.0, had_parts_s + grace_s - time.monotonic()))
    if as_json:
        emit_json(
            {
                "files": len(converted),
                "bytes": size_bytes,
                "unchanged": len(views) - len(todo),
                "failed": [{"path": path, "error": one_line(why)} for path, why in failed],
                "seconds": round(time.monotonic() - started_s, 3),
            }
        )
    else:
        for _, why in failed:
            click.echo(f"bootseer: {one_line(why)}", err=True)
        say(
            f"converted {len(converted)} files, {human_bytes(size_bytes)}; "
            f"{len(views) - len(todo)} were as wanted already"
        )
    return exit_code_of(failed[0][1]) if failed else 0
