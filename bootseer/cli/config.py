"""`bootseer config`: the settings and where each came from."""

from msgspec import Struct

from bootseer.base.redact import redact
from bootseer.cli.command_tree import command, current_config
from bootseer.cli.show import emit_table, shows
from bootseer.settings.config import TABLE, variable_of


class ShownSetting(Struct):
    """Setting, by its name in the table of settings."""

    value: str | int | float
    """Value in the notation of a flag; a URL without credentials."""
    source: str
    """Flag, variable, file or default."""
    variable: str
    """Name of its environment variable."""


def _show_settings(found: dict[str, ShownSetting]) -> None:
    emit_table(
        ("setting", "value", "source", "variable"),
        ((name, one.value, one.source, one.variable) for name, one in found.items()),
    )


@command("config", epilog="Example: bootseer config --json")
@shows(dict[str, ShownSetting], text=_show_settings)
def config() -> dict[str, ShownSetting]:
    """Print every setting, its value, its source and its variable."""
    loaded = current_config()
    return {
        name: ShownSetting(
            _shown(name, getattr(loaded.settings, name)), loaded.sources[name], variable_of(name)
        )
        for name in TABLE
    }


def _shown(name: str, value: object) -> str | int | float:
    # The output is pasted into tickets, so a URL is shown without user name and password.
    text = TABLE[name].kind.show(value)
    return redact(text) if name == "store_url" and isinstance(text, str) else text
