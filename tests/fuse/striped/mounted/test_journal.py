"""What the server of a mount notes for its successor."""

from pathlib import Path

import pytest

from bootseer.errors import CorruptError
from bootseer.fuse.striped.mounted.life.journal import Journal, read_journal


def test_a_journal_grows_no_further_than_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    journal = Journal(path)
    with journal.anew():
        journal.add({"node": 2})
    assert read_journal(path) == [{"node": 2}]
    while not journal.is_outgrown:
        journal.add({"node": 3, "name": "x" * 10_000})
    assert path.stat().st_size < 5 * 2**20
    with journal.anew():
        journal.add({"node": 4})
    assert read_journal(path) == [{"node": 4}]
    with path.open("ab") as file:
        file.write(b'{"node": 5')
    # Cut short: nobody was told of it.
    assert read_journal(path) == [{"node": 4}]
    path.write_text('{"version": 99}\n')
    with pytest.raises(CorruptError, match="version"):
        read_journal(path)
    assert read_journal(tmp_path / "none") == []
