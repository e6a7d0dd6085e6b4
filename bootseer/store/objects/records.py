"""Links between the objects of a store, described for each format of object.

The garbage collector walks the graph of these links, and knows no format itself. Immutable.
"""

import re
from collections.abc import Callable

from msgspec import Struct

from bootseer.blob.keys import blob_key, index_key
from bootseer.store.objects.store import Store
from bootseer.store.objects.uses import FOLDER, IN_USE_S, read_use


class RecordEntry(Struct, frozen=True):
    """Record that users name, and that stays until one of their rules removes it."""

    kind: str
    """Kind of record in the words of users, such as "image" or "snapshot"."""
    name: str
    """Name of the record in the users' rules: a reference or a key."""
    created_ns: int = 0
    group: str = ""
    """Group of records; a rule can keep the newest ones of a group."""
    targets: tuple[bytes, ...] = ()
    """Paths at which the record is restored."""
    trees: tuple[str, ...] = ()
    """Digests of the trees whose notes of use say when the record was last used."""
    is_cache: bool = False
    """Whether an unused record may be deleted, since its users can make it again."""
    is_remade: bool = False
    """Whether a start makes a missing record again, so that a broken one may be deleted."""


class Links(Struct, frozen=True):
    """Links of one object to others."""

    needs: tuple[str, ...] = ()
    """Keys of objects that stay as long as this object; a key with a final "/" means all below."""
    lends: tuple[str, ...] = ()
    """Keys of objects that stay too as long as another object needs this object."""
    hangs_on: tuple[str, ...] = ()
    """Keys of objects; at least one of them must stay for this object to stay."""
    label: str = ""
    """User's name of the object in `hangs_on`."""
    entry: RecordEntry | None = None


class ObjectFormat(Struct, frozen=True):
    """Kind of object. In a list of formats, a format precedes those that its objects link to."""

    folder: str
    """Prefix of the keys; of several formats that match a key, the first is used."""
    read: Callable[[Store, str], Links] | None = None
    """Function that reads the links of a record. Raises: NotFoundError, CorruptError,
    UnknownFormatError, UnavailableError."""
    links_of: Callable[[str], Links] = lambda key: Links()
    """Function that derives the links of an object from its key, if the object is not read."""
    pattern: str = ".*"
    """Pattern of the keys, without the folder, of objects that `read` reads."""
    suffix: str = ""
    """Suffix of the keys."""
    is_content: bool = False
    """Whether the objects are named by their digest, so that several records may link to one."""
    fresh_s: float = 0.0
    """Age in seconds up to which a record stays together with the objects that it needs; an older
    record needs nothing. 0 means that records do not age."""
    series: Callable[[str], tuple[str, str] | None] | None = None
    """Function that returns the series and the member to which a key belongs; None keeps the
    object. The newest members of a series stay until they are old; in the series "" all do."""

    def fits(self, key: str) -> bool:
        """Return whether an object at `key` is of this format."""
        return key.startswith(self.folder) and key.endswith(self.suffix)

    def is_read(self, key: str) -> bool:
        """Return whether the object at `key` is a record that has to be read."""
        return self.read is not None and bool(re.fullmatch(self.pattern, key[len(self.folder) :]))


ONE_DOCUMENT = r"[^/]+\.json"
"""Pattern of records that are directly in their folder."""


def _links_of_use(store: Store, key: str) -> Links:
    use = read_use(store, key)
    tree = index_key(use.index_digest)
    # The note stays with the tree, since the time of the last use matters while the tree stays.
    return Links((tree, *map(blob_key, use.blob_digests)), hangs_on=(tree,))


USES = ObjectFormat(FOLDER, _links_of_use, fresh_s=IN_USE_S)
"""Notes of trees in use."""
TREES = (ObjectFormat("indexes/", is_content=True), ObjectFormat("blobs/", is_content=True))
"""Tree indexes and blobs, the content of images and environments."""
