"""Use of checkpoint files by training programs, by path and by fsspec; run by `host`.

`folder` is on a mount, and `url` is the same tree for fsspec. The stripe unit is 1 MiB, so that all
files here are striped.
"""

import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Replicate, Shard

from tests.fuse.formats.group_checks import equal, full_state, like, sharded


def tensors() -> dict[str, torch.Tensor]:
    """Return plain tensors of 8 MB, the same in each call."""
    numbers = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(1_000_000, generator=numbers),
        "b": torch.randn(1000, 1000, generator=numbers),
        "c": torch.arange(10),
    }


# ---- one process, by path -----------------------------------------------------------------


def torch_files(folder: str) -> None:
    os.makedirs(folder)
    state = tensors()
    for name, options in {"zip": {}, "old": {"_use_new_zipfile_serialization": False}}.items():
        torch.save(state, f"{folder}/{name}.pt", **options)
        assert equal(torch.load(f"{folder}/{name}.pt"), state), name
    assert equal(torch.load(f"{folder}/zip.pt", mmap=True), state)
    temporary, path = Path(folder, "file.tmp"), Path(folder, "file.pt")
    with temporary.open("wb") as file:
        torch.save(full_state(), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    with path.open("rb") as file:
        assert equal(torch.load(file, weights_only=False), full_state())
    torch.save({"x": torch.ones(3)}, f"{folder}/zip.pt")
    assert equal(torch.load(f"{folder}/zip.pt", mmap=True), {"x": torch.ones(3)})


def large_torch_file(folder: str, size_bytes: int) -> None:
    """Save and load more than the mount may hold in memory."""
    state = {"x": torch.arange(size_bytes // 8)}
    torch.save(state, f"{folder}/large.pt")
    found = torch.load(f"{folder}/large.pt", mmap=True)["x"]
    assert torch.equal(found[-1000:], state["x"][-1000:])
    assert torch.equal(found[::4099], state["x"][::4099])


def safetensors_files(folder: str) -> None:
    os.makedirs(folder)
    state = tensors()
    save_file(state, f"{folder}/m.safetensors", metadata={"format": "pt"})
    assert equal(load_file(f"{folder}/m.safetensors"), state)
    with safe_open(f"{folder}/m.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)
        assert torch.equal(file.get_tensor("a"), state["a"])
        assert torch.equal(file.get_slice("b")[10:20, ::7], state["b"][10:20, ::7])
    Path(folder, "bytes.safetensors").write_bytes(save(state))
    assert equal(load(Path(folder, "bytes.safetensors").read_bytes()), state)
    save_file({"x": torch.ones(3)}, f"{folder}/m.safetensors")
    assert equal(load_file(f"{folder}/m.safetensors"), {"x": torch.ones(3)})


def pretrained(folder: str) -> None:
    """Save and load a model of Hugging Face in several files with an index."""
    os.makedirs(folder)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    for _ in range(2):  # the second time over the first
        model.save_pretrained(folder, max_shard_size="5MB")
    names = os.listdir(folder)
    assert "model.safetensors.index.json" in names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    found = LlamaForCausalLM.from_pretrained(folder)
    assert equal(dict(found.state_dict()), dict(model.state_dict()))


def consolidated(folder: str) -> None:
    """Save by DCP's writer of safetensors, and convert DCP to one torch file."""
    os.makedirs(folder)
    state = tensors()
    writer = dcp.HuggingFaceStorageWriter(path=f"{folder}/hf")
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    found = like(state)
    reader = dcp.HuggingFaceStorageReader(path=f"{folder}/hf")
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert equal(found, state)
    dcp.save(dict(state), checkpoint_id=f"{folder}/dcp", no_dist=True)
    dcp_to_torch_save(f"{folder}/dcp", f"{folder}/one.pt")
    assert equal(torch.load(f"{folder}/one.pt"), state)


# ---- one process, by fsspec ---------------------------------------------------------------


def by_fsspec(url: str, folder: str) -> None:
    """Write by fsspec and read by path, and the other way round."""
    state = tensors()
    with fsspec.open(f"{url}/fs.pt", "wb") as file:
        torch.save(state, file)
    assert equal(torch.load(f"{folder}/fs.pt"), state)
    with fsspec.open(f"{url}/fs.pt", "rb") as file:
        assert equal(torch.load(file), state)
    save_file(state, f"{folder}/fs.safetensors")
    with fsspec.open(f"{url}/fs.safetensors", "rb") as file:
        assert equal(load(file.read()), state)
    with fsspec.open(f"{url}/fs.npy", "wb") as file:
        np.save(file, state["a"].numpy())
    assert np.array_equal(np.load(f"{folder}/fs.npy", mmap_mode="r"), state["a"].numpy())
    with fsspec.open(f"{url}/fs.npy", "rb") as file:
        assert np.array_equal(np.load(file), state["a"].numpy())
    writer = FsspecWriter(f"{url}/fs-dcp")
    dcp.save(full_state(), storage_writer=writer, no_dist=True)
    found = like(full_state())
    dcp.load(found, storage_reader=FsspecReader(f"{url}/fs-dcp"), no_dist=True)
    assert equal(found, full_state())
    found = like(full_state())
    dcp.load(found, checkpoint_id=f"{folder}/fs-dcp", no_dist=True)
    assert equal(found, full_state())


# ---- several ranks ------------------------------------------------------------------------


def _writer(place: str, **options: Any) -> Any:
    return (FsspecWriter if "::" in place else dcp.FileSystemWriter)(place, **options)


def _reader(place: str) -> Any:
    return (FsspecReader if "::" in place else dcp.FileSystemReader)(place)


def save_distributed(rank: int, place: str) -> None:
    """Save sharded over all ranks: at once, then in the background over that, in many files."""
    state = sharded(full_state(), Shard(0))
    dcp.save(state, storage_writer=_writer(f"{place}/plain"))
    saving = dcp.async_save(state, storage_writer=_writer(f"{place}/plain"))
    saving.result()
    if "::" not in place:
        writer = _writer(f"{place}/files", single_file_per_rank=False, thread_count=2)
        dcp.save(state, storage_writer=writer)


def load_distributed(rank: int, place: str) -> None:
    """Load the files of `save_distributed` into the present number of ranks."""
    names = ("plain",) if "::" in place else ("plain", "files")
    for name, placement in zip(names, (Shard(0), Replicate()), strict=False):
        wanted = sharded(full_state(), placement)
        state = {key: torch.zeros_like(value) for key, value in wanted.items()}
        dcp.load(state, storage_reader=_reader(f"{place}/{name}"))
        for key, value in wanted.items():
            assert torch.equal(state[key].to_local(), value.to_local()), (name, key)


def load_same(rank: int, path: str, how: str) -> int:
    """Load one file by all ranks of a node at the same time."""
    dist.barrier()
    state = torch.load(path, weights_only=False, mmap=how == "mmap")
    assert equal(state, full_state())
    return os.path.getsize(path)


def save_full(path: str) -> None:
    """Save the file that `load_same` loads."""
    torch.save(full_state(), path)
