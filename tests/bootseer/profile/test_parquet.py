"""A start as a Parquet file: read by pyarrow, and by `report` as what it was."""

import json
import sys
from pathlib import Path

import pyarrow.compute
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from bootseer.cli import cli
from bootseer.errors import CorruptError, NotFoundError, UnsupportedError
from bootseer.profile.files import Folder, find_start
from bootseer.profile.parquet import ParquetFile
from bootseer.timeline import Timeline
from testbed.starts.generate import Recipe
from testbed.starts.timelines import write_timelines


def _run(folder: Path, *arguments: object) -> Result:
    words = ["--timeline-dir", str(folder), "report", *map(str, arguments)]
    done = CliRunner().invoke(cli, words)
    if done.exception is not None:
        raise done.exception
    return done


def test_a_start_is_the_same_from_its_file(tmp_path: Path) -> None:
    write_timelines(tmp_path, Recipe(4, 2), job="j", submission="s")
    path, page, other = tmp_path / "s.parquet", tmp_path / "a.html", tmp_path / "b.html"
    before = _run(tmp_path, "j", "--json", "--parquet", path, "--html", page).output
    after = _run(tmp_path / "none", "--json", "--from", path, "--html", other).output
    assert json.loads(before) == json.loads(after)
    assert page.read_text() == other.read_text()
    table = pyarrow.parquet.read_table(path)
    stages = find_start(Folder(tmp_path), "j").stages()
    assert table.num_rows == len(stages)
    assert table.schema.field("began").type == pyarrow.timestamp("ns", "UTC")
    assert set(table["node"].to_pylist()) == {stage.resource["host.name"] for stage in stages}
    seconds = sum(((stage.end_ns or 0) - stage.start_ns) / 1e9 for stage in stages)
    assert pyarrow.compute.sum(table["seconds"]).as_py() == pytest.approx(seconds)
    attributes = json.loads(table["attributes"][0].as_py())
    assert attributes == dict(stages[0].attributes)


def test_open_stages_failures_and_imports_are_in_it(tmp_path: Path) -> None:
    timeline = Timeline.start(tmp_path, job="j", submission="", attempt=3, node="n-1", rank=2)
    timeline.span("é", {"yes": True, "part": 0.5, "many": 2**60}).end(error=OSError("no"))
    timeline.span("open")
    timeline.event("bootseer.imports", '[["torch",0,1,2]]')
    _run(tmp_path, "j", "--parquet", tmp_path / "s.parquet")
    (start,) = ParquetFile(tmp_path / "s.parquet").starts("")
    expected = find_start(Folder(tmp_path), "j")
    assert start.name == expected.name == ":3"
    assert start.stages() == expected.stages()
    assert start.events("bootseer.imports") == ['[["torch",0,1,2]]']


def test_files_that_are_none_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    with pytest.raises(NotFoundError):
        _run(tmp_path, "--from", path)
    for data in (b"", b"PAR1" + bytes(100) + b"PAR1", b"x" * 1000):
        path.write_bytes(data)
        with pytest.raises(CorruptError, match="is no Parquet file"):
            _run(tmp_path, "--from", path)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path)
    with pytest.raises(CorruptError, match="is no start"):
        _run(tmp_path, "--from", path)
    named = pyarrow.schema(
        [("name", pyarrow.string()), ("began", pyarrow.int64()), ("ended", pyarrow.int64())],
        metadata={"kind": "bootseer.start", "version": "1", "name": "x"},
    )
    rows = [{"name": "x", "began": 1, "ended": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, named), path)
    with pytest.raises(CorruptError, match="it is no start"):
        _run(tmp_path, "--from", path)
    # Its attributes are not believed either.
    write_timelines(tmp_path, Recipe(1, 1), job="j")
    _run(tmp_path, "j", "--parquet", path)
    table = pyarrow.parquet.read_table(path)
    column = table.column_names.index("attributes")
    for text in ("[1]", "{", '{"a": {"b": 1}}'):
        texts = pyarrow.array([text] * table.num_rows)
        pyarrow.parquet.write_table(table.set_column(column, "attributes", texts), path)
        if text.endswith("}}"):
            _run(tmp_path, "--from", path)
            continue
        with pytest.raises(CorruptError, match="it is no start"):
            _run(tmp_path, "--from", path)


def test_without_pyarrow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_timelines(tmp_path, Recipe(1, 1), job="j")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'bootseer\[parquet\]'"):
        _run(tmp_path, "j", "--parquet", tmp_path / "x")
    assert _run(tmp_path, "j").exit_code == 0


def test_a_large_start_is_read_in_one_thread(tmp_path: Path) -> None:
    """Pyarrow crashed where several read from one file."""
    write_timelines(tmp_path, Recipe(100, 8), job="j")
    path = tmp_path / "s.parquet"
    before = _run(tmp_path, "j", "--json", "--parquet", path).output
    for _ in range(3):
        assert _run(tmp_path, "--json", "--from", path).output == before
