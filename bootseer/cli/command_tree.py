"""Click commands of the program, each loaded when it is used."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import replace

from bootseer import __version__
from bootseer.base.display import closest_word
from bootseer.cli.grammar import COMMANDS, SET, SETTINGS, members
from bootseer.cli.text import begin_log
from bootseer.errors import EXIT_OK
from bootseer.settings.config import TABLE, Config, Settings, assignment, load_config

# Prefix of the parameters of settings: a command may have a parameter named like a setting.
_PREFIX = "setting_"


class SettingsSource(Struct, dict=True):
    """Settings that the command line names; all others are read only by commands that need them."""

    flags: dict[str, str]

    @functools.cached_property
    def config(self) -> Config:
        """Settings of the command. Raises: InvalidInputError."""
        return load_config(self.flags)


def current_config() -> Config:
    """Return the settings of the command that is running, and where each came from."""
    source = click.get_current_context().find_object(SettingsSource)
    return (source or SettingsSource({})).config


def current_settings() -> Settings:
    """Return the settings of the command that is running."""
    return current_config().settings


def settings_without_fanout() -> Settings:
    """Return the settings of a command that belongs to no start, so that no node feeds it."""
    return replace(current_settings(), fanout=False)


def _setting_options(hidden: bool) -> Iterator[click.Option]:
    for flag, name in SETTINGS.items():
        one = TABLE[name]
        yield click.Option(
            [flag, _PREFIX + name],
            metavar=one.kind.placeholder,
            help=one.help,
            callback=_note_setting,
            expose_value=False,
            hidden=hidden,
        )
    yield click.Option(
        [SET, "assignments"],
        metavar="NAME=VALUE",
        multiple=True,
        help="Value of any setting that `bootseer config` lists; may be repeated.",
        callback=_note_assignments,
        expose_value=False,
        hidden=hidden,
    )


def _note_setting(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and parameter.name is not None:
        _flags(context)[parameter.name.removeprefix(_PREFIX)] = value


def _note_assignments(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> None:
    _flags(context).update(map(assignment, values))


def _flags(context: click.Context) -> dict[str, str]:
    if not isinstance(context.obj, SettingsSource):
        context.obj = SettingsSource({})
    return context.obj.flags


class Command(click.Command):
    """Command that takes the options of `bootseer` itself behind its name, too."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        own = {name for one in self.params for name in one.opts}
        self.params += [one for one in _setting_options(True) if not own.intersection(one.opts)]


class WrappingCommand(Command):
    """Command that takes another one behind `--`, as its parameter `command`.

    `has_own`: an option that brings a command of its own, such as an image.
    """

    def __init__(
        self, *args: Any, needs_command: bool = True, has_own: str = "", **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self._needs_command = needs_command
        self._has_own = has_own

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        needs = self._needs_command and not self._has_own
        piece = "-- COMMAND..." if needs else "[-- COMMAND...]"
        return [*super().collect_usage_pieces(ctx), piece]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        command = tuple(args[end + 1 :])
        hint = f"put -- before COMMAND: {ctx.command_path} ... -- COMMAND"
        try:
            rest = super().parse_args(ctx, args[:end])
        except click.NoSuchOption as error:
            if end == len(args):
                raise click.UsageError(
                    f"No such option: {error.option_name}. If it belongs to COMMAND, {hint} "
                    f"{error.option_name}",
                    ctx,
                ) from error
            raise
        except click.UsageError as error:
            if end == len(args) and "unexpected extra argument" in error.message:
                raise click.UsageError(f"{error.message}. If it is COMMAND, {hint}", ctx) from error
            raise
        needs = self._needs_command and not ctx.params.get(self._has_own)
        if needs and not command and not ctx.resilient_parsing:
            raise click.UsageError(f"Missing COMMAND: {hint}", ctx)
        ctx.params["command"] = command
        return rest


class CommandGroup(click.Group):
    """Group of the commands in `grammar.COMMANDS` whose words begin with `path`."""

    def __init__(self, path: str, **rest: Any) -> None:
        super().__init__(path.rpartition(" ")[2] or "bootseer", **rest)
        self._path = path

    def list_commands(self, ctx: click.Context) -> list[str]:
        return members(self._path)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(f"{self._path} {cmd_name}".strip()) if cmd_name in members(self._path) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._help_of(name)) for name in self.list_commands(ctx)])

    def _help_of(self, name: str) -> str:
        path = f"{self._path} {name}".strip()
        return COMMANDS[path][1].partition("\n")[0] or load(path).get_short_help_str(limit=70)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            close = closest_word(args[0], self.list_commands(ctx))
            hint = f" Did you mean {close!r}?" if close else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


@functools.cache
def load(path: str) -> click.Command:
    """Return the command that these words call; its module is imported."""
    module, text = COMMANDS[path]
    if not module:
        return CommandGroup(path, help=text)
    loaded = importlib.import_module(f"bootseer.cli.{module}")
    command = getattr(loaded, path.replace(" ", "_"))
    assert isinstance(command, click.Command)
    return command


def command(path: str, **rest: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes the click command called by `path`."""
    return click.command(path.rpartition(" ")[2], **{"cls": Command, **rest})


@click.pass_context
def _begin(context: click.Context, verbose: int) -> None:
    """Bootseer cuts the start-up time of large training jobs.

    Every setting is also a BOOTSEER_* variable and a line of bootseer.toml; see `bootseer config`.
    These options may also follow the command.
    """
    _flags(context)
    begin_log(verbose)


cli = CommandGroup(
    "",
    callback=_begin,
    help=_begin.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: bootseer run --setup 'pip install -r requirements.txt' -- python train.py",
    params=[
        *_setting_options(False),
        click.Option(["-v", "--verbose"], count=True, help="Log more; twice for debugging."),
    ],
)
cli = click.version_option(__version__, prog_name="bootseer")(cli)


def run_click(words: Sequence[str]) -> int:
    """Run the command that `words` call; return its exit code. Raises: as the command."""
    try:
        result = cli.main(args=list(words), prog_name="bootseer", standalone_mode=False)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return result if isinstance(result, int) else EXIT_OK
