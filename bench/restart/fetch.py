"""`fetch.py URL FOLDER DIRECTORY`: copies files of an HDFS to this node, one stream each, at once.

Existing files are kept, as in a script around `hdfs dfs -get`.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> None:
    """Fetch the missing files."""
    import hdfs_native

    url, folder, directory = sys.argv[1:]
    client = hdfs_native.Client(url)

    def fetch(path: str, size: int) -> None:
        target = Path(directory, Path(path).name)
        if target.exists():
            return
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            for piece in client.read(path).read_range_stream(0, size):
                file.write(piece)
        partial.rename(target)

    Path(directory).mkdir(parents=True, exist_ok=True)
    found = list(client.list_status(folder))
    with ThreadPoolExecutor(len(found)) as pool:
        for done in [pool.submit(fetch, one.path, one.length) for one in found]:
            done.result()


if __name__ == "__main__":
    main()
