"""Takes one training step of a compiled model on the CPU; prints its begin and its times.

`program.py BLOCKS [ARTIFACTS]`: the number of blocks of a transformer. If the file ARTIFACTS
exists, torch's compile cache is loaded from it, else the cache is saved to it.
"""

import time

began_s = time.time()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

# Imported before the measured step: it takes two seconds with or without a cache.
import torch._inductor.compile_fx  # noqa: E402
from torch import nn  # noqa: E402

_WIDTH = 128


class TransformerBlock(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention and a feed-forward network, each with a layer norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(_WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 4, batch_first=True)
        self.second = nn.LayerNorm(_WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.feed(self.second(x))


def main() -> None:
    """Take one step."""
    imported_s = time.time()
    artifacts = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if artifacts is not None and artifacts.exists():
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    torch.manual_seed(0)
    model = nn.Sequential(*[TransformerBlock() for _ in range(int(sys.argv[1]))])
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)
    loss = compiled(torch.randn(4, 64, _WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    stepped_s = time.time()
    if artifacts is not None and not artifacts.exists():
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        artifacts.write_bytes(saved[0])
    told = {
        "began_s": began_s,
        "import_s": imported_s - began_s,
        "step_s": stepped_s - imported_s,
        "loss": loss.item(),
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
