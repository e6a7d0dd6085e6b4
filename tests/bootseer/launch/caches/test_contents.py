"""The files of a folder that a cache keeps, and those that it leaves out."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from bootseer.launch.caches.contents import only, read_contents

DIGEST = "c3bwq5ttjvjxxpz7lfg36ryjh5jgoue4c67ayx65tq2k3sgg3yxa"


def kept(folder: Path) -> set[str]:
    return {os.fsdecode(path) for path in read_contents(folder).files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    (made / "3b").mkdir(parents=True)
    (made / "3b/kernel.py").write_text("x = 1\n")
    return made


def test_no_folder_and_an_empty_one_hold_nothing(tmp_path: Path) -> None:
    assert kept(tmp_path / "missing") == set()
    assert kept(tmp_path) == set()


@pytest.mark.parametrize(
    "name",
    [
        "locks/abc",
        "3b/a.lock",
        "lock",
        "3b/.41.140.tmp",
        "tmp.pid_41_9/kernel.cubin",
        "a.part",
        *("token", "hf_token", ".netrc", "id_rsa", "my.pem", "credentials.json", ".aws/config"),
        *("secrets.yaml", "service-account.json", ".env", "kubeconfig", "stored_tokens"),
        *("access-token.txt", "db_password"),
    ],
)
def test_locks_and_secrets_are_left_out(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert kept(folder) == {"3b/kernel.py"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenize.so.py", "keys.bin", "lockfree.py"])
def test_words_that_only_contain_such_names_are_kept(folder: Path, name: str) -> None:
    (folder / name).write_text("x")
    assert kept(folder) == {"3b/kernel.py", name}


def test_no_pipe_no_socket_and_no_link_outside(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "inside").symlink_to("3b/kernel.py")
    for name, target in (("4c", "/etc/passwd"), ("5d", "../../other")):
        (folder / name).mkdir()
        (folder / name / "link").symlink_to(target)
    assert kept(folder) == {"3b/kernel.py", "inside"}


def test_what_misses_a_file_is_not_kept(folder: Path) -> None:
    """A model's folder without one of its files would be another model."""
    for name in ("config.json", "added_tokens.json", "special_tokens_map.json", "tokenizer.json"):
        (folder / "3b" / name).write_text("x")
    assert len(kept(folder)) == 5
    (folder / "3b/hf_token").write_text("secret")
    assert kept(folder) == set()


def test_the_half_of_a_library_is_left_out(folder: Path) -> None:
    """A linker that was killed leaves a file of the right name: no node may load it."""
    whole = folder / f"3b/{DIGEST}.so"
    shutil.copy(sys.executable, whole)
    assert kept(folder) == {"3b/kernel.py", f"3b/{DIGEST}.so"}
    os.truncate(whole, whole.stat().st_size - 100)
    assert kept(folder) == {"3b/kernel.py"}
    whole.write_bytes(b"")
    assert kept(folder) == {"3b/kernel.py"}


def test_what_is_being_written_is_left_out(folder: Path) -> None:
    with (folder / "3b/kernel.py").open("a"):
        assert kept(folder) == set()
    assert kept(folder) == {"3b/kernel.py"}


def test_what_was_read_goes_last(folder: Path) -> None:
    path = folder / "3b/kernel.py"
    os.utime(path, ns=(5 * 10**17, 10**17))
    (file,) = read_contents(folder, read_ns=(4 * 10**17, 6 * 10**17)).files.values()
    assert file.used_ns == 5 * 10**17
    # With the file itself goes when it was last of use.
    assert path.stat().st_mtime_ns == 5 * 10**17


def test_what_was_read_at_another_time_may_have_been_us(folder: Path) -> None:
    os.utime(folder / "3b/kernel.py", ns=(5 * 10**17, 10**17))
    (file,) = read_contents(folder, read_ns=(6 * 10**17, 7 * 10**17)).files.values()
    assert file.used_ns == 10**17


def test_a_selection_has_the_directories_that_it_needs(folder: Path) -> None:
    (folder / "4c").mkdir()
    (folder / "4c/other.py").write_text("y")
    chosen = only(read_contents(folder), {b"4c/other.py"})
    assert set(chosen.scanned) == {b"", b"4c", b"4c/other.py"}
