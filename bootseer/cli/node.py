"""`bootseer status`, `unmount` and `slurm`: mounts and background processes of this node."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from bootseer.base.display import format_age
from bootseer.cli.command_tree import command, current_settings
from bootseer.cli.grammar import STANDBY, defaults
from bootseer.cli.options import time_option
from bootseer.cli.show import emit_table, shows
from bootseer.cli.text import human_bytes, printable, say, warn_unwritten
from bootseer.errors import EXIT_FAILURE, EXIT_OK, DeadlineError, NotFoundError
from bootseer.served.status import StatusEntry

CHECKPOINTS = ("checkpoints", "volume")
_COLUMNS = ("kind", "what", "where", "since", "server", "users", "health")

# ---- status -----------------------------------------------------------------------------------


class Served(Struct):
    """Mounts and background processes of this node; with DIR, the mount there."""

    served: list[StatusEntry]


def _asked(found: Served) -> StatusEntry | None:
    """Return the row of the directory that the command names, if it names one."""
    return found.served[0] if click.get_current_context().params["directory"] else None


def _show_served(found: Served) -> None:
    one = _asked(found)
    if one is None or one.figures is None:
        emit_entries(found.served)
        return
    show = _print_checkpoint_figures if one.kind in CHECKPOINTS else _print_image_figures
    show(one.figures)


def _code_of_served(found: Served) -> int:
    one = _asked(found)
    return EXIT_FAILURE if one is not None and one.health in ("dead", "silent") else EXIT_OK


@command("status", epilog="Example: bootseer status /mnt/train")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@time_option(
    "--wait",
    "wait_s",
    help="First wait, at most for this time, until records and pulled images are published.",
)
@shows(Served, text=_show_served, code=_code_of_served)
def status(directory: Path | None, wait_s: float | None) -> Served:
    """Show mounts and background processes of this node, or the figures of the mount on DIR.

    A row for each image, environment, checkpoint folder, attendant, preloader, publisher and
    warming process: kind, place, start time, the processes that serve and use it, and problems with
    their remedies. Mounts of other users are listed by name. --json has all figures of each mount.
    With DIR, the exit code is 1 if the server is dead or does not answer.
    """
    settings = current_settings()
    if wait_s is not None:
        from bootseer.prefetch.publish.publishing import wait_published

        if not wait_published(settings, wait_s):
            raise DeadlineError(f"a record was still being published after {wait_s:g} s")
    if directory is not None:
        return Served([_entry_at(settings.run_dir, directory)])
    return Served(node_entries(settings.run_dir))


def _entry_at(run_dir: Path, directory: Path) -> StatusEntry:
    """Return the row of the mount on `directory`, with the throughput of this moment.

    Raises: NotFoundError; UnavailableError, DeadlineError where a checkpoint mount's server is
        silent.
    """
    from bootseer.fuse.striped.mounted.status import mount_status
    from bootseer.linux.mount_table import absolute
    from bootseer.served.service import services
    from bootseer.served.status import status_entry

    path = str(absolute(directory))
    found = [
        entry
        for one in services(run_dir)
        if path in (*(entry := status_entry(one, run_dir)).where, one.state.directory)
    ]
    if not found:
        raise NotFoundError(
            f"nothing of Bootseer's is mounted on {path}; `bootseer status` shows what is mounted"
        )
    entry = max(found, key=lambda one: (one.figures is not None, one.since_s or 0))
    if entry.kind in CHECKPOINTS and entry.figures is not None:
        return replace(entry, figures=mount_status(run_dir, directory))
    return entry


def node_entries(run_dir: Path) -> list[StatusEntry]:
    """Return a row for each mount and background process of this node; asks the servers."""
    from bootseer.served.service import services
    from bootseer.served.status import foreign_entries, status_entry

    found = services(run_dir)
    return [*(status_entry(one, run_dir) for one in found), *foreign_entries(found, run_dir)]


def emit_entries(entries: Sequence[StatusEntry]) -> None:
    """Print a row for each entry, and a line for each that has a problem."""
    emit_table(_COLUMNS, map(_cells, entries))
    for one in entries:
        if one.problem:
            place = ", ".join(one.where) or one.what
            click.echo(printable(f"{one.kind} {place}: {one.problem}; {one.remedy}"))


def _cells(one: StatusEntry) -> tuple[str, ...]:
    server = " ".join(str(pid) for pid in (one.pid, one.worker_pid) if pid)
    users = " ".join(map(str, one.users))
    what = one.what
    if one.until_s is not None:
        # In whole minutes, rounded up: what was just asked for is shown as it was asked for.
        minutes = math.ceil((one.until_s - time.time()) / 60)
        what += f" (for another {_age(60 * minutes)})"
    since = "" if one.since_s is None else _age(time.time() - one.since_s)
    return (one.kind, what, ", ".join(one.where), since, server, users, one.health)


def _age(seconds: float) -> str:
    return format_age(int(seconds * 1e9))


# ---- figures of a mount -------------------------------------------------------------------------


def _print_image_figures(one: Mapping[str, Any]) -> None:
    """Print the figures of a mounted image or environment: bytes by source, faults, prefetch.

    Precision is the share of the prefetched bytes that was used, recall the share of the bytes read
    that had been prefetched.
    """
    emit_table(("figure", "value"), _rows_of_image(one))


def _print_checkpoint_figures(one: Mapping[str, Any]) -> None:
    """Print the figures of a mounted checkpoint folder: bytes, requests, memory, open files."""
    title = f"{one['url']} on {one['directory']}"
    counts, memory, now = one["statistics"], one["memory"], one["throughput"]

    def moved(name: str) -> str:
        total = human_bytes(counts[f"{name}_bytes"])
        return f"{human_bytes(int(now[f'{name}_bytes_per_s']))}/s now, {total} in all"

    rows = [
        ("server", f"process {one['worker_pid']} under {one['pid']}, up {one['uptime_s']:.0f} s"),
        ("to readers", moved("served")),
        ("from the storage", moved("fetched")),
        ("to the storage", moved("written")),
        ("requests", one["requests"]),
        (
            "reads",
            f"{counts['fetch_count']}, retried {counts['read_retry_count']}, "
            f"late {counts['late_count']} (second answer first: {counts['late_won_count']}), "
            f"given up {counts['stuck_count']}, wrong checksum {counts['corrupt_count']}",
        ),
        (
            "writes",
            f"{counts['write_count']}, retried {counts['write_retry_count']}, "
            f"files finished {counts['published_count']}",
        ),
        (
            "memory",
            f"{human_bytes(memory['used_bytes'])} of {human_bytes(memory['limit_bytes'])}, "
            f"at most {human_bytes(memory['peak_bytes'])}",
        ),
        ("open", f"{one['files_open']} files, {one['streams_active']} sequential streams"),
        *(("unfinished", path) for path in one["unfinished"]),
        *(("error", error["message"]) for error in one["errors"]),
    ]
    emit_table(("", ""), rows, title=title)
    sources = counts["sources"]
    if sources:
        emit_table(
            ("place", "read bytes", "reads count", "late count", "written bytes"),
            (
                (
                    source["name"],
                    human_bytes(source["read_bytes"]),
                    source["read_count"],
                    source["late_count"],
                    human_bytes(source["written_bytes"]),
                )
                for source in sources
            ),
        )


def _rows_of_image(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    faults, sources, moved, fill = one["faults"], one["sources"], one["moved"], one["fill"]
    yield "directory", one["directory"]
    yield "image", one["reference"]
    yield "workload", one["workload"]
    yield "record", one["record"]
    yield "here", f"{human_bytes(one['cached_bytes'])} of {human_bytes(one['image_bytes'])}"
    yield "fetched", f"{human_bytes(moved['fetched_bytes'])} in {moved['fetch_count']} requests"
    yield "failed requests", f"{moved['retry_count']} tried again, {moved['failed_count']} given up"
    for name in ("bundle", "fault", "readahead", "fill", "cache"):
        yield f"from {name}", human_bytes(sources[f"{name}_bytes"])
    yield "faults", f"{faults['fault_count']}, {faults['failed_count']} of them failed"
    if faults["fault_count"]:
        names = ("wait_p50_ns", "wait_p99_ns", "wait_max_ns")
        median, high, longest = (_wait(faults[name]) for name in names)
        yield "waits", f"median {median}, p99 {high}, longest {longest}"
        for bucket in faults["waits"]:
            if bucket["count"]:
                bound = bucket["up_to_s"]
                name = "longer" if bound is None else f"up to {_wait(bound * 1e9)}"
                yield f"  {name}", str(bucket["count"])
    yield from _of_prefetch(one["prefetch"])
    rate = f", {human_bytes(fill['bytes_per_s'])}/s" if fill["bytes_per_s"] else ""
    yield "fill", f"{fill['state']}{rate}, {human_bytes(fill['missing_bytes'])} missing"


def _of_prefetch(prefetch: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if prefetch is None:
        yield "bundle", "none"
        return
    if prefetch["error"]:
        yield "bundle", f"given up: {prefetch['error']}"
    elif prefetch["finished_after_s"] is None:
        yield "bundle", f"{prefetch['remaining_frame_count']} frames to come"
    else:
        yield "bundle", f"here after {_wait(prefetch['finished_after_s'] * 1e9)}"
    yield "prefetched", human_bytes(prefetch["bundle_stream_bytes"])
    yield "used", f"{human_bytes(prefetch['used_bytes'])}, {_percent(prefetch['precision'])}"
    yield "wasted", human_bytes(prefetch["wasted_bytes"])
    yield (
        "missed",
        f"{human_bytes(prefetch['missed_bytes'])}, recall {_percent(prefetch['recall'])}",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _wait(time_ns: float) -> str:
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 1e9 else f"{time_ns / 1e9:.3g} s"


# ---- unmount ----------------------------------------------------------------------------------


class Unmounted(Struct):
    """Mount that was taken off."""

    directory: str
    unwritten: list[str] | UnsetType = UNSET
    """Files of a checkpoint folder that were still being written; they are lost."""
    still_mounted: bool | UnsetType = UNSET
    """Whether an earlier snapshot of the environment is still mounted there."""


def _say_covered(done: Unmounted) -> None:
    if done.still_mounted:
        say(f"an earlier snapshot is still mounted on {done.directory}; unmount it likewise")


@command("unmount", epilog="Example: bootseer unmount /mnt/train")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@time_option(
    "--timeout",
    "timeout_s",
    most_s=3600,
    help="How long open files of an image or a checkpoint folder may stay open before they are cut "
    "off (10 s).",
)
@click.option(
    "--lazy", is_flag=True, help="Unmount an environment even while files in it are open."
)
@shows(Unmounted, text=_say_covered, code=lambda done: EXIT_FAILURE if done.unwritten else EXIT_OK)
def unmount(directory: Path, timeout_s: float | None, lazy: bool) -> Unmounted:
    """Unmount an image, environment or checkpoint folder from DIR, also where its server is dead.

    Changes of an environment are lost. If files of a checkpoint folder were still being written,
    they are named, nothing of them is kept, and the exit code is 1.
    """
    from bootseer.fuse.striped.mounted.mount import unmount_checkpoints
    from bootseer.fuse.striped.mounted.options import SUBTYPE
    from bootseer.linux.mount_table import absolute, find_mount
    from bootseer.served.overlays import overlay_at
    from bootseer.served.service import find_checkpoints

    settings = current_settings()
    path = absolute(directory)
    if overlay_at(path) is not None:
        from bootseer.snapshots.mounted import unmount_snapshot

        if timeout_s is not None:
            raise click.UsageError("--timeout is not for environments; --lazy is")
        is_covered = bool(unmount_snapshot(settings, directory, lazy=lazy))
        return Unmounted(str(path), still_mounted=is_covered)
    if lazy:
        raise click.UsageError(f"--lazy is for environments, and none is mounted on {path}")
    wait_s = 10.0 if timeout_s is None else timeout_s
    mounted, known = find_mount(path), find_checkpoints(settings.run_dir, path)
    is_checkpoint = mounted.subtype == SUBTYPE if mounted else known and known.is_alive
    if is_checkpoint:
        lost = unmount_checkpoints(settings.run_dir, directory, timeout_s=wait_s)
        warn_unwritten(lost)
        return Unmounted(str(path), unwritten=list(lost))
    from bootseer.prefetch.images.mount import unmount_image

    unmount_image(settings, directory, timeout_s=wait_s)
    return Unmounted(str(path))


# ---- slurm ------------------------------------------------------------------------------------


@command("slurm prolog", epilog="Example: bootseer slurm prolog")
def slurm_prolog() -> None:
    """Unmount what killed jobs have left, and mount the checkpoint folders of the job's comment.

    The comment is in SLURM_JOB_COMMENT: `bootseer standby --checkpoint URL:DIR`.
    """
    from bootseer.cli.run import hold
    from bootseer.launch.slurm import requested_checkpoints, tidy

    settings = current_settings()
    tidy(settings, "", say)
    wished = requested_checkpoints(os.environ.get("SLURM_JOB_COMMENT", ""))
    if wished:
        hold(settings, (), {**defaults(STANDBY), "checkpoints": tuple(wished)})


@command("slurm epilog", epilog="Example: bootseer slurm epilog")
def slurm_epilog() -> None:
    """Clean up after the job SLURM_JOB_ID: its mounts, servers, timelines and cache.

    Unmounts what the job has left, ends its servers, publishes the timelines of its starts, and
    keeps the cache below its limit.
    """
    from bootseer.launch.attendant import publish_killed
    from bootseer.launch.slurm import tidy
    from bootseer.prefetch.cache.limit import CacheRoom

    settings = current_settings()
    job = os.environ.get("SLURM_JOB_ID", "")
    tidy(settings, job, say)
    if job:
        publish_killed(settings, job)
    CacheRoom(settings.cache_dir, settings.cache_limit_bytes).make_room()
