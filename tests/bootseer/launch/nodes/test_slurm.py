"""The recipe for Slurm in docs/launch.md, run as it is written on a Slurm of two nodes."""

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.mounts.fuse_mount import REPOSITORY, require_root
from tests.support.servers.slurm import Slurm, require_slurm
from tests.support.wheels import make_wheel

pytestmark = [pytest.mark.fuse, pytest.mark.root]

TRAIN = """
import os, sys
import bootseer
with bootseer.stage("import"):
    import torch
    import torch.distributed as dist
    import fromrequirements
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
bootseer.ready()
with open(os.environ["CHECKPOINTS"] + f"/rank-{dist.get_rank()}", "w") as file:
    file.write(f"{total.item()} of {dist.get_world_size()} with {fromrequirements.VALUE}")
dist.barrier()
dist.destroy_process_group()
"""


def recipe() -> str:
    text = (REPOSITORY / "docs" / "launch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (found,) = [str(block) for block in blocks if "#SBATCH" in block]
    return found


def test_the_recipe_is_a_batch_script_whose_nodes_meet() -> None:
    text = recipe()
    assert text.startswith("#!/bin/bash\n")
    assert "--rdzv-endpoint" in text
    assert "--ntasks-per-node=1" in text
    assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0


def _make_environment(folder: Path) -> None:
    """What is installed on each node: Python with torch and Bootseer, and pip."""
    venv.create(folder, with_pip=True, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "installed.pth").write_text("\n".join([str(REPOSITORY), *ours]) + "\n")
    mains = {"torchrun": "torch.distributed.run", "bootseer": "bootseer.__main__"}
    for name, module in mains.items():
        program = folder / "bin" / name
        program.write_text(f"#!{folder}/bin/python\nfrom {module} import main\nmain()\n")
        program.chmod(0o755)


@pytest.mark.timeout(400)
def test_the_recipe_trains_on_two_nodes(tmp_path: Path) -> None:
    require_root()
    require_slurm()
    pytest.importorskip("torch")
    job = tmp_path / "job"
    job.mkdir()
    make_wheel(tmp_path / "wheels", "fromrequirements", "1.0", {"fromrequirements.py": "VALUE = 7"})
    (job / "requirements.txt").write_text(
        f"--no-index\n--find-links {tmp_path}/wheels\nfromrequirements\n"
    )
    (job / "train.py").write_text(TRAIN)
    _make_environment(tmp_path / "installed")
    with Slurm(tmp_path) as slurm:
        places = {
            "hdfs://namenode:8020": (tmp_path / "shared").as_uri(),
            "/nvme/": f"{slurm.local}/",
            "/tmp/ckpt": f"{slurm.local}/ckpt",
            "/shared/timelines": str(tmp_path / "timelines"),
            "--nproc-per-node 8": "--nproc-per-node 1",
        }
        text = recipe()
        for written, here in places.items():
            assert written in text
            text = text.replace(written, here)
        (job / "train.sh").write_text(text)
        # Each node has an environment of its own, which the set-up changes.
        own = f"mkdir {slurm.local}/env && cp -a {tmp_path}/installed/. {slurm.local}/env"
        fix = f"sed -i '1s,{tmp_path}/installed,{slurm.local}/env,' {slurm.local}/env/bin/*"
        slurm.run("srun", "--nodes=2", "sh", "-c", f"{own} && {fix}")
        variables = {
            "PATH": f"{slurm.local}/env/bin:{slurm.environment['PATH']}",
            "BOOTSEER_RUN_DIR": f"{slurm.local}/run",
            "CHECKPOINTS": f"{slurm.local}/ckpt",
            "OMP_NUM_THREADS": "1",
        }
        done = slurm.submit(job / "train.sh", variables, timeout_s=300)
        assert done.returncode == 0, done.stderr + slurm.output()
        (job_id,) = re.findall(r"Submitted batch job (\d+)", done.stdout)
        said = (tmp_path / "out.log").read_text()
    saved = {
        path.name: path.read_text() for path in (tmp_path / "shared/ckpt/llama").glob("rank-*")
    }
    assert saved == {f"rank-{rank}": "3.0 of 2 with 7" for rank in (0, 1)}, said
    # One node ran the set-up, for both.
    assert said.count("bootseer: stored snapshot") == 1, said
    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "bootseer",
            "--timeline-dir",
            str(tmp_path / "timelines"),
            "report",
            "llama",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    report = json.loads(shown.stdout)
    assert (report["submission"], report["attempt"]) == (job_id, 0)
    assert (report["node_count"], report["rank_count"]) == (2, 2)
    assert (report["ready"]["node_count"], report["ready"]["rank_count"]) == (2, 2)
