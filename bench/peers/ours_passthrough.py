"""Bootseer's FUSE server on one directory, for the case `fuse-read`.

    python -m bench.peers.ours_passthrough SOURCE MOUNTPOINT --mode cached|direct_io|passthrough

Serves in the foreground until unmounted or terminated.
"""

import argparse
from pathlib import Path

from bootseer.fuse.kernel.options import MountOptions
from testbed.mounts.flat_directory import FlatDirectory, OpenMode
from testbed.mounts.serving import serve


def main() -> None:
    """Serve until the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--mode", type=OpenMode, choices=list(OpenMode), default=OpenMode.CACHED)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    options = MountOptions(
        name="bench",
        subtype="bootseer-bench",
        read_only=True,
        invalidate_on_change=False,
        passthrough=arguments.mode is OpenMode.PASSTHROUGH,
        threads=arguments.threads,
    )
    operations = FlatDirectory(arguments.source, arguments.mode, mapped=True)
    serve(operations, arguments.mountpoint, options)


if __name__ == "__main__":
    main()
