"""`bootseer checkpoint mount`: the striped checkpoint file system."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from bootseer.base.redact import public_url
from bootseer.cli.output import (
    Seconds,
    Size,
    current_settings,
    emit_json,
    json_option,
    say,
)
from bootseer.errors import PermissionDeniedError, UnsupportedError
from bootseer.linux.systemd import notify

_SIZE = Size()
# The last number means "nobody" to the kernel (chown(2)).
_ID_MAX = 2**32 - 2


class _Octal(click.ParamType[int]):
    """Permission bits, as "022"."""

    name = "mode"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            bits = value if isinstance(value, int) else int(str(value), 8)
        except ValueError:
            bits = -1
        if not 0 <= bits <= 0o777:
            self.fail(f"{value!r} is no octal number from 0 to 777.", param, ctx)
        return bits


@click.command(
    epilog="Example: bootseer checkpoint mount hdfs://namenode/checkpoints /mnt/checkpoints",
)
@click.argument("places", nargs=-1, metavar="URL DIRECTORY")
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--foreground", is_flag=True, help="Serve in this process until interrupted.")
@click.option("--stripe-unit", type=_SIZE, metavar="SIZE", help="Bytes per piece (4MiB).")
@click.option("--stripe-count", type=int, metavar="N", help="Parts of a file (8).")
@click.option(
    "--layout",
    type=click.Choice(["striped", "plain"]),
    default="striped",
    show_default=True,
    help="How new large files are stored.",
)
@click.option("--memory", type=_SIZE, metavar="SIZE", help="What the mount may hold in memory.")
@click.option(
    "--deadline",
    type=Seconds(1, 86400),
    metavar="TIME",
    help="How long the storage may be silent before a request fails.",
)
@click.option("--allow-other", is_flag=True, help="Let other users in.")
@click.option(
    "--uid", type=click.IntRange(0, _ID_MAX), metavar="N", help="Owner of all that is shown."
)
@click.option(
    "--gid", type=click.IntRange(0, _ID_MAX), metavar="N", help="Group of all that is shown."
)
@click.option("--umask", type=_Octal(), metavar="MODE", help="Permissions that nothing has (022).")
@click.option(
    "--lifetime-pid",
    type=click.IntRange(1, 2**22),
    metavar="PID",
    help="Unmount when this process ends.",
)
@click.option("--read-newest", is_flag=True, help="Read the newest checkpoint ahead.")
@click.option("--mkdir", is_flag=True, help="Make DIRECTORY where there is none.")
@click.option(
    "--immutable",
    is_flag=True,
    help="Let nobody write to DIRECTORY while nothing is mounted there, as chattr +i does.",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Serve the mount on DIRECTORY by a new process; what is open stays open.",
)
@click.option("--force", is_flag=True, help="Restart although files are being written.")
@click.option(
    "--timeout",
    type=Seconds(0, 86400),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="How long a restart waits for files that are being written, and the end by SIGTERM for "
    "open files.",
)
@json_option
def mount(
    places: tuple[str, ...],
    read_only: bool,
    foreground: bool,
    stripe_unit: int | None,
    stripe_count: int | None,
    layout: Literal["striped", "plain"],
    memory: int | None,
    deadline: float | None,
    allow_other: bool,
    uid: int | None,
    gid: int | None,
    umask: int | None,
    lifetime_pid: int | None,
    read_newest: bool,
    mkdir: bool,
    immutable: bool,
    restart: bool,
    force: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Mount the checkpoints at URL on DIRECTORY.

    Returns once the mount works; a process in the background serves it. With --foreground it exits
    with 1 and names them when files were still being written at its end: nothing of those is kept.
    Large files are striped
    over several files that are read and written in parallel; docs/SEMANTICS.md says what holds.
    What a killed server has left on DIRECTORY is taken off. SIGTERM to the server unmounts.
    """
    from bootseer.fuse.striped.mounted.mount import make_mount_point, mount_checkpoints, mount_spec
    from bootseer.fuse.striped.mounted.server import serve_checkpoints
    from bootseer.launch.checkpoints import made_sentence
    from bootseer.linux.processes import ProcessId
    from bootseer.served.status import find_known

    if restart:
        _restart(places, timeout, force, as_json)
        return 0
    if len(places) != 2:
        raise click.UsageError("Missing argument: give a URL and the directory to mount it on.")
    url, directory = places[0], Path(places[1])
    settings = current_settings()
    if mkdir:
        make_mount_point(settings.run_dir, directory)
    spec = mount_spec(
        settings,
        url,
        directory,
        read_only=read_only,
        allow_other=allow_other,
        stripe_unit_bytes=stripe_unit,
        stripe_count=stripe_count,
        memory_bytes=memory,
        deadline_s=deadline,
        layout=layout,
        uid=uid,
        gid=gid,
        umask=umask,
        user=None if lifetime_pid is None else ProcessId.of(lifetime_pid),
        read_newest=read_newest,
        shutdown_s=timeout,
    )
    if immutable:
        protect(directory)
    if foreground:

        def ready() -> None:
            click.echo(f"{public_url(url)} is mounted on {directory}", err=True)
            known = find_known(settings.run_dir, Path(spec.directory))
            if known is not None and known.state.root_was_made:
                say(made_sentence(url))
            notify("READY=1")

        return warn_unwritten(serve_checkpoints(spec, ready))
    mounted = mount_checkpoints(spec, forks=True)
    if mounted.root_was_made:
        say(made_sentence(url))
    if as_json:
        emit_json(
            {
                "url": public_url(mounted.url),
                "directory": mounted.directory,
                "pid": mounted.pid,
                "log": mounted.log,
                "created": mounted.root_was_made,
            }
        )
    else:
        click.echo(
            f"{public_url(url)} is mounted on {mounted.directory} (log: {mounted.log})", err=True
        )
    return 0


def protect(directory: Path) -> None:
    """Make the mount point immutable; where its file system cannot, a warning is enough."""
    from bootseer.fuse.striped.mounted.mount import make_immutable

    try:
        make_immutable(directory)
    except (UnsupportedError, PermissionDeniedError) as error:
        say(f"warning: {error}; between mounts, programs would write into that folder itself")


def _restart(places: tuple[str, ...], timeout_s: float, force: bool, as_json: bool) -> None:
    from bootseer.fuse.striped.mounted.mount import restart_checkpoints

    if len(places) != 1:
        raise click.UsageError("--restart takes one directory.")
    pid = restart_checkpoints(
        current_settings().run_dir, Path(places[0]), timeout_s=timeout_s, force=force
    )
    if as_json:
        emit_json({"directory": places[0], "worker_pid": pid})
    else:
        click.echo(f"process {pid} serves {places[0]} now", err=True)


def warn_unwritten(paths: Sequence[str]) -> int:
    """Name the files whose last bytes are lost; the exit code."""
    for path in paths:
        click.echo(f"bootseer: {path} was still being written: nothing of it is kept", err=True)
    return 1 if paths else 0
