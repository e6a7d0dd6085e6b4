"""Formats of records and content in a store, in the order in which they are collected."""

from bootseer.launch.preloading import FOLDER as PRELOAD
from bootseer.prefetch.bundle.links import CONTENT as BUNDLES
from bootseer.prefetch.bundle.links import FORMATS as IMAGES
from bootseer.report.sources import FOLDER as STARTS
from bootseer.report.sources import start_of
from bootseer.snapshots.catalogue import FORMATS as SNAPSHOTS
from bootseer.store.objects.records import TREES, USES, ObjectFormat

FORMATS = (
    *SNAPSHOTS,
    *IMAGES,
    ObjectFormat(STARTS, series=start_of),
    # A job that still runs writes its record anew: only ages count.
    ObjectFormat(PRELOAD, series=lambda key: ("", key)),
    USES,
    *BUNDLES,
    *TREES,
)
"""Each stands before those that it may name: the order in which objects are deleted."""
