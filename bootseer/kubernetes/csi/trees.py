"""What stands behind volumes of images and environments: served trees, one for all pods of the node
that show the same.

Alone finds out which tree a volume shows. Thread-safe.
"""

import logging
from pathlib import Path

from bootseer.errors import InvalidInputError, NotFoundError, UnsupportedError
from bootseer.kubernetes.csi.attributes import EnvironmentVolume, ImageVolume
from bootseer.kubernetes.csi.binding import bind
from bootseer.kubernetes.csi.records import Record
from bootseer.kubernetes.csi.upper_layer import mount_writable
from bootseer.linux import mount_table
from bootseer.linux.private_files import private_directory
from bootseer.prefetch.images.find import image_by_name, publish_later, resolve_image
from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.index.source_names import REGISTRY
from bootseer.prefetch.snapshotter.lazy_trees import LazyTrees
from bootseer.prefetch.snapshotter.snapshot import TreeKey
from bootseer.served.folders import VOLUME
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.catalogue import admit_tree
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.snapshots.mounted import have_index, name_of
from bootseer.snapshots.scan import text_of
from bootseer.store import open_own_store

_log = logging.getLogger(__name__)


class Found:
    """The tree of a volume, whose index the node has; to be released once it is mounted."""

    def __init__(self, digest: str, name: str, image: FoundImage | None = None) -> None:
        self.digest = digest
        self.name = name
        self.image = image

    @property
    def is_local(self) -> bool:
        """Whether only this node has the tree yet."""
        return self.image is not None and not self.image.is_published

    def release(self) -> None:
        """Idempotent."""
        if self.image is not None:
            self.image.release()


class Trees:
    """The served trees of volumes, and the writable layers over them, below one folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Raises: BootseerError."""
        self._settings = settings
        self._layers = private_directory(folder / "layers")
        private_directory(folder / "trees")
        self._lazy = LazyTrees(settings, folder / "trees", purpose=VOLUME)

    def find(self, volume: ImageVolume | EnvironmentVolume) -> Found:
        """The tree that the volume shows. Raises: BootseerError."""
        if isinstance(volume, EnvironmentVolume):
            return self._find_environment(volume)
        if volume.image.startswith(REGISTRY):
            resolved = resolve_image(self._settings, volume.image)
        else:
            # Never a source: one may be a folder of the node.
            resolved = image_by_name(self._settings, volume.image, _log.warning)
        return Found(resolved.record.index_digest, resolved.record.reference, resolved)

    def _find_environment(self, volume: EnvironmentVolume) -> Found:
        with open_own_store(self._settings) as store:
            manifest = catalogue.find(store, volume.environment)
            target = _target_of(manifest, volume)
            index = have_index(self._settings, store, target)
            admit_tree(target, index.data, privileges=self._settings.restore_privileges)
            catalogue.note_used(store, manifest)
        return Found(target.index.digest, name_of(target.path))

    def show(self, record: Record, found: Found, target: Path) -> int:
        """Mount the tree if need be, and show it on `target`; which mount that is. Raises:
        BootseerError."""
        key = _key_of(record)
        with self._lazy.using(key, found.name, is_local=found.is_local) as path:
            if found.image is not None:
                publish_later(self._settings, found.image)
            mount = mount_table.find_mount(path)
            if mount is None:
                raise NotFoundError(f"the mount of {found.name} on {path} has just gone")
            volume = record.volume
            if isinstance(volume, EnvironmentVolume) and volume.writable_bytes:
                mount_writable(path, target, self._layers, volume.writable_bytes)
            else:
                bind(path, target, read_only=True)
            return mount.device_minor

    def is_served(self, record: Record) -> bool:
        """Whether what the volume shows is served."""
        path = self._lazy.mounted().get(_key_of(record))
        mount = mount_table.find_mount(path) if path is not None else None
        return mount is not None and mount.device_minor == record.device_minor

    def retire(self, records: list[Record], linger_s: float) -> None:
        """Take off what no volume has shown for so long. Never raises."""
        in_use = frozenset(map(_key_of, records))
        self._lazy.retire(lambda: in_use, linger_s)


def _key_of(record: Record) -> TreeKey:
    volume = record.volume
    owner = volume.owner if isinstance(volume, EnvironmentVolume) else None
    return TreeKey(record.behind, record.workload, owner)


def _target_of(manifest: Manifest, volume: EnvironmentVolume) -> Target:
    """The directory of a snapshot that is to be shown. Raises: BootseerError."""
    paths = [text_of(target.path) for target in manifest.targets]
    wanted = volume.target or (paths[0] if len(paths) == 1 else "")
    if wanted not in paths:
        raise InvalidInputError(
            f"the environment {volume.environment} holds {', '.join(paths)}; name one of them by "
            "the volume's attribute target"
        )
    target = manifest.targets[paths.index(wanted)]
    if not target.whole:
        raise UnsupportedError(
            f"the environment {volume.environment} holds what a set-up changed in {wanted}, and "
            "not all of it: a volume cannot show it; make it with a directory of its own"
        )
    return target
