"""Names of the streams with claimed bytes of one image, and the node's mark of a refutation.

Bytes that a bundle brought serve one image of one store until one of them is found wrong
(docs/format/cache.md, "Proven and claimed"). The finder then replaces the mark, a file that all
servers of the image look at. The mark is a part of the streams' names: a server that
starts later opens other streams, so it never gets bytes that a server
which has not looked yet goes on writing.

Threading: every method from any thread at once.
"""

import hashlib
import logging
import os
from pathlib import Path

from bootseer.blob.tree import Blob
from bootseer.errors import from_oserror
from bootseer.linux.private_files import make_private_directory, private_opener
from bootseer.prefetch.cache.stream_keys import frames_key

_log = logging.getLogger(__name__)

_MARK_BYTES = 32


class ClaimsMark:
    """Names and validity of what is claimed for one image of one store."""

    def __init__(self, folder: Path, claimant: str) -> None:
        """`folder` is the one with the streams; `claimant` is `stream_keys.claimant_of`'s.
        Raises: BootseerError."""
        hex_digits = hashlib.sha256(claimant.encode("ascii")).hexdigest()
        self._path = folder / f"claimed-{hex_digits}.refuted"
        self._claimant = claimant
        try:
            self._mark = self._read()
        except OSError as error:
            # Without it, names of streams with wrong bytes might be used once more.
            raise from_oserror(error, f"read {self._path}") from error

    def key(self, blob: Blob) -> str:
        """Return the key of the stream that holds the claimed bytes of `blob`."""
        text = " ".join(filter(None, (self._claimant, self._mark, frames_key(blob))))
        return f"claimed:{hashlib.sha256(text.encode('ascii')).hexdigest()}"

    @property
    def is_refuted(self) -> bool:
        """Whether a process has found claimed bytes wrong since this object was made."""
        try:
            found = self._read()
        except OSError as error:
            _log.debug("cannot look whether claims were refuted: %s", error)
            return False
        # None: somebody has removed the cache.
        return found not in ("", self._mark)

    def refute(self) -> None:
        """Tell all processes of the node, durably. Never raises: on a full disk none is told."""
        if self.is_refuted:
            return
        temporary = self._path.with_name(f".new-{os.urandom(8).hex()}")
        try:
            make_private_directory(self._path.parent)
            try:
                with open(temporary, "wb", opener=private_opener) as file:
                    file.write(os.urandom(_MARK_BYTES // 2).hex().encode("ascii"))
                    file.flush()
                    # A crash of the machine must not bring the old names back.
                    os.fsync(file.fileno())
                temporary.replace(self._path)
            finally:
                temporary.unlink(missing_ok=True)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            _log.warning("other servers of the image are not told that bytes are wrong: %s", error)

    def _read(self) -> str:
        """The mark; "" where there is none. Raises: OSError."""
        try:
            with open(self._path, "rb", opener=private_opener) as file:
                return file.read(_MARK_BYTES).decode("ascii", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""
