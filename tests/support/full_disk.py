"""A full disk for one process."""

import errno
import os

import pytest


class FullDisk:
    """Makes the node cache's writes (`pwrite`, `posix_fallocate`) fail while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        for name in ("pwrite", "posix_fallocate"):
            self._patch(monkeypatch, name)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(os, name)

        def refusing(*arguments: object) -> object:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        monkeypatch.setattr(os, name, refusing)
