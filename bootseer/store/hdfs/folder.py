"""One folder of an HDFS: the paths of what is in it, and how messages call that. Pure (no I/O)."""

from urllib.parse import urlsplit

from bootseer.base.redact import public_url
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
