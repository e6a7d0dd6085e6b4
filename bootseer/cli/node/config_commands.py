"""`bootseer config`: what is set, and where it came from."""

import click

from bootseer.base.documents import to_builtins
from bootseer.base.redact import redact
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import SettingsSource, emit_json, emit_table, json_option
from bootseer.settings.config import variable_of
from bootseer.settings.values import AUTOMATIC_AGE_S


@click.group(cls=LazyGroup)
def config() -> None:
    """Show the settings and where each came from."""


@config.command(epilog="Example: bootseer config show --json")
@json_option
@click.pass_obj
def show(source: SettingsSource, as_json: bool) -> None:
    """Print every setting, its value, its source and its variable."""
    loaded = source.config
    values = to_builtins(loaded.settings)
    # Its user name and password are for the store, not for a reader of this in a ticket.
    values["store_url"] = redact(loaded.settings.store_url)
    values["submission"] = loaded.settings.submission or "none"
    values["metrics_dir"] = loaded.settings.metrics_dir or "off"
    for name in ("auto_index", "publish_timelines", "trace_python", "restore_privileges"):
        values[name] = "on" if values[name] else "off"
    # As each is set.
    if loaded.settings.linger_s == 0:
        values["linger_s"] = "off"
    if loaded.settings.snapshot_max_age_s <= 0:
        is_automatic = loaded.settings.snapshot_max_age_s == AUTOMATIC_AGE_S
        values["snapshot_max_age_s"] = "auto" if is_automatic else "off"
    values["keep_caches"] = "auto" if values["keep_caches"] else "off"
    if as_json:
        emit_json(
            {
                name: {
                    "value": value if isinstance(value, int | float) else str(value),
                    "source": loaded.sources[name],
                    "variable": variable_of(name),
                }
                for name, value in values.items()
            }
        )
        return
    emit_table(
        ("setting", "value", "source", "variable"),
        ((name, value, loaded.sources[name], variable_of(name)) for name, value in values.items()),
    )
