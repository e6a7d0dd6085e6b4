"""`bootseer checkpoint verify` and `fsck`: what checks striped checkpoints.

`CHECK_COMMANDS` are added to the group `stripe` by `stripe_commands`.
"""

import time
from typing import TYPE_CHECKING, Any

import click

from bootseer.base.shown import shown_age
from bootseer.cli.checkpoint.checkpoint_output import opened
from bootseer.cli.output import (
    Age,
    Seconds,
    emit_json,
    emit_table,
    human_bytes,
    json_option,
    say,
)
from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    exit_code_of,
)

if TYPE_CHECKING:
    from bootseer.fuse.striped.tools.fsck import Garbage

_READS_AT_ONCE = 16
_FILES_AT_ONCE = 4


@click.command(epilog="Example: bootseer checkpoint verify hdfs://namenode/checkpoints/step-1000")
@click.argument("url")
@json_option
def verify(url: str, as_json: bool) -> int:
    """Read every byte of a file or directory and check it against its checksums.

    Names each damaged block with the part that holds it. Ordinary files have no checksums of ours:
    of those it only shows that they can be read. Exits with 15 when something is damaged.
    """
    from concurrent.futures import ThreadPoolExecutor

    from bootseer.base.parallel import Stoppable, each_at_once
    from bootseer.base.progress import Progress
    from bootseer.fuse.striped.tools.copy_tree import views_below
    from bootseer.fuse.striped.tools.verify import verify_file

    started_s = time.monotonic()
    damaged: list[dict[str, Any]] = []
    with opened(url) as place:
        storage = place.storage
        assert storage is not None
        views, unreadable = views_below(storage, place.path)
        damaged += [
            _damage(info.path, info.path, 0, 0, info.size_bytes, str(error))
            for info, error in unreadable
        ]
        with (
            Progress("verifying", sum(view.size_bytes for view in views)) as bar,
            ThreadPoolExecutor(_READS_AT_ONCE) as reads,
        ):
            progress = Stoppable(bar.advance)
            found = each_at_once(
                {view.path: view for view in views},
                lambda path, view: verify_file(storage.backend, view, reads, progress),
                progress,
                thread_count=_FILES_AT_ONCE,
                thread_name="verify",
                size_of=lambda view: view.size_bytes,
            )
        damaged += [
            _damage(path, one.stored_path, one.stored_offset, one.offset, one.length, one.reason)
            for path, ones in found.items()
            for one in ones
        ]
    document = {
        "files": len(views),
        "striped_files": sum(view.layout is not None for view in views),
        "bytes": sum(view.size_bytes for view in views),
        "seconds": round(time.monotonic() - started_s, 3),
        "damaged": damaged,
    }
    if as_json:
        emit_json(document)
    else:
        if damaged:
            emit_table(
                ("file", "offset", "bytes", "part", "part offset", "reason"),
                (
                    (
                        one["path"],
                        one["offset"],
                        one["bytes"],
                        one["part"],
                        one["part_offset"],
                        one["reason"],
                    )
                    for one in damaged
                ),
            )
        say(
            f"verified {document['files']} files ({document['striped_files']} striped), "
            f"{human_bytes(sum(view.size_bytes for view in views))}: "
            + (f"{len(damaged)} damages" if damaged else "all as it was written")
        )
    return exit_code_of(CorruptError()) if damaged else 0


def _damage(
    path: str, part: str, part_offset: int, offset: int, length: int, reason: str
) -> dict[str, Any]:
    return {
        "path": path,
        "offset": offset,
        "bytes": length,
        "part": part,
        "part_offset": part_offset,
        "reason": reason,
    }


@click.command(epilog="Example: bootseer checkpoint fsck --delete hdfs://namenode/checkpoints")
@click.argument("url")
@click.option("--delete", is_flag=True, help="Delete garbage that is older than --age.")
@click.option(
    "--age",
    "age_s",
    type=Age(),
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Spare what was written to within that time, at least 1h.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(0, 86_400),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="Look again after that time: what was just replaced may be being read.",
)
@json_option
def fsck(url: str, delete: bool, age_s: float, grace_s: float, as_json: bool) -> int:
    """Find files whose parts are missing, and what crashed savers left behind.

    Reads layouts and listings, no contents. --delete removes garbage, never a save that is going on
    on another node: what is young by the storage's clock stays, and on HDFS what somebody has open
    for writing. Exits with 15 when a file cannot be read in whole.
    """
    from bootseer.fuse.striped.tools.fsck import MIN_AGE_S, check_tree, delete_garbage

    if delete and age_s < MIN_AGE_S:
        raise InvalidInputError("--age must be at least 1h: a save may pause for that long")
    deleted: list[Garbage] = []
    with opened(url) as place:
        assert place.storage is not None
        if place.path and not place.is_dir():
            place.storage.backend.stat(place.path)
            raise InvalidInputError(f"{place} is a file; give the directory that it is in")
        reports = list(check_tree(place.storage, place.path))
        if delete and any(report.garbage for report in reports):
            time.sleep(grace_s)
            for report in reports:
                deleted += delete_garbage(place.storage, report, age_s)
    troubles = [trouble for report in reports for trouble in report.troubles]
    garbage = [one for report in reports for one in report.garbage]
    gone = {one.path for one in deleted}
    now_ns = time.time_ns()
    if as_json:
        emit_json(
            {
                "directories": len(reports),
                "files": sum(report.file_count for report in reports),
                "troubles": [
                    {
                        "path": one.path,
                        "part": one.part,
                        "reason": one.reason,
                        "expected_bytes": one.expected_bytes,
                        "found_bytes": one.found_bytes,
                    }
                    for one in troubles
                ],
                "garbage": [
                    {
                        "path": one.path,
                        "bytes": one.size_bytes,
                        "modified_ns": one.modified_ns,
                        "deleted": one.path in gone,
                    }
                    for one in garbage
                ],
                "deleted_bytes": sum(one.size_bytes for one in deleted),
            }
        )
    else:
        if troubles:
            emit_table(
                ("file", "reason", "part", "expected size", "found size"),
                (
                    (one.path, one.reason, one.part, one.expected_bytes, one.found_bytes)
                    for one in troubles
                ),
            )
        if garbage:
            emit_table(
                ("garbage", "size", "age", ""),
                (
                    (
                        one.path,
                        human_bytes(one.size_bytes),
                        shown_age(now_ns - one.modified_ns),
                        "deleted" if one.path in gone else "",
                    )
                    for one in garbage
                ),
            )
        say(
            f"{sum(report.file_count for report in reports)} files in {len(reports)} directories: "
            f"{len(troubles)} troubles, {len(garbage) - len(gone)} pieces of garbage"
        )
        if delete:
            freed = sum(one.size_bytes for one in deleted)
            say(f"deleted {len(gone)} pieces of garbage, {human_bytes(freed)}")
    return exit_code_of(CorruptError()) if troubles else 0


CHECK_COMMANDS = (verify, fsck)
