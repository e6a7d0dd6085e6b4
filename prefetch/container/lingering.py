"""The tree of a container that stays after its job, for the next start: found, and taken over.

Alone knows which tree is what a start asks for. Who keeps it is in `served.cover_users`. Stateless;
any thread.
"""

import contextlib
import hashlib
import logging
import os
from pathlib import Path

from bootseer.base.documents import to_line
from bootseer.errors import BootseerError
from bootseer.linux.mount_table import find_mount
from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.resolve.found_image import publish_later
from bootseer.prefetch.resolve.mount import MountedImage
from bootseer.served.control import ask
from bootseer.served.cover_users import join, lingering
from bootseer.served.ending import end_silent
from bootseer.served.folders import RUN
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

LIVE = "live"
"""How a tree comes that has lingered."""


def fingerprint_of(settings: Settings, identity: str, owner: tuple[int, int] | None) -> str:
    """The same for trees that the next start can use as its own. `identity`: the image's, whose
    index is another one once it is published. Pure, but for our user."""
    served = [settings.store_url, str(settings.cache_dir), settings.deadline_s]
    what = [identity, settings.workload, os.geteuid(), owner, *served, settings.fill_bytes_per_s]
    return hashlib.sha256(to_line(what).encode()).hexdigest()


def take_over(settings: Settings, resolved: FoundImage, fingerprint: str) -> MountedImage | None:
    """A tree that lingers and has this fingerprint, which is kept for this process from now on.
    One whose server does not answer is ended. Never raises."""
    for state_dir, state in lingering(settings.run_dir, RUN):
        if state.fingerprint != fingerprint:
            continue
        try:
            ask(state_dir, "status")
        except BootseerError as error:
            _log.info("%s cannot be taken over: %s", state.directory, error)
            with contextlib.suppress(OSError):
                end_silent(state_dir, state)
            continue
        if find_mount(Path(state.directory)) is not None and join(state_dir, None, os.getpid()):
            resolved.release()
            publish_later(settings, resolved)
            # What it records is over.
            return MountedImage(settings, resolved.record, state, state_dir, "")
    return None
