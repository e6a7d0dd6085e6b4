"""Journal that the server of a mount leaves to its successor."""

import os
from pathlib import Path

import pytest

from bootseer.errors import CorruptError
from bootseer.fuse.striped.mounted.journal import (
    Journal,
    NodeGoneRecord,
    NodeKind,
    NodeRecord,
    read_journal,
)


def named(node: int, name: bytes) -> NodeRecord:
    return NodeRecord(node, 1, name, False, 0, 0, b"", NodeKind.STORED, 0, False)


def test_a_journal_grows_no_further_than_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    with journal.anew():
        journal.add(named(2, b"not UTF-8: \xff"))
    assert read_journal(path).nodes == {2: named(2, b"not UTF-8: \xff")}
    while not journal.is_outgrown:
        journal.add(named(3, b"x" * 10_000))
    assert path.stat().st_size < 5 * 2**20
    with journal.anew():
        journal.add(named(4, b"a"))
        journal.add(named(5, b"b"))
        journal.add(NodeGoneRecord(5))
    whole = path.read_bytes()
    assert read_journal(path).nodes == {4: named(4, b"a")}
    # A torn record was not confirmed to any caller.
    path.write_bytes(whole[:-1])
    assert list(read_journal(path).nodes) == [4, 5]
    path.write_bytes(whole + whole[:3])
    assert list(read_journal(path).nodes) == [4]
    assert not read_journal(tmp_path / "none").nodes


@pytest.mark.parametrize("data", [b"", b"nonsense\n", b"\1\0\0\0\xc1", b"\3\0\0\0\x92\0\x63"])
def test_what_is_no_journal_of_this_version_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="journal is"):
        read_journal(path)


@pytest.mark.needs("root")
def test_a_journal_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    with journal.anew():
        journal.add(named(2, b"a"))
    os.chown(path, 65534, -1)
    with pytest.raises(CorruptError, match="belongs to another user"):
        read_journal(path)
