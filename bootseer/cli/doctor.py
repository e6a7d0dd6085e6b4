"""`bootseer doctor`: checks of this machine."""

import click

from bootseer.cli.command_tree import SettingsSource, command
from bootseer.cli.show import shows
from bootseer.errors import EXIT_FAILURE, EXIT_OK
from bootseer.launch.doctor import CheckStatus, Finding, examine
from bootseer.settings.config import load_config


@command("doctor", epilog="Example: bootseer --store hdfs://namenode:8020/bootseer doctor")
@shows(
    list[Finding],
    *("check=name", "status", "seen", "what to do=advice"),
    code=lambda found: (
        EXIT_FAILURE if any(one.status is CheckStatus.FAIL for one in found) else EXIT_OK
    ),
)
def doctor() -> list[Finding]:
    """Check kernel, FUSE, privileges, limits, folders, store and clock.

    Exits with 1 if something is broken; what merely costs speed is a warning.
    """
    source = click.get_current_context().find_object(SettingsSource) or SettingsSource({})
    # `examine` checks the folders in a thread of its own, since a dead file system hangs.
    return examine(load_config(source.flags, checks_folders=False).settings)
