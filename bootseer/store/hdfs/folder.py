"""What a URL of HDFS says: a folder, with the paths below it, and options. Pure (no I/O)."""

import math
from urllib.parse import parse_qs, urlsplit

from bootseer.base.redact import public_url
from bootseer.errors import InvalidInputError
from bootseer.store.paths import Folder, split_path


class HdfsFolder(Folder):
    """The folder of a URL, by whatever client it is reached."""

    def __init__(self, url: str) -> None:
        self.url = public_url(url)
        # Hadoop does not percent-decode paths, so neither is done here.
        path = urlsplit(url, allow_fragments=False).path
        self._root = "/" + "/".join(split_path(path.strip("/")))

    def full(self, path: str, *, file: bool = False) -> str:
        """The path in the file system; `file`: not that of the root itself."""
        names = self._names_of_file(path) if file else split_path(path)
        return "/".join((self._root.rstrip("/"), *names)) or "/"

    def name(self, path: str) -> str:
        """The full URL, for messages."""
        return self._name(path)


class HdfsOptions:
    """The options in the query of one URL; None where it leaves something to the cluster."""

    def __init__(self, url: str, deadline_s: float) -> None:
        """`deadline_s`: where the URL has none. Raises: InvalidInputError."""
        try:
            parts = urlsplit(url, allow_fragments=False)
            _, query = parts.port, parts.query  # a port that is none raises
            found = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
            values = {key: each[-1] for key, each in found.items()}
            self.deadline_s = float(values.pop("deadline_s", deadline_s))
            block_size_bytes = int(values.pop("block_size_bytes", 0))
            replication = int(values.pop("replication", 0))
        except ValueError as error:
            raise InvalidInputError(f"{public_url(url)!r} is not a usable URL: {error}") from error
        is_time = 0 < self.deadline_s < math.inf  # not so is nan
        if values or not is_time or block_size_bytes < 0 or replication < 0:
            raise InvalidInputError(
                f"{public_url(url)}: options are deadline_s, block_size_bytes, replication; "
                "each a positive number"
            )
        self.block_size_bytes = block_size_bytes or None
        self.replication = replication or None
