"""`bootseer mount` and `bootseer unmount`: the striped checkpoint file system."""

from pathlib import Path

import click

from bootseer.cli.output import Seconds, Size, current_settings, emit_json, json_option
from bootseer.redact import public_url

_SIZE = Size()


@click.command(epilog="Example: bootseer mount hdfs://namenode/checkpoints /mnt/checkpoints")
@click.argument("url")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--foreground", is_flag=True, help="Serve in this process until interrupted.")
@click.option("--stripe-unit", type=_SIZE, metavar="SIZE", help="Bytes per piece (4MiB).")
@click.option("--stripe-count", type=int, metavar="N", help="Parts of a file (8).")
@click.option("--memory", type=_SIZE, metavar="SIZE", help="What the mount may hold in memory.")
@click.option("--allow-other", is_flag=True, help="Let other users in.")
@click.option(
    "--lifetime-pid", type=click.IntRange(1), metavar="PID", help="Unmount when this process ends."
)
@click.option("--warm", is_flag=True, help="Read the newest checkpoint ahead.")
@json_option
def mount(
    url: str,
    directory: Path,
    read_only: bool,
    foreground: bool,
    stripe_unit: int | None,
    stripe_count: int | None,
    memory: int | None,
    allow_other: bool,
    lifetime_pid: int | None,
    warm: bool,
    as_json: bool,
) -> None:
    """Mount the checkpoints at URL on DIRECTORY.

    Returns once the mount works; a process in the background serves it. Large files are striped
    over several files that are read and written in parallel; docs/SEMANTICS.md says what holds.
    """
    from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
    from bootseer.fuse.striped.mount import mount_checkpoints, mount_spec
    from bootseer.fuse.striped.server import serve_checkpoints

    settings = current_settings()
    spec = mount_spec(
        settings,
        url,
        directory,
        read_only=read_only,
        allow_other=allow_other,
        stripe_unit_bytes=DEFAULT_STRIPE_UNIT_BYTES if stripe_unit is None else stripe_unit,
        stripe_count=DEFAULT_STRIPE_COUNT if stripe_count is None else stripe_count,
        memory_bytes=memory,
        lifetime_pid=lifetime_pid,
        warm=warm,
    )
    if foreground:
        _warn_unwritten(
            serve_checkpoints(
                spec, lambda: click.echo(f"{public_url(url)} is mounted on {directory}", err=True)
            )
        )
        return
    mounted = mount_checkpoints(spec)
    if as_json:
        emit_json(
            {
                "url": public_url(mounted.url),
                "directory": mounted.directory,
                "pid": mounted.pid,
                "log": mounted.log,
            }
        )
    else:
        click.echo(
            f"{public_url(url)} is mounted on {mounted.directory} (log: {mounted.log})", err=True
        )


@click.command(epilog="Example: bootseer unmount /mnt/checkpoints")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--timeout",
    type=Seconds(0, 3600),
    default=10.0,
    show_default=True,
    metavar="S",
    help="How long open files may stay open before they are cut off.",
)
@json_option
def unmount(directory: Path, timeout: float, as_json: bool) -> int:
    """Unmount what `bootseer mount` mounted, also when it is stuck.

    Exits with 1 and names them when files were still being written: nothing of those is kept.
    """
    from bootseer.fuse.striped.mount import unmount_checkpoints

    unwritten = unmount_checkpoints(current_settings().run_dir, directory, timeout_s=timeout)
    if as_json:
        emit_json({"directory": directory, "unwritten": list(unwritten)})
    return _warn_unwritten(list(unwritten))


def _warn_unwritten(paths: list[str]) -> int:
    for path in paths:
        click.echo(f"bootseer: {path} was still being written: nothing of it is kept", err=True)
    return 1 if paths else 0
