"""`bootseer slurm prolog | epilog`: what slurmd's scripts run before and after a job."""

import os

import click

from bootseer.cli.output import current_settings, say

_PUBLISH_S = 10.0


@click.group()
def slurm() -> None:
    """Before and after a job of Slurm, on each of its nodes.

    The script docker/slurm/bootseer runs these as the user of the job. See docs/slurm.md.
    """


@slurm.command(epilog="Example: bootseer slurm prolog")
@click.pass_context
def prolog(context: click.Context) -> None:
    """Take off what killed jobs have left, and mount the checkpoint folders that the job's comment
    asks for.

    The comment is in SLURM_JOB_COMMENT: `bootseer standby --checkpoint URL:DIR`.
    """
    from bootseer.cli.run_commands import standby
    from bootseer.launch.slurm import tidy, wished_checkpoints

    tidy(current_settings(), "", say)
    wished = wished_checkpoints(os.environ.get("SLURM_JOB_COMMENT", ""))
    if wished:
        context.invoke(standby, checkpoints=tuple(wished))


@slurm.command(epilog="Example: bootseer slurm epilog")
def epilog() -> None:
    """Unmount what the job SLURM_JOB_ID has left, end its servers, publish the timelines of its
    starts, and keep the cache below its limit."""
    from bootseer.launch.attendant import publish_left
    from bootseer.launch.slurm import tidy
    from bootseer.prefetch.cache.limit import CacheRoom

    settings = current_settings()
    job = os.environ.get("SLURM_JOB_ID", "")
    tidy(settings, job, say)
    if job:
        publish_left(settings, job, _PUBLISH_S)
    CacheRoom(settings.cache_dir, settings.cache_limit_bytes).make()
