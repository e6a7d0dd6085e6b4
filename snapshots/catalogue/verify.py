"""Whether what the store holds of snapshots is whole. Reads the store, changes nothing.

One `Verifier` is for one thread. A tree that several snapshots share is read once; a blob that
several trees take content from, once for each, since each says other things of it.
"""

from collections.abc import Callable

from msgspec import Struct

from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.read import verify
from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.manifest import Stored, Target
from bootseer.snapshots.targets.paths import text_of
from bootseer.store import Store

_DAMAGE = (CorruptError, NotFoundError, UnknownFormatError)


NO_DIGEST = "an earlier release wrote its manifest, without a digest of all that it says"


class Verdict(Struct, frozen=True):
    """What was found of one snapshot."""

    fingerprint: str
    name: str
    problems: tuple[str, ...]
    """A sentence each; none: it is whole."""
    note: str = ""
    """What could not be checked, or empty."""


class Verifier:
    """Checks snapshots one after the other."""

    def __init__(
        self,
        store: Store,
        *,
        quick: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`quick`: only that everything is there and of the right size. `on_progress` gets counts
        of bytes read of blobs."""
        self._store = store
        self._quick = quick
        self._on_progress = on_progress
        # Index -> what is wrong with it or its blobs, or "".
        self._known: dict[str, str] = {}

    def check(self, fingerprint: str) -> Verdict:
        """Look at one snapshot: manifest, trees, and every byte of its blobs.

        Raises: UnavailableError, DeadlineError; damage is no error but a verdict.
        """
        try:
            manifest = catalogue.load(self._store, fingerprint)
        except _DAMAGE as error:
            return Verdict(fingerprint, "", (f"its manifest cannot be read: {error}",))
        if manifest is None:
            return Verdict(fingerprint, "", ("it is gone",))
        problems = tuple(problem for target in manifest.targets if (problem := self._check(target)))
        note = "" if manifest.is_verified else NO_DIGEST
        return Verdict(fingerprint, manifest.name, problems, note)

    def _check(self, target: Target) -> str:
        known = target.index.digest
        if known not in self._known:
            try:
                for blob in target.blobs:
                    self._check_stored(blob_key(blob.digest), blob)
                self._check_stored(index_key(target.index.digest), target.index)
                if not self._quick:
                    self._read(target)
                self._known[known] = ""
            except _DAMAGE as error:
                self._known[known] = str(error)
        problem = self._known[known]
        return f"{text_of(target.path)}: {problem}" if problem else ""

    def _check_stored(self, key: str, stored: Stored) -> None:
        try:
            size_bytes = self._store.size(key)
        except NotFoundError:
            raise NotFoundError(f"{key} is missing") from None
        if size_bytes != stored.size_bytes:
            raise CorruptError(f"{key} has {size_bytes} bytes instead of {stored.size_bytes}")

    def _read(self, target: Target) -> None:
        tree, _ = catalogue.load_encoded_tree(self._store, target)
        keys = [blob_key(blob.digest) for blob in tree.blobs]
        verify(
            tree,
            lambda blob, offset, length: self._store.read(keys[blob], offset, length),
            self._on_progress,
        )
