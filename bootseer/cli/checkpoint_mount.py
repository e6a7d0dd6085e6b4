"""`bootseer checkpoint mount` and `restart`: the striped checkpoint file system."""

from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.cli.checkpoint import form_options
from bootseer.cli.command_tree import command, current_settings
from bootseer.cli.options import Octal, Seconds, Size
from bootseer.cli.show import document_of, shows
from bootseer.cli.text import say, tell, warn_unwritten
from bootseer.errors import PermissionDeniedError, UnsupportedError

# The number above means "unchanged" to the kernel (chown(2)).
_ID_MAX = 2**32 - 2


class NewCheckpointMount(Struct):
    """Checkpoint folder that was mounted."""

    url: str
    """URL without credentials."""
    directory: str
    pid: int
    """Process id of the server."""
    log: str
    created: bool
    """Whether the folder at the URL was missing, and was made."""


class Restarted(Struct):
    """Mount that a new process serves."""

    directory: str
    worker_pid: int
    """Process that answers now."""


def _show_mounted(done: NewCheckpointMount) -> None:
    tell(f"{done.url} is mounted on {done.directory} (log: {done.log})")


@command(
    "checkpoint mount",
    epilog="Example: bootseer checkpoint mount hdfs://namenode/checkpoints /mnt/checkpoints",
)
@click.argument("url")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--foreground", is_flag=True, help="Serve in this process until interrupted.")
@form_options
@click.option("--memory", type=Size(), metavar="SIZE", help="Memory limit of the mount.")
@click.option(
    "--deadline",
    type=Seconds(1, 86400),
    metavar="TIME",
    help="Time without an answer of the storage after which a request fails.",
)
@click.option("--allow-other", is_flag=True, help="Allow access by other users.")
@click.option("--uid", type=click.IntRange(0, _ID_MAX), metavar="N", help="Owner of all files.")
@click.option("--gid", type=click.IntRange(0, _ID_MAX), metavar="N", help="Group of all files.")
@click.option(
    "--umask", type=Octal(), metavar="MODE", help="Permission bits that no file has (022)."
)
@click.option(
    "--lifetime-pid",
    type=click.IntRange(1, 2**22),
    metavar="PID",
    help="Unmount when this process ends.",
)
@click.option("--read-newest", is_flag=True, help="Read the newest checkpoint ahead.")
@click.option("--page-cache", is_flag=True, help="Let the kernel cache the bytes that are read.")
@click.option("--mkdir", is_flag=True, help="Create DIRECTORY if it does not exist.")
@click.option(
    "--immutable",
    is_flag=True,
    help="Make DIRECTORY itself immutable (chattr +i), against writes while nothing is mounted.",
)
@click.option(
    "--timeout",
    type=Seconds(0, 86400),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="Time for which SIGTERM waits for open files.",
)
@shows(NewCheckpointMount, text=_show_mounted)
def checkpoint_mount(
    url: str,
    directory: Path,
    *,
    foreground: bool,
    stripe_unit: int | None,
    memory: int | None,
    deadline: float | None,
    lifetime_pid: int | None,
    mkdir: bool,
    immutable: bool,
    timeout: float,
    **choices: Any,
) -> NewCheckpointMount | None:
    """Mount the checkpoints at URL on DIRECTORY.

    Returns once the mount works; a background process serves it. Large files are striped over
    several files that are read and written in parallel; docs/SEMANTICS.md lists the guarantees. A
    mount that a killed server has left on DIRECTORY is unmounted first. SIGTERM to the server
    unmounts. With --foreground, files that are still being written at the end are named and lost,
    and the exit code is 1.
    """
    from bootseer.fuse.striped.mounted.mount import make_mount_point, mount_checkpoints, mount_spec
    from bootseer.launch.checkpoints import created_warning
    from bootseer.linux.processes import ProcessId

    settings = current_settings()
    if mkdir:
        make_mount_point(settings.run_dir, directory)
    spec = mount_spec(
        settings,
        url,
        directory,
        stripe_unit_bytes=stripe_unit,
        memory_bytes=memory,
        deadline_s=deadline,
        user=None if lifetime_pid is None else ProcessId.of(lifetime_pid),
        shutdown_s=timeout,
        **choices,
    )
    if immutable:
        _protect(directory)
    if foreground:
        from bootseer.fuse.striped.mounted.server import serve_checkpoints
        from bootseer.linux.systemd import notify
        from bootseer.served.service import find_checkpoints

        def ready() -> None:
            tell(f"{public_url(url)} is mounted on {directory}")
            known = find_checkpoints(settings.run_dir, Path(spec.directory))
            if known is not None and known.state.root_was_made:
                say(created_warning(url))
            notify("READY=1")

        click.get_current_context().exit(warn_unwritten(serve_checkpoints(spec, ready)))
    mounted = mount_checkpoints(spec, forks=True)
    if mounted.root_was_made:
        say(created_warning(url))
    return document_of(
        NewCheckpointMount, mounted, url=public_url(mounted.url), created=mounted.root_was_made
    )


def _protect(directory: Path) -> None:
    """Make the mount point immutable; where its file system cannot, a warning is enough."""
    from bootseer.fuse.striped.mounted.mount import make_immutable

    try:
        make_immutable(directory)
    except (UnsupportedError, PermissionDeniedError) as error:
        say(f"warning: {error}; between mounts, programs would write into that folder itself")


@command(
    "checkpoint restart",
    epilog="Example: bootseer checkpoint restart /mnt/checkpoints --timeout 5m",
)
@click.argument("directory")
@click.option("--force", is_flag=True, help="Restart even if files are being written.")
@click.option(
    "--timeout",
    type=Seconds(0, 86400),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="Longest wait for files that are being written.",
)
@shows(Restarted, text=lambda one: tell(f"process {one.worker_pid} serves {one.directory} now"))
def checkpoint_restart(directory: str, force: bool, timeout: float) -> Restarted:
    """Serve the mount on DIRECTORY by a new process, with the code that is installed now.

    Open files stay open. The command waits for files that are being written, and gives up after
    --timeout; with --force it does not wait, and their writers get an error.
    """
    from bootseer.fuse.striped.mounted.mount import restart_checkpoints

    pid = restart_checkpoints(
        current_settings().run_dir, Path(directory), timeout_s=timeout, force=force
    )
    return Restarted(directory, pid)
