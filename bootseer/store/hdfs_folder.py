"""One folder of an HDFS: the paths of what is in it, and how messages call that. Pure (no I/O)."""

from urllib.parse import urlsplit

from bootseer.errors import InvalidInputError
from bootseer.redact import public_url
from bootseer.store.paths import split_path


class HdfsFolder:
    """The folder of a URL, by whatever client it is reached."""

    def __init__(self, url: str) -> None:
        self.url = public_url(url)
        # Hadoop does not percent-decode paths, so neither is done here.
        path = urlsplit(url, allow_fragments=False).path
        self._root = "/" + "/".join(split_path(path.strip("/")))

    def full(self, path: str, *, file: bool = False) -> str:
        """The path in the file system; `file`: not that of the root itself."""
        names = split_path(path)
        if file and not names:
            raise InvalidInputError(f"the root of {self.url} is a folder and stays one")
        return "/".join((self._root.rstrip("/"), *names)) or "/"

    def name(self, path: str) -> str:
        """The full URL, for messages."""
        return f"{self.url}/{path}" if path else self.url
