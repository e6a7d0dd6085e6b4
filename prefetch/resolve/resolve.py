"""Finds what a start needs of an image: a record, and an index whose bytes can be had.

Alone tells an image that is named from one that is given by its source (`resolve_source`, which
loads all that pulling takes). Stateless; any thread.
"""

import logging
from typing import TYPE_CHECKING

from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.index.source_names import is_source
from bootseer.prefetch.resolve.found_image import Say, image_by_name
from bootseer.settings.config import Settings

if TYPE_CHECKING:
    from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)


def resolve_image(
    settings: Settings,
    image: str,
    *,
    say: Say = _log.warning,
    timeline: "Timeline | None" = None,
) -> FoundImage:
    """The image called `image` in the store, or that a source `image` holds, whose layers are
    pulled unless the store or this node has them.

    `say` gets what people may want to know, warnings beginning with "warning:"; `timeline` a span
    for what is pulled. Raises: BootseerError where the image cannot be had at all.
    """
    if not is_source(image):
        return image_by_name(settings, image, say)
    from bootseer.prefetch.resolve.resolve_source import resolve_from_source

    return resolve_from_source(settings, image, say, timeline)
