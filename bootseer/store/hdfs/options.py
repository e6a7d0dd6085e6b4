"""What the query of a URL of HDFS says. Pure (no I/O)."""

from urllib.parse import parse_qs, urlsplit

from bootseer.base.redact import public_url
from bootseer.errors import InvalidInputError


class HdfsOptions:
    """Of one URL; None where it leaves something to the cluster."""

    def __init__(self, url: str, deadline_s: float) -> None:
        """`deadline_s`: where the URL has none. Raises: InvalidInputError."""
        try:
            parts = urlsplit(url, allow_fragments=False)
            _, query = parts.port, parts.query  # a port that is none raises
            values = {
                key: each[-1] for key, each in parse_qs(query, strict_parsing=bool(query)).items()
            }
            self.deadline_s = float(values.pop("deadline_s", deadline_s))
            block_size_bytes = int(values.pop("block_size_bytes", 0))
            replication = int(values.pop("replication", 0))
        except ValueError as error:
            raise InvalidInputError(f"{public_url(url)!r} is not a usable URL: {error}") from error
        if values or self.deadline_s <= 0 or block_size_bytes < 0 or replication < 0:
            raise InvalidInputError(
                f"{public_url(url)}: options are deadline_s, block_size_bytes, replication; "
                "each a positive number"
            )
        self.block_size_bytes = block_size_bytes or None
        self.replication = replication or None
