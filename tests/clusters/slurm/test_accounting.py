"""Slurm's accounting in `bootseer report`, in all its formats."""

import json

import pytest

from bootseer.report.others.slurm import parse_slurm
from testbed.slurm.cluster import running_cluster
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("mount", "fuse")

RUN = "srun bootseer --timeline-dir /home/alice/timelines run -- python /home/alice/train.py"


@pytest.mark.timeout(300)
def test_a_report_asks_slurm_for_the_queue() -> None:
    with running_cluster(accounting=True) as cluster:
        (cluster.home / "alice/train.py").write_text("import bootseer\nbootseer.ready()\n")
        first = cluster.submit("-N2", "-J", "first", "-o", "/dev/null", "--wrap", "sleep 5")
        cluster.wait_for_state(first, "RUNNING")
        options = ("-N1", "-J", "llama", "-o", "llama.out", "--begin=now+2")
        job = str(cluster.submit(*options, "--exclusive", "--wrap", RUN))
        wait_for(
            lambda: "COMPLETED" in cluster.run("sacct", "-n", "-X", "-o", "State", "-j", job),
            "the accounting of the job",
            interval_s=0.5,
        )
        forms = [
            ("env", "SLURM_TIME_FORMAT=%s", "sacct", "-D", "-P", "-j", job, "-o", "ALL"),
            ("sacct", "-D", "-X", "-P", "-o", "ALL", "-j", job),
            ("sacct", "-D", "--json", "-j", job),
            ("scontrol", "show", "job", job),
        ]
        found = [parse_slurm(cluster.run(*form).encode()) for form in forms]
        for known in found:
            ends = [(one.name, one.begin_ns, one.end_ns) for one in known]
            assert ends == [(one.name, one.begin_ns, one.end_ns) for one in found[0]]
        assert [one.name for one in found[0]] == ["held", "queued"]
        report = ("bootseer", "--timeline-dir", "/home/alice/timelines", "report", "llama")
        shown = cluster.run(*report, "--json", user="alice")
        analysis = json.loads(shown)["analysis"]
        path = [one["stage"] for one in analysis["critical_path"]]
        assert path[:2] == ["held", "queued"]
        assert analysis["since_submission_s"] == pytest.approx(
            analysis["before_s"] + analysis["ready_s"]
        )
        assert "after it was submitted" in cluster.run(*report, user="alice")
