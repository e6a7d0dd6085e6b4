"""`bootseer doctor`: checks this machine."""

import click

from bootseer.base.documents import to_builtins
from bootseer.cli.output import SettingsSource, emit_json, emit_table, json_option
from bootseer.launch.doctor import Status, examine
from bootseer.settings.config import load_config


@click.command(epilog="Example: bootseer --store hdfs://namenode:8020/bootseer doctor")
@json_option
@click.pass_context
def doctor(context: click.Context, /, as_json: bool) -> None:
    """Check kernel, FUSE, privileges, limits, folders, store and clock.

    Exits with 1 if something is broken; what merely costs speed is a warning.
    """
    source = context.find_object(SettingsSource) or SettingsSource({})
    # It looks at the folders itself, in a thread that may hang.
    findings = examine(load_config(source.flags, checks_folders=False).settings)
    if as_json:
        emit_json([to_builtins(finding) for finding in findings])
    else:
        emit_table(
            ("check", "status", "seen", "what to do"),
            ((found.name, found.status, found.seen, found.advice) for found in findings),
        )
    context.exit(int(any(found.status is Status.FAIL for found in findings)))
