"""Start of a job, and hold of its mounts before a start. Loads no click."""

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from bootseer.cli.grammar import CommandLine
from bootseer.cli.text import printable, say
from bootseer.errors import InvalidInputError
from bootseer.settings.config import Config, Settings, assignment, load_config

if TYPE_CHECKING:
    from bootseer.launch.job import Job

_OF_IMAGE = {
    "--bind": "binds",
    "--entrypoint": "entrypoint",
    "--runtime": "runtime",
    "--user": "user",
}
_OF_SETUP = ("targets", "inputs", "variables", "mode")


def config_of(line: CommandLine) -> Config:
    """Return the settings of a command line. Raises: InvalidInputError."""
    return load_config({**line.settings, **dict(map(assignment, line.assignments))})


def start_line(line: CommandLine) -> NoReturn:
    """Start the job of a command line. Raises: as `start`."""
    start(config_of(line), line.command, line.options)


def start(config: Config, command: tuple[str, ...], options: Mapping[str, Any]) -> NoReturn:
    """Start a job and become it. Raises: BootseerError; as `launch.start.launch`."""
    from bootseer.launch.start import launch
    from bootseer.settings.values import parse_linger

    job = _job(command, options)
    settings = _with_mode(config.settings, options)
    if config.sources["store_url"] == "default":
        # The default store is a folder of this node, which has the timeline already.
        settings = replace(settings, publish_timelines=False)
    if options["linger"] is not None:
        settings = replace(settings, linger_s=parse_linger(options["linger"]))
    launch(settings, job, say)


def hold(settings: Settings, command: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Prepare a job and hold its mounts; or show or end the hold. Raises: as `start`."""
    from bootseer.launch.attendant import end_lingering
    from bootseer.launch.start import launch
    from bootseer.linux.removal import remove_tree
    from bootseer.settings.values import parse_linger

    if options["shows"]:
        _show_held(settings)
        return
    if options["ends"]:
        end_lingering(settings)
        return
    if not (options["image"] or options["setups"] or options["checkpoints"] or command):
        raise InvalidInputError(
            "nothing to hold: add --image, --setup, --checkpoint, or -- COMMAND"
        )
    if options["preload"] and not command:
        raise InvalidInputError("--preload needs COMMAND: its imports are held")
    job = replace(_job(command or ("true",), options), is_standby=True)
    stages = settings.run_dir / "standby"
    with contextlib.suppress(OSError):
        remove_tree(stages)
    settings = replace(
        _with_mode(settings, options),
        linger_s=parse_linger(options["duration"]),
        # The timeline of a standby is not one of the starts of the job.
        timeline_dir=stages,
        submission="standby",
        publish_timelines=False,
        # Other nodes of the job may not be prepared at the same time.
        fanout=False,
        # The reads of a standby are not the reads of a start.
        record="never",
    )
    if not command:
        settings = replace(settings, keep_caches=False)
    launch(settings, job, say)


def _job(command: tuple[str, ...], options: Mapping[str, Any]) -> "Job":
    """Return the job that the options ask for. Raises: InvalidInputError."""
    from bootseer.launch.checkpoints import parse_checkpoint
    from bootseer.launch.job import Job

    for flag, name in _OF_IMAGE.items():
        if options[name] not in (None, ()) and not options["image"]:
            raise InvalidInputError(f"{flag} is about a container: it needs --image")
    if any(map(options.get, _OF_SETUP)) and not options["setups"]:
        raise InvalidInputError(
            "--target, --input, --input-env and --mode are about a set-up: add --setup"
        )
    if options["kept"]:
        from bootseer.snapshots.scan import target_path

        for text in options["kept"]:
            target_path(text, os.getcwd())
    return Job(
        command=command,
        image=options["image"] or "",
        runtime=options["runtime"] or "chroot",
        user=options["user"],
        setups=options["setups"],
        targets=options["targets"],
        inputs=options["inputs"],
        variables=options["variables"],
        checkpoints=tuple(map(parse_checkpoint, options["checkpoints"])),
        entrypoint=options["entrypoint"],
        binds=options["binds"],
        kept=options["kept"],
        preload=options["preload"],
    )


def _with_mode(settings: Settings, options: Mapping[str, Any]) -> Settings:
    mode = options["mode"]
    return settings if mode is None else replace(settings, restore_mode=mode)


def _show_held(settings: Settings) -> None:
    from bootseer.cli.node import emit_entries, node_entries
    from bootseer.errors import BootseerError, NotFoundError
    from bootseer.launch.standby import expected_s, warm_sentence
    from bootseer.served.preload.launching import warm_sentences as preloaders
    from bootseer.served.service import services

    entries = node_entries(settings.run_dir)
    holders = {
        one.pid
        for one in entries
        if one.kind == "attendant" and one.what == settings.job and one.health == "ok"
    }
    held = [one for one in entries if one.pid in holders or holders.intersection(one.users)]
    if not held:
        raise NotFoundError(f"nothing is held on this node for the job {settings.job}")
    emit_entries(held)
    servers = {one.pid for one in held}
    sentences = []
    for service in services(settings.run_dir):
        # The table shows servers that do not answer.
        with contextlib.suppress(BootseerError):
            if service.is_alive and service.state.pid in servers:
                sentences.append(warm_sentence(service))
    sentences += preloaders(settings)
    if (expected := expected_s(settings)) is not None:
        took_s, left_s = expected
        sentences.append(
            f"expected: {left_s:.1f} s until the command runs, as far as mounts are concerned; "
            f"the last start on this node took {took_s:.1f} s"
        )
    sys.stdout.writelines(f"{printable(sentence)}\n" for sentence in filter(None, sentences))
