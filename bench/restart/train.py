"""Worker that loads its part of the checkpoint, compiles a model, takes a step, and stays."""

import os
import time

first_s = time.time()

from bench.restart.events import note  # noqa: E402

_PLACE = {
    "rank": int(os.environ["RANK"]),
    "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
}
note("line", at_s=first_s, **_PLACE)

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm  # noqa: E402

note("imported", **_PLACE)


def _memory() -> int:
    """Return the proportional set size of this process in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Run `train.py FOLDER LAYERS`; the folder has one file for each rank."""
    folder, layers = sys.argv[1:]
    dist.init_process_group("gloo")
    dist.barrier()
    # All four have imported their modules, and loaded nothing else yet.
    note("memory", bytes=_memory(), **_PLACE)
    dist.barrier()
    state = torch.load(f"{folder}/part-{_PLACE['rank']}.pt")
    note("loaded", sum=float(sum(one.sum(dtype=torch.float64) for one in state.values())), **_PLACE)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=256)
    blocks = [
        torch.nn.Sequential(LlamaRMSNorm(config.hidden_size), LlamaMLP(config))
        for _ in range(int(layers))
    ]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.compile(model)(torch.randn(64, config.hidden_size)).square().mean()
    loss.backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)
    optimizer.step()
    note("step", loss=round(loss.item(), 5), **_PLACE)
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
