"""Which adapters there are, and how what they read is had: files, and Slurm's own commands."""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bootseer.errors import CorruptError, InvalidInputError, from_oserror
from bootseer.profile.adapters.known import SIZE_MAX, Known
from bootseer.profile.adapters.kubernetes import parse_kubernetes
from bootseer.profile.adapters.nccl import parse_nccl
from bootseer.profile.adapters.slurm import FIELDS, parse_slurm
from bootseer.profile.adapters.spans import parse_spans

_log = logging.getLogger(__name__)

Adapter = Callable[[bytes], Sequence[Known]]
"""Gets what another program wrote; returns the stages in it. Raises CorruptError where that is of
another format altogether."""

ADAPTERS: Mapping[str, Adapter] = {
    "slurm": parse_slurm,
    "kubernetes": parse_kubernetes,
    "nccl": parse_nccl,
    "otlp": parse_spans,
}
"""The adapters by the name that `bootseer report --with` takes."""

_SLURM_JOB = re.compile(r"\d{1,10}(?:_\d{1,10})?")
ASKING_S = 5.0
"""What a busy slurmdbd is given: a report without its answer is better than one that waits."""


def read_other(path: Path) -> bytes:
    """What another program wrote. Raises: InvalidInputError, NotFoundError."""
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_MAX + 1)
    except OSError as error:
        raise from_oserror(error, f"read {path}") from error
    if len(data) > SIZE_MAX:
        raise InvalidInputError(
            f"{path} is larger than {SIZE_MAX // 2**20} MiB; cut out the part about this start"
        )
    return data


def ask_slurm(submission: str) -> Sequence[Known]:
    """What the Slurm of this machine knows of a job; nothing where it has none, does not know the
    job, or does not answer in time."""
    if not _SLURM_JOB.fullmatch(submission):
        return ()
    for command in (
        ["sacct", "--duplicates", "--allocations", "--parsable2", "-o", FIELDS, "-j", submission],
        ["scontrol", "show", "job", submission],
    ):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command,
                # Seconds since 1970: without them times have no zone.
                env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASKING_S,
            )
            found = parse_slurm(done.stdout[:SIZE_MAX]) if done.returncode == 0 else []
        except subprocess.TimeoutExpired:
            _log.info("no queue times of job %s: %s does not answer", submission, command[0])
            return ()
        except (OSError, CorruptError) as error:
            _log.info("no queue times of job %s: %s: %s", submission, command[0], error)
            continue
        if found:
            return found
    return ()
