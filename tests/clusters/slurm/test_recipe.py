"""The recipe of docs/slurm.md: a job of two ranks on each of two nodes, requeued in the middle.

The job has a set-up and checkpoints on an HDFS.
"""

import json
import re
from pathlib import Path

import pytest

from testbed.hdfs.cluster import MiniHdfs
from testbed.needs import require
from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.pages import give_to_user, page_block
from testbed.waiting import wait_for
from testbed.wheels import make_wheel

pytestmark = [pytest.mark.hdfs, pytest.mark.needs("mount", "fuse")]


@pytest.fixture
def job(cluster: SlurmCluster, hdfs: MiniHdfs) -> Path:
    """Folder of a user's job as the page has it."""
    require(modules=["torch"])
    folder = cluster.home / "alice/job"
    folder.mkdir()
    make_wheel(folder / "wheels", "fromrequirements", "1.0", {"fromrequirements.py": "VALUE = 7"})
    (folder / "requirements.txt").write_text(
        "--no-index\n--find-links /home/alice/job/wheels\nfromrequirements\n"
    )
    # Slowed down, so that it is in the middle when it is requeued.
    text = page_block("slurm.md", "python", "torch.distributed")
    slow = "    step += 1\n    import fromrequirements, time; time.sleep(0.05)\n"
    assert "    step += 1\n" in text
    (folder / "train.py").write_text(text.replace("    step += 1\n", slow))
    script = page_block("slurm.md", "bash", "#SBATCH").replace(
        "hdfs://namenode:8020/ckpt/", f"{hdfs.url}/ckpt-"
    )
    (folder / "job.sh").write_text(script)
    give_to_user(folder, "alice")
    return folder


@pytest.mark.timeout(1000)
def test_the_recipe_trains_is_requeued_and_goes_on(
    cluster: SlurmCluster, hdfs: MiniHdfs, job: Path
) -> None:
    output = job / "job.out"
    checkpoints = f"{hdfs.url}/ckpt-llama"
    more = "--export=ALL,STEPS=300,OMP_NUM_THREADS=1"
    words = ["--chdir=/home/alice/job", "--output=job.out", more]
    number = cluster.submit(*words, "/home/alice/job/job.sh")

    def said(text: str) -> bool:
        assert cluster.state(number) not in ("FAILED", "CANCELLED"), cluster.logs()
        return output.exists() and text in output.read_text()

    try:
        wait_for(
            lambda: said("saved step 100"), "the first checkpoint", timeout_s=400, interval_s=0.5
        )
    except AssertionError as error:
        raise AssertionError(f"{error}: {cluster.state(number)}\n{cluster.logs()}") from None
    cluster.run("scontrol", "requeue", str(number))
    ends = ("COMPLETED", "FAILED", "CANCELLED")
    assert cluster.wait_for_state(number, *ends, timeout_s=400) == "COMPLETED", cluster.logs()
    text = output.read_text()
    began = re.findall(r"attempt (\d) begins at step (\d+)", text)
    # The second attempt continues from the checkpoint saved at SIGTERM.
    listed = cluster.run("bootseer", "checkpoint", "ls", checkpoints, user="alice")
    saved = sorted(int(step) for step in re.findall(r"step-(\d+)\.pt", listed))
    (requeued_at,) = (step for step in saved if step % 100)
    assert began == [("0", "0"), ("1", str(requeued_at))], text
    assert saved[-1] == 300
    # One node ran the set-up for both, and no node did for the second attempt.
    assert text.count("bootseer: stored snapshot") == 1, text
    cluster.wait_for_idle()
    for name in cluster.nodes:
        assert cluster.machines[name].mounts() == []
    for attempt in (0, 1):
        shown = cluster.run(
            "bootseer", "report", "llama", "--attempt", str(attempt), "--json", user="alice"
        )
        report = json.loads(shown)
        assert (report["submission"], report["attempt"]) == (str(number), attempt)
        assert (report["node_count"], report["rank_count"]) == (2, 4)
        assert (report["ready"]["node_count"], report["ready"]["rank_count"]) == (2, 4)
