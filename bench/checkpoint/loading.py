"""Loads a checkpoint in a process of its own, and prints the time and CPU time as JSON.

    PYTHON -m bench.checkpoint.loading ACTION '{"path": ...}'

Runs in the Python of `torch_environment`. The start, imports and the preparation of an empty model
are not measured; opening the file is. One byte of each page of each tensor is read, so that a
mapped file is loaded, too. Each action returns the function that is measured.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.checkpoint.client import Timed, measure

SAFETENSORS, TORCH, DCP = "model.safetensors", "model.pt", "model.dcp"
_HIDDEN, _INTERMEDIATE = 2048, 5632
_LAYER = (
    *((f"attention.{name}", (_HIDDEN, _HIDDEN)) for name in ("q", "k", "v", "o")),
    *((f"mlp.{name}", (_INTERMEDIATE, _HIDDEN)) for name in ("gate", "up", "down")),
    ("norm.before", (_HIDDEN,)),
    ("norm.after", (_HIDDEN,)),
)
_ELEMENT_BYTES = 2
_ELEMENTS_PER_PAGE = 4096 // _ELEMENT_BYTES


def shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model's tensors: whole layers, at least `size_bytes`. Pure."""
    found: dict[str, tuple[int, ...]] = {}
    total_bytes = 0
    while total_bytes < size_bytes:
        layer = len(found) // len(_LAYER)
        for name, shape in _LAYER:
            found[f"layers.{layer}.{name}"] = shape
            elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
            total_bytes += elements * _ELEMENT_BYTES
    return found


def _torch(name: str = "torch") -> Any:
    return importlib.import_module(name)


def save(directory: str, size_bytes: int) -> Timed:
    """Save a bfloat16 model in the three formats into a local folder."""
    torch = _torch()
    pattern = torch.randint(1, 2**15, (2**19,), dtype=torch.int16)
    state = {}
    for number, (name, shape) in enumerate(shapes(size_bytes).items()):
        count = torch.Size(shape).numel()
        tensor = pattern.repeat(count // len(pattern) + 1)[:count].clone()
        tensor[0] = number
        state[name] = tensor.view(torch.bfloat16).reshape(shape)

    def work() -> int:
        target = Path(directory)
        _torch("safetensors.torch").save_file(state, target / SAFETENSORS)
        torch.save(state, target / TORCH)
        dcp = _torch("torch.distributed.checkpoint")
        writer = dcp.FileSystemWriter(target / DCP)
        dcp.save(state, storage_writer=writer, no_dist=True)
        return (target / SAFETENSORS).stat().st_size

    return work


def _look_at(tensors: Iterable[tuple[str, Any]], size_bytes: int) -> int:
    """Read and check all tensors; return their bytes. Raises: RuntimeError."""
    torch = _torch()
    numbers = {name: number for number, name in enumerate(shapes(size_bytes))}
    total_bytes = 0
    for name, tensor in tensors:
        flat = tensor.view(torch.int16).flatten()
        flat[::_ELEMENTS_PER_PAGE].sum()
        if flat[0] != numbers.pop(name):
            raise RuntimeError(f"{name} has the bytes of another tensor")
        total_bytes += flat.numel() * _ELEMENT_BYTES
    if numbers:
        raise RuntimeError(f"{len(numbers)} tensors are missing")
    return total_bytes


def safetensors_load_file(path: str, size_bytes: int) -> Timed:
    """Load safetensors by mapping the file."""
    load_file = _torch("safetensors.torch").load_file
    return lambda: _look_at(load_file(f"{path}/{SAFETENSORS}").items(), size_bytes)


def safetensors_load(path: str, size_bytes: int) -> Timed:
    """Load safetensors from bytes that are read into memory first."""
    load = _torch("safetensors.torch").load
    return lambda: _look_at(load(Path(path, SAFETENSORS).read_bytes()).items(), size_bytes)


def safetensors_stream(url: str, path: str, size_bytes: int) -> Timed:
    """Load safetensors from bytes that one stream of hdfs-native reads into memory first."""
    load = _torch("safetensors.torch").load
    client = importlib.import_module("hdfs_native").Client(url)

    def work() -> int:
        reader = client.read(f"{path}/{SAFETENSORS}")
        data = b"".join(reader.read_range_stream(0, len(reader)))
        return _look_at(load(data).items(), size_bytes)

    return work


def safetensors_fsspec(url: str, size_bytes: int) -> Timed:
    """Load safetensors from bytes that Bootseer's fsspec reads into memory first."""
    load = _torch("safetensors.torch").load
    system, path = _our_fsspec(f"{url}/{SAFETENSORS}")
    return lambda: _look_at(load(system.cat_file(path)).items(), size_bytes)


def torch_load(path: str, size_bytes: int) -> Timed:
    """Load by torch.load, which reads each tensor."""
    load = _torch().load
    return lambda: _look_at(load(f"{path}/{TORCH}").items(), size_bytes)


def torch_load_mmap(path: str, size_bytes: int) -> Timed:
    """Load by torch.load, which maps the file."""
    load = _torch().load
    return lambda: _look_at(load(f"{path}/{TORCH}", mmap=True).items(), size_bytes)


def runai(path: str, size_bytes: int) -> Timed:
    """Load safetensors by runai-model-streamer with its defaults."""
    streamer_class = importlib.import_module("runai_model_streamer").SafetensorsStreamer

    def work() -> int:
        with streamer_class() as streamer:
            streamer.stream_file(f"{path}/{SAFETENSORS}")
            return _look_at(streamer.get_tensors(), size_bytes)

    return work


def fastsafetensors(path: str, size_bytes: int) -> Timed:
    """Load safetensors by fastsafetensors without GPUDirect storage."""
    open_file = importlib.import_module("fastsafetensors").fastsafe_open

    def work() -> int:
        with open_file([f"{path}/{SAFETENSORS}"], nogds=True, device="cpu") as file:
            return _look_at(((name, file.get_tensor(name)) for name in file.keys()), size_bytes)  # noqa: SIM118

    return work


def dcp(path: str, size_bytes: int) -> Timed:
    """Load by torch.distributed.checkpoint's FileSystemReader into existing tensors."""
    return _dcp(lambda module: module.FileSystemReader(f"{path}/{DCP}"), size_bytes)


def dcp_fsspec(url: str, size_bytes: int) -> Timed:
    """Load by torch.distributed.checkpoint's FsspecReader and Bootseer's fsspec."""
    _our_fsspec(url)
    reader = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem").FsspecReader
    return _dcp(lambda module: reader(f"bootseer::{url}/{DCP}"), size_bytes)


def _dcp(reader: Callable[[Any], Any], size_bytes: int) -> Timed:
    torch = _torch()
    module = _torch("torch.distributed.checkpoint")
    state = {
        name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes(size_bytes).items()
    }

    def work() -> int:
        module.load(state, storage_reader=reader(module), no_dist=True)
        return _look_at(state.items(), size_bytes)

    return work


def _our_fsspec(url: str) -> Any:
    fsspec = importlib.import_module("fsspec")
    module = importlib.import_module("bootseer.fuse.striped.fsspec_system")
    fsspec.register_implementation("bootseer", module.CheckpointFileSystem, clobber=True)
    return fsspec.core.url_to_fs(f"bootseer::{url}")


_ACTIONS: dict[str, Callable[..., Timed]] = {
    action.__name__: action
    for action in (
        save,
        safetensors_load_file,
        safetensors_load,
        safetensors_stream,
        safetensors_fsspec,
        torch_load,
        torch_load_mmap,
        runai,
        fastsafetensors,
        dcp,
        dcp_fsspec,
    )
}


if __name__ == "__main__":
    measure(_ACTIONS[sys.argv[1]](**json.loads(sys.argv[2])))
