"""Workers of a real torchrun, with torch imported ahead, through `bootseer run --preload`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.decoding import decode
from bootseer.timeline.otlp import READY, ROLE

pytestmark = pytest.mark.needs(modules=["torch"])

WORKER_COUNT = 2
TRAIN = """
import json, os, sys, time
first_s = time.time()
threads = len(os.listdir("/proc/self/task"))
had_torch = "torch" in sys.modules
began_s = time.monotonic()
import torch
import torch.distributed as dist
import transformers.utils.hub
import_s = time.monotonic() - began_s
import numpy, random, ssl, uuid
import torch.utils.data

rank = int(os.environ["RANK"])
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restarts == 0 and "--fails" in sys.argv:
    sys.exit(5)
dist.init_process_group("gloo")
memory = open("/proc/self/smaps_rollup").read().split("\\nPss:")[1].split()[0]
drawn = [random.random(), float(numpy.random.rand()), ssl.RAND_bytes(8).hex(), uuid.uuid4().hex,
         uuid.uuid1().hex, transformers.utils.hub.SESSION_ID]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
tokens = torch.arange(64).reshape(4, 16)
for batch in torch.utils.data.DataLoader(tokens, batch_size=2, num_workers=1):
    loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
product = (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()
with open(f"{os.environ['RESULTS']}/{rank}.json", "w") as file:
    json.dump({"first_s": first_s, "import_s": import_s, "threads": threads, "drawn": drawn,
               "had_torch": had_torch, "restarts": restarts,
               "start": os.environ["BOOTSEER_TIMELINE"], "memory_kib": int(memory),
               "losses": losses, "product": product, "argv": sys.argv,
               "omp": [os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()]}, file)
dist.barrier()
dist.destroy_process_group()
"""


class _Job:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")

    def stage_names(self, start: str) -> set[str]:
        """Return the stages that the workers of a start have recorded."""
        stages = decode(Path(start).read_bytes())
        names = {stage.name for stage in stages if stage.resource.get(ROLE) in ("train.py", None)}
        return {name for name in names if not name.startswith("import ")}

    def run(self, name: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
        """Run one start; return the output of each rank, and standard error."""
        results = self.folder / name
        results.mkdir()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "bootseer", "--job", "j", "run", "--preload", "--"),
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--max-restarts=1", f"--nproc-per-node={WORKER_COUNT}", "train.py", *arguments),
            ],
            env={
                **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                "BOOTSEER_TIMELINE_DIR": str(self.folder / "timeline"),
                "BOOTSEER_STORE": str(self.folder / "store"),
                "BOOTSEER_CACHE_DIR": str(self.folder / "cache"),
                "BOOTSEER_RUN_DIR": str(self.folder / "run"),
                "RESULTS": str(results),
                "PYTHONDONTWRITEBYTECODE": "",
            },
            cwd=self.folder,
            # So that torchrun itself can be forked.
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=230,
        )
        assert done.returncode == 0, done.stderr
        return [
            json.loads((results / f"{rank}.json").read_text()) for rank in range(WORKER_COUNT)
        ], done.stderr


@pytest.mark.timeout(600)
def test_workers_of_torchrun_are_forked_also_when_it_restarts_them(
    tmp_path: Path, record_property: Any
) -> None:
    job = _Job(tmp_path)
    ordinary, errors = job.run("ordinary")
    assert "bootseer:" not in errors, "the first start has nothing to preload"
    forked, errors = job.run("forked", "--fails")
    assert "bootseer:" not in errors, errors
    assert [one["restarts"] for one in forked] == [1] * WORKER_COUNT
    for mine, its in zip(forked, ordinary, strict=True):
        same = ("losses", "product", "omp", "had_torch", "threads")
        assert {key: mine[key] for key in same} == {key: its[key] for key in same}
        assert mine["argv"] == ["train.py", "--fails"]
        assert (mine["had_torch"], mine["threads"]) == (False, 1)
    kinds = [job.stage_names(one["start"]) for one in (ordinary[0], forked[0])]
    assert kinds[0] == kinds[1]
    assert {"init_process_group", "first batch", READY} <= kinds[1]
    drawn = [value for one in (*forked, *ordinary) for value in one["drawn"]]
    assert len(set(drawn)) == len(drawn)
    # For people: a test asserts nothing of time and memory.
    for key in ("import_s", "memory_kib"):
        record_property(key, [[one[key] for one in ranks] for ranks in (ordinary, forked)])
    logs = [path.read_text() for path in (tmp_path / "run/logs").glob("preload-*")]
    assert len(logs) == 2, "one is the launcher's"
    assert not any("Traceback" in text for text in logs), logs
    assert not any("not preloaded: torch " in text for text in logs), logs
