"""The database of snapshots: an SQLite file, in which every operation is one transaction.

After a crash it is in the state of the last finished operation. Thread-safe: one connection, one
operation at a time; all operations are short.
"""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.base.documents import from_line
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    UnknownFormatError,
)
from bootseer.prefetch.snapshotter.snapshot import (
    Snapshot,
    SnapshotKind,
    SnapshotUsage,
    changed_labels,
    check_key,
)

VERSION = 1
_BUSY_S = 10.0

_TABLES = """
CREATE TABLE snapshots (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES snapshots (number),
    kind TEXT NOT NULL,
    labels TEXT NOT NULL,
    created_ns INTEGER NOT NULL,
    updated_ns INTEGER NOT NULL,
    chain_id TEXT NOT NULL DEFAULT '',
    size_bytes INTEGER NOT NULL DEFAULT 0,
    inode_count INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX children ON snapshots (parent);
CREATE INDEX chains ON snapshots (chain_id);
CREATE TABLE trees (chain_id TEXT PRIMARY KEY, index_digest TEXT NOT NULL);
"""

_SELECT = """
SELECT s.number, s.key, coalesce(p.key, ''), s.kind, s.labels, s.created_ns, s.updated_ns,
       s.chain_id, s.size_bytes, s.inode_count
FROM snapshots s LEFT JOIN snapshots p ON s.parent = p.number
"""


class SnapshotDatabase:
    """Database of the snapshots of one snapshotter."""

    def __init__(self, path: Path) -> None:
        """Open or make the database. Raises: CorruptError, UnknownFormatError, BootseerError."""
        self._lock = threading.RLock()
        self._path = path
        try:
            # SQLite would make the file readable by others; its journal takes over the mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            self._database = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise BootseerError(f"cannot open the database {path}: {error}") from error
        with self._translated():
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("PRAGMA foreign_keys = ON")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                with self._transaction() as database:
                    for statement in _TABLES.split(";"):
                        database.execute(statement)
                    database.execute(f"PRAGMA user_version = {VERSION}")
        if version > VERSION:
            raise UnknownFormatError(
                f"the database {path} has version {version}; this release reads version {VERSION}: "
                "use a newer one"
            )

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._lock:
            self._database.close()

    # ---- reading ------------------------------------------------------------------------------

    def get(self, key: str) -> Snapshot:
        """Return a snapshot. Raises: NotFoundError."""
        with self._translated():
            row = self._database.execute(_SELECT + "WHERE s.key = ?", (key,)).fetchone()
        if row is None:
            raise NotFoundError(f"there is no snapshot {key[:200]}")
        return _snapshot(row)

    def with_ancestors(self, key: str) -> list[Snapshot]:
        """Return the snapshot and its ancestors, the nearest first, as of one moment.

        Raises: NotFoundError.
        """
        with self._lock:
            found = [self.get(key)]
            while found[-1].parent:
                found.append(self.get(found[-1].parent))
            return found

    def all(self) -> list[Snapshot]:
        """Return all snapshots, the oldest first."""
        with self._translated():
            rows = self._database.execute(_SELECT + "ORDER BY s.number").fetchall()
        return [_snapshot(row) for row in rows]

    def find_remote(self, chain_id: str, parent: str) -> Snapshot | None:
        """Return the remote snapshot of this chain that has this parent, or None."""
        with self._translated():
            row = self._database.execute(
                _SELECT + "WHERE s.chain_id = ? AND coalesce(p.key, '') = ?", (chain_id, parent)
            ).fetchone()
        return None if row is None else _snapshot(row)

    @contextlib.contextmanager
    def numbers(self) -> Iterator[frozenset[int]]:
        """Yield the numbers of all snapshots; none is made or removed until the block ends."""
        with self._translated():
            rows = self._database.execute("SELECT number FROM snapshots").fetchall()
            yield frozenset(number for (number,) in rows)

    # ---- changing -----------------------------------------------------------------------------

    def create(
        self,
        kind: SnapshotKind,
        key: str,
        parent: str,
        labels: Mapping[str, str],
        prepare: Callable[[Snapshot], None],
    ) -> Snapshot:
        """Make an active or view snapshot.

        `prepare` makes its directory; if `prepare` raises, no snapshot is made.
        Raises: AlreadyExistsError; NotFoundError if there is no such parent; InvalidInputError if
        the parent is not committed; any error of `prepare`.
        """
        check_key(key, "key")
        with self._transaction():
            self._check_parent(parent)
            self._insert(kind, key, parent, labels, "")
            snapshot = self.get(key)
            prepare(snapshot)
            return snapshot

    def create_remote(self, chain_id: str, parent: str, labels: Mapping[str, str]) -> Snapshot:
        """Make a committed snapshot that shows the tree of a chain, unless there is one already.

        Raises: NotFoundError, InvalidInputError, as for `create`.
        """
        with self._transaction():
            self._check_parent(parent)
            found = self.find_remote(chain_id, parent)
            if found is not None:
                return found
            # A chain has several parents if one namespace of containerd unpacked the lower layers
            # itself. containerd finds a snapshot by label and parent, whatever its name.
            taken = self._database.execute("SELECT 1 FROM snapshots WHERE key = ?", (chain_id,))
            name = chain_id if taken.fetchone() is None else f"{chain_id} on {parent}"
            self._insert(SnapshotKind.COMMITTED, name, parent, labels, chain_id)
            return self.get(name)

    def commit(self, name: str, key: str, labels: Mapping[str, str], usage: SnapshotUsage) -> None:
        """Turn the active snapshot `key` into the committed snapshot `name`.

        Raises: NotFoundError, AlreadyExistsError; BusyError if the snapshot is not active.
        """
        check_key(name, "name")
        with self._transaction() as database:
            snapshot = self.get(key)
            if snapshot.kind is not SnapshotKind.ACTIVE:
                raise BusyError(f"the snapshot {key[:200]} cannot be committed: it is not active")
            now_ns = time.time_ns()
            try:
                database.execute(
                    "UPDATE snapshots SET key = ?, kind = ?, labels = ?, created_ns = ?,"
                    " updated_ns = ?, size_bytes = ?, inode_count = ? WHERE number = ?",
                    (
                        name,
                        SnapshotKind.COMMITTED.value,
                        json.dumps(dict(labels)),
                        now_ns,
                        now_ns,
                        usage.size_bytes,
                        usage.inode_count,
                        snapshot.number,
                    ),
                )
            except sqlite3.IntegrityError:
                raise AlreadyExistsError(f"there is a snapshot {name[:200]} already") from None

    def remove(self, key: str) -> Snapshot:
        """Remove a snapshot and return it.

        Raises: NotFoundError; BusyError if the snapshot is a parent.
        """
        with self._transaction() as database:
            snapshot = self.get(key)
            try:
                database.execute("DELETE FROM snapshots WHERE number = ?", (snapshot.number,))
            except sqlite3.IntegrityError:
                raise BusyError(
                    f"the snapshot {key[:200]} cannot be removed: others lie on it"
                ) from None
            return snapshot

    def update(self, key: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        """Change labels, as `changed_labels` does. Raises: NotFoundError, InvalidInputError."""
        with self._transaction() as database:
            snapshot = self.get(key)
            changed = changed_labels(snapshot.labels, labels, paths)
            database.execute(
                "UPDATE snapshots SET labels = ?, updated_ns = ? WHERE number = ?",
                (json.dumps(changed), time.time_ns(), snapshot.number),
            )
            return self.get(key)

    # ---- trees --------------------------------------------------------------------------------

    def tree_of(self, chain_id: str) -> str | None:
        """Return the index digest of the chain's tree if `note_tree` has recorded one."""
        with self._translated():
            row = self._database.execute(
                "SELECT index_digest FROM trees WHERE chain_id = ?", (chain_id,)
            ).fetchone()
        return None if row is None else str(row[0])

    def note_tree(self, chain_id: str, index_digest: str) -> None:
        """Record the index digest of the chain's tree."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO trees VALUES (?, ?)", (chain_id, index_digest))

    # ---- inside -------------------------------------------------------------------------------

    def _check_parent(self, parent: str) -> None:
        if parent and self.get(parent).kind is not SnapshotKind.COMMITTED:
            raise InvalidInputError(f"the snapshot {parent[:200]} is not committed: no parent")

    def _insert(
        self, kind: SnapshotKind, key: str, parent: str, labels: Mapping[str, str], chain_id: str
    ) -> None:
        now_ns = time.time_ns()
        try:
            self._database.execute(
                "INSERT INTO snapshots"
                " (key, parent, kind, labels, created_ns, updated_ns, chain_id)"
                " VALUES (?, (SELECT number FROM snapshots WHERE key = ?), ?, ?, ?, ?, ?)",
                (key, parent, kind.value, json.dumps(dict(labels)), now_ns, now_ns, chain_id),
            )
        except sqlite3.IntegrityError:
            raise AlreadyExistsError(f"there is a snapshot {key[:200]} already") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._translated():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError as error:
                if "full" in str(error):
                    raise NoSpaceError(f"cannot write {self._path}: the disk is full") from error
                raise BootseerError(f"the database {self._path} failed: {error}") from error
            except sqlite3.DatabaseError as error:
                raise CorruptError(f"the database {self._path} is damaged: {error}") from error


def _snapshot(row: tuple[int, str, str, str, str, int, int, str, int, int]) -> Snapshot:
    number, key, parent, kind, labels, created_ns, updated_ns, chain_id, size_bytes, inodes = row
    return Snapshot(
        number,
        key,
        parent,
        SnapshotKind(kind),
        from_line(labels, dict[str, str]),
        created_ns,
        updated_ns,
        chain_id,
        SnapshotUsage(size_bytes, inodes),
    )
