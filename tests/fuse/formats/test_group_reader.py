"""Loading a checkpoint as a group: each byte is read by one rank and sent to others over gloo."""

from pathlib import Path

import pytest

from tests.fuse.formats.host import TorchHost

UNIT = 2**20


@pytest.fixture(scope="module")
def replicated(torch_host: TorchHost, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """URL and size in bytes of a checkpoint that every rank needs whole."""
    folder = tmp_path_factory.mktemp("replicated")
    url = (folder / "stored").as_uri()
    (size_bytes,) = torch_host.check("group_checks:save_replicated", folder / "saved", url)
    return url, size_bytes


@pytest.fixture(scope="module")
def from_three(torch_host: TorchHost, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """URL and size in bytes of a checkpoint whose rows were saved by three ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    url = (folder / "stored").as_uri()
    torch_host.check("group_checks:save_sharded", folder / "saved", ranks=3)
    (size_bytes,) = torch_host.check("group_checks:copy_folder_in", folder / "saved", url)
    return url, size_bytes


def test_each_byte_is_read_by_one_rank(torch_host: TorchHost, replicated: tuple[str, int]) -> None:
    url, size_bytes = replicated
    counts = torch_host.check("group_checks:load_replicated", url, ranks=4)
    assert sum(count["read_bytes"] for count in counts) == size_bytes
    # No block is fetched by two ranks, and no more bytes than the file has.
    assert sum(count["fetched_bytes"] for count in counts) == size_bytes
    shares = [count["read_bytes"] for count in counts]
    assert max(shares) - min(shares) <= 2 * UNIT, "not balanced to within a piece"
    data_bytes = sum(count["sent_bytes"] for count in counts)
    assert data_bytes == sum(count["received_bytes"] for count in counts)
    assert data_bytes == 3 * (size_bytes - _metadata_bytes(url))


def test_one_process_needs_no_group(torch_host: TorchHost, replicated: tuple[str, int]) -> None:
    url, size_bytes = replicated
    (counts,) = torch_host.check("group_checks:load_alone", url)
    assert counts["read_bytes"] == counts["fetched_bytes"] == size_bytes
    assert counts["sent_bytes"] == counts["received_bytes"] == 0


def test_a_part_of_the_ranks_loads(torch_host: TorchHost, replicated: tuple[str, int]) -> None:
    url, size_bytes = replicated
    first, none, last = torch_host.check("group_checks:load_subgroup", url, ranks=3)
    assert none is None
    assert first["read_bytes"] + last["read_bytes"] == size_bytes


@pytest.mark.parametrize(
    ("ranks", "hows"), [(2, ["rows", "columns", "replicated"]), (3, ["rows"]), (4, ["rows"])]
)
def test_resharding(
    torch_host: TorchHost, from_three: tuple[str, int], ranks: int, hows: list[str]
) -> None:
    url, size_bytes = from_three
    results = torch_host.check("group_checks:load_sharded", url, hows, ranks=ranks)
    for how, counts in zip(hows, zip(*results, strict=True), strict=True):
        assert sum(count["read_bytes"] for count in counts) == size_bytes, how
        # Where ranks need different items, two of them may fetch the unit between them.
        fetched = sum(count["fetched_bytes"] for count in counts)
        assert size_bytes <= fetched <= size_bytes + (8 * UNIT if how == "rows" else 0), how
        sent = sum(count["sent_bytes"] for count in counts)
        if ranks == 3:
            assert sent == 0, "what only one rank needs was sent"
        else:
            assert 0 < sent <= size_bytes, how


@pytest.mark.parametrize("fault", ["raise", "refuse", "die", "stop"])
def test_a_rank_that_fails_ends_the_load_on_all(
    torch_host: TorchHost, replicated: tuple[str, int], fault: str
) -> None:
    url, _ = replicated
    # A stopped rank is noticed by its silence only, which costs the two deadlines.
    deadline_s, all_s = (1.0, 15.0) if fault == "stop" else (20.0, 60.0)
    outcome = torch_host.attempt(
        "group_checks:load_and_tell", url, fault, deadline_s, ranks=3, deadline_s=all_s
    )
    told = {"raise": "disk is broken", "refuse": "not wanted"}
    assert outcome.codes == [0, 0, 0 if fault in told else -9], outcome.results
    for text in outcome.results[: 3 if fault in told else 2]:
        # For a dead rank, dcp.load reports the error of its own next collective.
        assert told.get(fault, "RuntimeError") in text


def test_no_checkpoint_is_told_to_all(torch_host: TorchHost, tmp_path: Path) -> None:
    url = (tmp_path / "nothing").as_uri()
    for text in torch_host.check("group_checks:load_and_tell", url, "none", 20.0, ranks=2):
        assert "No such file or directory" in text


def _metadata_bytes(url: str) -> int:
    return Path(url.removeprefix("file://"), ".metadata").stat().st_size
