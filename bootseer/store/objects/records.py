"""Links between the objects of a store, as the format of each describes them.

A garbage collector walks the graph that these links make, and knows no format itself. Immutable.
"""

import re
from collections.abc import Callable

from msgspec import Struct

from bootseer.blob.keys import blob_key, index_key
from bootseer.store.objects.store import Store
from bootseer.store.objects.uses import FOLDER, IN_USE_S, read_use


class Entry(Struct, frozen=True):
    """Record that users name and that stays until one of their rules removes it."""

    kind: str
    """Kind of record in the words of users: "image", "snapshot"."""
    name: str
    """Name of the record in the users' rules: a reference, a key."""
    created_ns: int = 0
    group: str = ""
    """Group of entries whose newest users may keep."""
    targets: tuple[bytes, ...] = ()
    """Paths at which it is restored."""
    trees: tuple[str, ...] = ()
    """Digests of the trees whose notes of use tell when it was used."""
    is_cache: bool = False
    """Whether it goes where nobody uses it, and is made again by those who want it."""
    is_remade: bool = False
    """Whether a start makes it again where it is missing, so that a broken one may be deleted."""


class Links(Struct, frozen=True):
    """Links of one object to others."""

    needs: tuple[str, ...] = ()
    """Keys of objects that stay as long as it stays; one that ends in "/" is all that is below."""
    lends: tuple[str, ...] = ()
    """Keys of objects that stay, too, as long as another object needs it."""
    hangs_on: tuple[str, ...] = ()
    """Keys of objects: it stays as long as one of these stays."""
    label: str = ""
    """Name that users give the object on which it hangs."""
    entry: Entry | None = None


class Format(Struct, frozen=True):
    """A kind of objects. In a list of formats each stands before those that it may name."""

    folder: str
    """Prefix of the keys; of several formats that fit, the first counts."""
    read: Callable[[Store, str], Links] | None = None
    """Reads a record. Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError."""
    links_of: Callable[[str], Links] = lambda key: Links()
    """The links of an object that is not read, by its key."""
    pattern: str = ".*"
    """Pattern of the keys, behind the folder, of records that are read."""
    suffix: str = ""
    """End of the keys."""
    is_content: bool = False
    """Whether the objects are named by their digest: several records may name one of them."""
    fresh_s: float = 0.0
    """A record that was written within this time stays, with what it needs; an older one needs
    nothing. 0: records have no such time."""
    series: Callable[[str], tuple[str, str] | None] | None = None
    """Returns the series and the member that a key belongs to, or None: then the object stays. The
    newest members of a series stay until they are old; of the series "", all members do."""

    def fits(self, key: str) -> bool:
        """Tell whether an object at `key` is of this format."""
        return key.startswith(self.folder) and key.endswith(self.suffix)

    def is_read(self, key: str) -> bool:
        """Tell whether the object at `key` is a record that has to be read."""
        return self.read is not None and bool(re.fullmatch(self.pattern, key[len(self.folder) :]))


ONE_DOCUMENT = r"[^/]+\.json"
"""The pattern of a folder whose records lie directly in it."""


def _links_of_use(store: Store, key: str) -> Links:
    use = read_use(store, key)
    tree = index_key(use.index_digest)
    # When a tree that stays was last used is worth knowing.
    return Links((tree, *map(blob_key, use.blob_digests)), hangs_on=(tree,))


USES = Format(FOLDER, _links_of_use, fresh_s=IN_USE_S)
"""Notes of what is in use."""
TREES = (Format("indexes/", is_content=True), Format("blobs/", is_content=True))
"""What images and environments are read from."""
