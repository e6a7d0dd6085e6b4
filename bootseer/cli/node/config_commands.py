"""`bootseer config`: what is set, and where it came from."""

import click

from bootseer.base.redact import redact
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import SettingsSource, emit_json, emit_table, json_option
from bootseer.settings.config import TABLE, variable_of


@click.group(cls=LazyGroup)
def config() -> None:
    """Show the settings and where each came from."""


@config.command(epilog="Example: bootseer config show --json")
@json_option
@click.pass_obj
def show(source: SettingsSource, as_json: bool) -> None:
    """Print every setting, its value, its source and its variable."""
    loaded = source.config
    rows = [
        (name, _shown(name, getattr(loaded.settings, name)), loaded.sources[name]) for name in TABLE
    ]
    if as_json:
        emit_json(
            {
                name: {"value": value, "source": where, "variable": variable_of(name)}
                for name, value, where in rows
            }
        )
        return
    emit_table(
        ("setting", "value", "source", "variable"),
        ((name, value, where, variable_of(name)) for name, value, where in rows),
    )


def _shown(name: str, value: object) -> str | int | float:
    """Return a value as it is set."""
    # The user name and password of a URL are for the store, not for a reader of this in a ticket.
    text = TABLE[name].kind.show(value)
    return redact(text) if name == "store_url" and isinstance(text, str) else text
