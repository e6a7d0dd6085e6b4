"""Every format of records and content in a store, in the order of collection."""

from bootseer.launch.import_records import FOLDER as PRELOAD
from bootseer.prefetch.bundle.links import CONTENT as BUNDLES
from bootseer.prefetch.bundle.links import FORMATS as IMAGES
from bootseer.snapshots.catalogue import FORMATS as SNAPSHOTS
from bootseer.store.objects.records import TREES, USES, ObjectFormat
from bootseer.timeline.stored import FOLDER as STARTS
from bootseer.timeline.stored import start_of

FORMATS = (
    *SNAPSHOTS,
    *IMAGES,
    ObjectFormat(STARTS, series=start_of),
    # Nothing refers to these records, and a running job renews its own: only their age counts.
    ObjectFormat(PRELOAD, series=lambda key: ("", key)),
    USES,
    *BUNDLES,
    *TREES,
)
"""Formats, each before the formats that its objects refer to: objects are deleted in this order."""
