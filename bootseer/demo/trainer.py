"""Training job of the demo; runs in the container, or on this machine without root.

    python trainer.py CHECKPOINT_DIR

Imports packages as a real job does, loads the newest checkpoint, says that it is ready, and saves
the next checkpoint the way training code does: under a temporary name, then renamed. Prints one
JSON line. Uses nothing of Bootseer but `stage` and `ready`.
"""

import json
import os
import sys
import time
import zlib

import bootseer

_BLOCK_BYTES = 16 << 20
# Packages of the environment that the set-up command installed, and of the image.
_MODULES = (
    *("rich.console", "requests", "fsspec", "docker", "hdfs_native", "zstandard"),
    *("pygments.lexers.python", "asyncio", "sqlite3", "xml.dom.minidom", "unittest.mock"),
    # Large packages, which are not installed with Bootseer.
    *("pyarrow.parquet", "pyarrow.compute", "numpy"),
)


def _import_all() -> list[str]:
    imported = []
    for name in _MODULES:
        try:
            __import__(name)
        except ImportError:
            continue
        imported.append(name)
    return imported


def _load(path: str) -> bytearray:
    size = os.stat(path).st_size
    weights = bytearray(size)
    view = memoryview(weights)
    done = 0
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        while done < size:
            count = file.readinto(view[done : done + _BLOCK_BYTES])
            if not count:
                raise EOFError(f"{path} ends at {done} of {size} bytes")
            done += count
    return weights


def _save(path: str, weights: bytearray) -> None:
    view = memoryview(weights)
    with open(path + ".tmp", "wb", buffering=0) as file:  # noqa: PTH123
        for begin in range(0, len(view), _BLOCK_BYTES):
            file.write(view[begin : begin + _BLOCK_BYTES])
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def _step(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(".bin"))


def main(folder: str) -> None:
    """Load the newest `step-N.bin` of `folder`, if there is one, and save `step-N+1.bin`."""
    begin_s = time.monotonic()
    with bootseer.stage("import"):
        modules = _import_all()
    imported_s = time.monotonic()
    steps = [_step(name) for name in os.listdir(folder) if name.endswith(".bin")]
    newest = max(steps, default=0)
    with bootseer.stage("load"):
        weights = _load(f"{folder}/step-{newest}.bin") if newest else bytearray()
    loaded_s = time.monotonic()
    bootseer.ready()
    # The first training step would run here; the demo computes a checksum of the weights instead.
    checksum = zlib.crc32(weights)
    if newest:
        _save(f"{folder}/step-{newest + 1}.bin", weights)
    result = {
        "modules": modules,
        "step": newest,
        "checksum": checksum,
        "import_s": imported_s - begin_s,
        "load_s": loaded_s - imported_s,
        "save_s": time.monotonic() - loaded_s,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
