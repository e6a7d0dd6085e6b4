"""Commands that belong to no start ask no fan-out, whatever the setting `fanout` is."""

import os
import socket
import threading
from pathlib import Path

import pytest

from bootseer.fanout.local import socket_name
from testbed.mounts.image_mounts import bootseer, checksums_in_child, index, settings_at
from testbed.mounts.sweeping import sweep


@pytest.mark.needs("mount", "fuse")
def test_mounts_of_images_and_snapshots_wait_for_no_other_node(tmp_path: Path) -> None:
    """Regression: the first faults waited for a fan-out that had never begun."""
    settings = settings_at(tmp_path)
    assert settings.fanout, "auto"
    asked: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            asked.append(connection)
            connection.close()

    source, target, mount = tmp_path / "source", tmp_path / "env", tmp_path / "mnt"
    for folder in (source, target, mount):
        folder.mkdir()
        (folder / "file").write_bytes(os.urandom(100_000))
    (mount / "file").unlink()
    index(settings, source, "image:1")
    made = bootseer(settings, "snapshot", "create", "--target", target, "--name", "env")
    assert made.returncode == 0, made.stderr
    target.rename(tmp_path / "moved")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_name(settings))
        listener.listen()
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            for words in (
                ("image", "mount", "image:1", mount),
                ("snapshot", "restore", "env", "--mode", "mount"),
            ):
                done = bootseer(settings, *words)
                assert done.returncode == 0, done.stderr
            for path in (mount / "file", target / "file"):
                assert not checksums_in_child([path])[0].startswith("E")
            for directory in (mount, target):
                assert bootseer(settings, "unmount", directory).returncode == 0
        finally:
            sweep(settings.run_dir.parent, settings)
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
    assert not asked
