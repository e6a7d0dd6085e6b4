"""Actions of ranks in the tests of `GroupReader`; run by `host`, which has imported torch."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bootseer.checkpoints import GroupReader
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.tools.copy import copy_in, open_storage
from bootseer.settings.config import Settings, load_config

PIECE = 2**20
SEED = 5


def settings(deadline_s: float = 20.0) -> Settings:
    """Return the settings of a rank."""
    return load_config(environ={"HOME": "/", "BOOTSEER_DEADLINE": str(deadline_s)}).settings


def full_state() -> dict[str, Any]:
    """Return the saved state, the same on every rank: 11 MB of tensors and other values."""
    numbers = torch.Generator().manual_seed(SEED)
    return {
        "model": {
            "embedding": torch.randn(1024, 1536, generator=numbers),
            "layers": [torch.randn(64, 768, generator=numbers).to(torch.bfloat16)] * 2
            + [torch.randn(200, 1024, generator=numbers) for _ in range(4)],
            "scale": torch.tensor(3.5),
        },
        "step": 1234,
        "names": ["a", "b"],
    }


def like(state: Any) -> Any:
    """Return a state of the same shape with empty tensors."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [like(value) for value in state]
    return None


def equal(left: Any, right: Any) -> bool:
    """Return whether two states are equal to the bit."""
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def sharded(state: dict[str, Any], placement: Any) -> dict[str, Any]:
    """Return the state with its large tensors as DTensors over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = state["model"]
    return {
        "embedding": distribute_tensor(model["embedding"], mesh, [placement]),
        "last": distribute_tensor(model["layers"][-1], mesh, [placement]),
    }


# ---- saving -------------------------------------------------------------------------------


def save_replicated(folder: str, url: str) -> int:
    """Save the state with torch's own writer and copy it in; return its bytes."""
    dcp.save(full_state(), checkpoint_id=folder, no_dist=True)
    return _copy_in(folder, url)


def save_sharded(rank: int, folder: str) -> None:
    dcp.save(sharded(full_state(), Shard(0)), checkpoint_id=folder)


def _copy_in(folder: str, url: str) -> int:
    count = 0
    with open_storage(settings(), url, stripe_unit_bytes=PIECE) as storage:
        for path in sorted(Path(folder).iterdir()):
            count += copy_in(storage, path, path.name)
    return count


def copy_folder_in(folder: str, url: str) -> int:
    return _copy_in(folder, url)


# ---- loading ------------------------------------------------------------------------------


def _reader(url: str, **options: Any) -> GroupReader:
    options = {"settings": settings(), "piece_bytes": PIECE, "memory_bytes": 8 * PIECE, **options}
    return GroupReader(url, **options)


def _counts(reader: GroupReader) -> dict[str, int]:
    found = reader.statistics
    return {name: getattr(found, name) for name in found.__struct_fields__}


def load_replicated(rank: int, url: str) -> dict[str, int]:
    """Load everything on every rank, twice with one reader."""
    reader = _reader(url)
    for _ in range(2):
        state = like(full_state())
        dcp.load(state, storage_reader=reader)
        assert equal(state, full_state())
    return _counts(reader)


def load_alone(url: str) -> dict[str, int]:
    """Load without a group."""
    reader = _reader(url)
    state = like(full_state())
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert equal(state, full_state())
    return _counts(reader)


def load_sharded(rank: int, url: str, hows: list[str]) -> list[dict[str, int]]:
    """Load into another number of ranks, or with another sharding."""
    counts = []
    for how in hows:
        placement = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[how]
        wanted = sharded(full_state(), placement)
        state = {key: torch.zeros_like(value) for key, value in wanted.items()}
        reader = _reader(url)
        dcp.load(state, storage_reader=reader)
        for key, value in wanted.items():
            assert isinstance(value, DTensor)
            assert torch.equal(state[key].to_local(), value.to_local()), (how, key)
        counts.append(_counts(reader))
    return counts


def load_subgroup(rank: int, url: str) -> dict[str, int] | None:
    """Load by two of three ranks."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    reader = _reader(url, process_group=group)
    state = like(full_state())
    dcp.load(state, storage_reader=reader, process_group=group)
    assert equal(state, full_state())
    return _counts(reader)


def load_and_tell(rank: int, url: str, fault: str, deadline_s: float) -> str:
    """Load while a fault happens on the last rank; return this rank's error."""
    is_last = rank == dist.get_world_size() - 1
    if is_last and fault in ("die", "stop"):
        _at_piece(3, signal.SIGKILL if fault == "die" else signal.SIGSTOP)
    if is_last and fault == "raise":
        _at_piece(3, None)
    state = like(full_state())
    planner = _RefusingPlanner() if is_last and fault == "refuse" else None
    try:
        reader = _reader(url, settings=settings(deadline_s))
        dcp.load(state, storage_reader=reader, planner=planner)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


class _RefusingPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc] # torch has no types here
    """Planner that refuses everything that was read."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        raise ValueError("this tensor is not wanted")


def _at_piece(number: int, fatal: "signal.Signals | None") -> None:
    """Kill, stop or fail this rank when it reads piece number `number`."""
    real = StripedReader.read_into
    count = 0

    def read_into(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count == number:
            if fatal is None:
                raise OSError(5, "the disk is broken")
            os.kill(os.getpid(), fatal)
        return real(*arguments)

    StripedReader.read_into = read_into  # type: ignore[method-assign,assignment]
