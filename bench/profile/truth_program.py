"""Training program of the case `truth`: each rank times its own stages with a stop-watch.

Faults come as variables of the node. The stop-watch uses the monotonic clock, which all nodes of
this machine share, and writes a line of JSON at the begin and at the end of a stage.
"""

import contextlib
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANK, RESTART = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
# An agent does not count the restarts for another node's failure: the process tells rounds apart.
WATCH = Path(f"{os.environ['WATCH']}-{RANK}-{os.getpid()}.jsonl").open("w", buffering=1)  # noqa: SIM115


def note(stage: str, **times: float) -> None:
    WATCH.write(json.dumps({"stage": stage, **times}) + "\n")


@contextlib.contextmanager
def watched(stage: str) -> Iterator[None]:
    begin_s = time.monotonic()
    note(stage, begin_s=begin_s)
    yield
    note(stage, begin_s=begin_s, end_s=time.monotonic())


def fault(name: str) -> float:
    """Return the strength of a fault of this rank; 0 without."""
    ranks, _, strength = os.environ.get(f"FAULT_{name}", "").partition(":")
    return float(strength) if RANK in ranks.split(",") else 0.0


def download(size_bytes: int) -> bytes:
    with socket.create_connection((os.environ["SERVER"], 7000)) as connection:
        connection.sendall(b"%d\n" % size_bytes)
        with connection.makefile("rb") as file:
            data = file.read()
    if len(data) != size_bytes:
        raise ConnectionError(f"the server sent {len(data)} of {size_bytes} bytes")
    return data


class RemoteFile(io.BytesIO):
    """Checkpoint that is downloaded when torch first reads it."""

    is_here = False

    def _fetch(self) -> None:
        if not self.is_here:
            self.is_here = True
            if fault("HANG"):
                time.sleep(3600)
            if fault("CRASH") and RESTART == "0":
                time.sleep(fault("CRASH"))
                raise OSError("the checkpoint is damaged")
            self.write(download(int(os.environ["CHECKPOINT_BYTES"])))
            io.BytesIO.seek(self, 0)

    def read(self, *size: Any) -> bytes:
        self._fetch()
        return super().read(*size)

    def seek(self, *where: Any) -> int:
        self._fetch()
        return super().seek(*where)

    def tell(self) -> int:
        self._fetch()
        return super().tell()


note("process", begin_s=time.monotonic())
with watched("import torch"):
    import torch
    import torch.distributed as dist
with watched("import shared_tools"):
    import shared_tools  # type: ignore[import-not-found]  # noqa: F401
time.sleep(fault("LATE"))
with watched("init_process_group"):
    dist.init_process_group("gloo")
with watched("torch.load"):
    torch.load(RemoteFile())
model = torch.nn.Linear(8, 8)
# The constructor would import it, and a rank would come to its barrier later than it began.
import torch._dynamo  # noqa: E402

with watched("DistributedDataParallel"):
    parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters())


class FileDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """Data set in a file of the node's disk, read past the page cache."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            file = os.open(f"{os.environ['DATA']}-{RANK}", os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            while os.read(file, 1 << 18):
                pass
            os.close(file)
        return torch.ones(8)


with watched("first batch"):
    batch = next(iter(torch.utils.data.DataLoader(FileDataset(), batch_size=8)))
loss = parallel(batch).sum()
with watched("first backward"):
    loss.backward()
optimizer.step()
note("ready", begin_s=time.monotonic())
dist.destroy_process_group()
sys.stdout.flush()
# Threads of torch may abort the interpreter at its end.
os._exit(0)
