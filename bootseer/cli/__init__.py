"""The command line. Owns the list of groups, the settings flags and the translation of errors to
one line and an exit code; each group lives in its own `*_commands.py` and is imported only when
used, so that `bootseer run` costs little more than the interpreter.
"""

import importlib
import logging
import os
import sys

import click

from bootseer import __version__
from bootseer.cli.output import SettingsSource
from bootseer.errors import BootseerError, exit_code_of

# name -> (module, one-line help); the command has the name itself. The help is repeated here so
# that listing the commands imports none of them.
_COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run_commands", "Start a training job: image, environment, checkpoint, then exec."),
    "image": ("image_commands", "Container images: index, mount, run, record and replay."),
    "snapshot": ("snapshot_commands", "Environments: capture once, restore everywhere."),
    "mount": ("mount_commands", "Mount a striped checkpoint file system."),
    "unmount": ("mount_commands", "Unmount what `bootseer mount` mounted."),
    "report": ("report_commands", "Where the time of a start went."),
    "config": ("config_commands", "Show the settings and where each came from."),
    "doctor": ("doctor_commands", "Check this machine and say what to do."),
    "demo": ("demo_commands", "Launch a job twice on this machine and compare."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"bootseer.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' -- python train.py",
)
@click.version_option(__version__, prog_name="bootseer")
@click.option("--store", "store_url", metavar="URL", help="The shared store (any fsspec URL).")
@click.option("--cache-dir", metavar="DIR", help="This node's cache.")
@click.option("--run-dir", metavar="DIR", help="Sockets and state of running mounts.")
@click.option("--timeline-dir", metavar="DIR", help="Where timelines are written.")
@click.option("--job", metavar="NAME", help="The job's name, the same on every node.")
@click.option("--attempt", metavar="N", help="Which start of the job this is.")
@click.option("--workload", metavar="NAME", help="Names the record of what a start touches.")
@click.option("-v", "--verbose", count=True, help="Log more; twice for debugging.")
@click.pass_context
def cli(ctx: click.Context, /, verbose: int, **flags: str | None) -> None:
    """Bootseer cuts the start-up time of large training jobs.

    Every setting is also a BOOTSEER_* variable and a line of bootseer.toml; see
    `bootseer config show`.
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="bootseer: %(message)s", stream=sys.stderr)
    ctx.obj = SettingsSource(flags)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command, translate errors, exit."""
    try:
        code = cli.main(args=arguments, prog_name="bootseer", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        click.echo("bootseer: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away (`bootseer ... | head`): not an error of ours, but
        # the interpreter would complain at exit when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (BootseerError, OSError) as error:
        click.echo(f"bootseer: {error}", err=True)
        sys.exit(exit_code_of(error))
    sys.exit(code if isinstance(code, int) else 0)
