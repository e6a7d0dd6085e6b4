"""The command line. Owns the list of groups, the settings flags and the translation of errors to
one line and an exit code; each group lives in its own `*_commands.py` and is imported only when
used, so that `bootseer run` costs little more than the interpreter.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading

import click

from bootseer import __version__
from bootseer.base.redact import redact
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import SettingsSource, one_line, printable, setting_options
from bootseer.errors import EXIT_FAILURE, EXIT_OK, BootseerError, exit_code_of, missing_package

_log = logging.getLogger(__name__)

# name -> (module, one-line help); the command has the name itself. The help is repeated here so
# that listing the commands imports none of them.
_COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run_commands", "Start a training job: image, environment, checkpoint, then exec."),
    "standby": ("run_commands", "Hold the mounts of a job for its start on this node."),
    "image": ("image.image_commands", "Container images: index, mount, run, record and replay."),
    "snapshot": ("snapshot.snapshot_commands", "Environments: capture once, restore everywhere."),
    "cache": ("cache_commands", "Caches of compilers and frameworks, kept between starts."),
    "store": ("store_commands", "The shared store: delete what nobody needs."),
    "checkpoint": (
        "checkpoint.checkpoint_commands",
        "Striped checkpoints: mount, copy, check, convert.",
    ),
    "warm": ("warm_commands", "Directories that are not ours: record once, read ahead later."),
    "snapshotter": (
        "image.snapshotter_commands",
        "Serve images to containerd, without pulling them.",
    ),
    "kubernetes": (
        "kubernetes.kubernetes_commands",
        "What Bootseer's own pods run on a cluster.",
    ),
    "slurm": ("node.slurm_commands", "What prolog and epilog of Slurm do on a node."),
    "status": (
        "node.status_commands",
        "What is mounted, or runs in the background, on this node.",
    ),
    "unmount": (
        "node.status_commands",
        "Take an image, environment or checkpoint folder off its directory.",
    ),
    "report": ("report.report_commands", "Where the time of a start went."),
    "watch": ("report.watch_commands", "Follow a start that is under way."),
    "config": ("node.config_commands", "Show the settings and where each came from."),
    "doctor": ("node.doctor_commands", "Check this machine and say what to do."),
    "demo": ("demo_commands", "Launch a job twice on this machine and compare."),
}


class _Commands(LazyGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(
    cls=_Commands,
    elsewhere={name: (module, name) for name, (module, _) in _COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' -- python train.py",
)
@click.version_option(__version__, prog_name="bootseer")
@setting_options("store_url", "cache_dir", "run_dir", "timeline_dir", "job", "attempt", "workload")
@click.option("-v", "--verbose", count=True, help="Log more; twice for debugging.")
@click.pass_context
def cli(ctx: click.Context, /, verbose: int, **flags: str | None) -> None:
    """Bootseer cuts the start-up time of large training jobs.

    Every setting is also a BOOTSEER_* variable and a line of bootseer.toml; see
    `bootseer config show`.
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RedactingFormatter("bootseer: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    ctx.obj = SettingsSource(flags)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command, translate errors, exit."""
    _open_standard_files()
    code = _run(arguments)
    # Here, since the interpreter's own flush at exit can only complain.
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or _output_lost(error)
    if arguments is None:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End this program as the interpreter does, but for taking every module apart, which takes a
    quarter of a short command's time. Returns where something else is to be waited for."""
    threads = [one for one in threading.enumerate() if one is not threading.main_thread()]
    if any(not one.daemon for one in threads):
        return
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str] | None) -> int:
    stdout = sys.stdout
    try:
        result = cli.main(args=arguments, prog_name="bootseer", standalone_mode=False)
        return result if isinstance(result, int) else EXIT_OK
    except SystemExit as error:
        if sys.stdout is not stdout:
            # Click has met a closed pipe, put a wrapper in its place, and would exit with 1.
            return _output_lost(BrokenPipeError())
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except click.exceptions.Abort:
        click.echo("bootseer: interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError as error:
        return _output_lost(error)
    except (BootseerError, OSError) as error:
        if not isinstance(error, BootseerError) and _is_output_lost():
            return _output_lost(error)
        return _refused(error)
    except ModuleNotFoundError as error:
        said = missing_package(error)
        return _internal_error(error) if said is error else _refused(said)
    except Exception as error:
        return _internal_error(error)


def _refused(error: BaseException) -> int:
    """One sentence that says what failed; the exit code."""
    _log.debug("what failed, for debugging", exc_info=True)
    click.echo(f"bootseer: {one_line(error)}", err=True)
    return exit_code_of(error)


def _internal_error(error: Exception) -> int:
    """A fault of ours. Still one sentence: it is read by the person who is on call for the job."""
    _log.debug("what failed, for debugging", exc_info=True)
    click.echo(
        f"bootseer: internal error: {type(error).__name__}: {one_line(error)}; "
        "run it again with -vv and please report what that prints",
        err=True,
    )
    return EXIT_FAILURE


def _is_output_lost() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _output_lost(error: OSError) -> int:
    """Exit code for a stdout that takes no more; nothing further is sent there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        # The reader went away (`bootseer ... | head`): as if killed by SIGPIPE.
        return 141
    click.echo(f"bootseer: cannot write to stdout: {one_line(error)}", err=True)
    return exit_code_of(error)


class _RedactingFormatter(logging.Formatter):
    """No credentials and control codes in the log, whatever library wrote the message."""

    def format(self, record: logging.LogRecord) -> str:
        # A traceback has lines.
        return redact("\n".join(map(printable, super().format(record).split("\n"))))


def _open_standard_files() -> None:
    """Open /dev/null in the place of standard files that are closed (`bootseer ... >&-`): else the
    next file that is opened, a lock or a cache, would be what prints go to."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
