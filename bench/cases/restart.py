"""Restart of a job of four workers after a failure, and its start on another node."""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator

from bench.checkpoint.cluster import CappedHdfs
from bench.checkpoint.limits import limiter
from bench.checkpoint.measure import our_mount, run_client
from bench.model import (
    Case,
    Column,
    Ratio,
    Sample,
    Session,
    TakeSample,
    Target,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio_of,
)
from bench.restart.job import PARTS, WORKERS, RestartedJob
from bench.site import assemble_hdfs
from testbed.needs import MissingError

_PACKAGES = ("torch", "transformers", "hdfs_native")
_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES = 2**30, 2**28, 2**26
_DATANODES, _BYTES_PER_S = 4, 50e6
_DEADLINE_S = 180.0
_STEP = "step-1"
_HOT = ("--preload", "--linger", "10m")
_SAVE = """
import sys, torch
torch.manual_seed(int(sys.argv[2]))
torch.save({"weight": torch.rand(int(sys.argv[3]) // 4)}, sys.argv[1])
"""


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    if missing := [one for one in _PACKAGES if importlib.util.find_spec(one) is None]:
        raise MissingError(f"pip install {' '.join(missing)}")
    if shutil.which("g++") is None:
        raise MissingError("there is no C++ compiler; apt-get install g++")
    # Fetched before the thread enters a network namespace, which has no way out.
    assemble_hdfs()
    size_bytes = workspace.sized(_FULL_BYTES, _QUICK_BYTES, _SMOKE_BYTES)
    with (
        limiter() as limits,
        CappedHdfs(workspace.directory / "hdfs", _DATANODES, _BYTES_PER_S, limits) as cluster,
    ):
        workspace.shared.update(cluster=cluster)
        workspace.shared["notes"] = [
            f"torchrun with {WORKERS} workers (gloo), each of which imports torch, TorchInductor "
            "and transformers, loads its part of the checkpoint, compiles blocks of Llama's MLP "
            "for the CPU, and takes a step; until the last of them has",
            f"A checkpoint of {size_bytes >> 20} MiB on a real HDFS with {_DATANODES} DataNodes of "
            f"{_BYTES_PER_S / 1e6:g} MB/s each way: ordinary files that are fetched to the node by "
            "one stream each, all at once, where nothing else is; striped ones, mounted, with "
            f"Bootseer. Of the DataNodes, {limits.note}",
            "A new node has empty folders for caches, at the same paths; the store is a folder of "
            "the machine, and the files of the packages are in memory, as they are for all",
            "A failure is SIGKILL of one worker, which torchrun restarts all four for; `job killed"
            "` is SIGKILL of all of the job's processes, and its start again on the same node",
            "Memory is PSS, summed over the workers, when all have imported",
        ]
        _save(workspace, cluster, size_bytes // WORKERS)
        yield


def _save(workspace: Workspace, cluster: CappedHdfs, size_bytes: int) -> None:
    saved = workspace.directory / "saved"
    saved.mkdir()
    with cluster.uncapped():
        cluster.empty_folder("/striped")
        cluster.empty_folder("/ordinary")
        for rank in range(WORKERS):
            file = saved / f"part-{rank}.pt"
            words = [sys.executable, "-c", _SAVE, str(file), str(rank), str(size_bytes)]
            subprocess.run(words, check=True, timeout=_DEADLINE_S)
            where = {"url": cluster.url, "path": f"/ordinary/{file.name}", "source": str(file)}
            run_client("native_copy", where)
        with our_mount(workspace, f"{cluster.url}/striped") as server:
            (server.mountpoint / _STEP).mkdir()
            for file in saved.iterdir():
                shutil.copyfile(file, server.mountpoint / _STEP / file.name)
    shutil.rmtree(saved)


def _layers(workspace: Workspace) -> int:
    return 1 if workspace.is_quick else 2


@contextlib.contextmanager
def _plain(workspace: Workspace) -> Iterator[TakeSample]:
    node = workspace.directory / "plain"
    cluster: CappedHdfs = workspace.shared["cluster"]
    fetch = f"{sys.executable} -m bench.restart.fetch {cluster.url} /ordinary {node}/checkpoint"
    wrapper = ("sh", "-c", f'{fetch} && exec "$@"', "sh")
    cache = str(node / "inductor")
    folder = str(node / "checkpoint")
    job = RestartedJob(node, wrapper, folder, _layers(workspace), TORCHINDUCTOR_CACHE_DIR=cache)

    def take() -> Sample:
        job.clear()
        try:
            return _sample(job.start(), job.fail(), job.again())
        finally:
            job.end()

    yield take


def _sample(
    start: dict[str, float], failure: dict[str, float], again: dict[str, float], **more: float
) -> Sample:
    return Sample(
        start["step_s"],
        figures={
            "start_s": start["step_s"],
            "failure_s": failure["step_s"],
            "again_s": again["step_s"],
            "launcher_s": again["agent_s"],
            # All four at once, as torchrun restarts them.
            "failure_line_s": failure["line_s"],
            **{f"start_{part}": start[part] for part in PARTS},
            **{f"failure_{part}": failure[part] for part in PARTS},
            **{f"again_{part}": again[part] for part in PARTS},
            "workers_bytes": failure["workers_bytes"],
            **more,
        },
    )


def _bootseer(
    *options: str,
) -> Session:
    is_hot = bool(options)

    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        name = "hot" if is_hot else "bootseer"
        node = workspace.directory / name
        cluster: CappedHdfs = workspace.shared["cluster"]
        mount = node / "checkpoint"
        prepared = ("--checkpoint", f"{cluster.url}/striped:{mount}")
        bootseer = (sys.executable, "-m", "bootseer")
        job = RestartedJob(
            node,
            (*bootseer, "run", *options, *prepared, "--"),
            str(mount / _STEP),
            _layers(workspace),
            BOOTSEER_STORE=(workspace.directory / f"store-{name}").as_uri(),
            BOOTSEER_CACHE_DIR=str(node / "cache"),
            BOOTSEER_RUN_DIR=str(node / "run"),
            BOOTSEER_TIMELINE_DIR=str(node / "timeline"),
            BOOTSEER_JOB=name,
        )

        def end() -> None:
            job.end()
            # End the lingering mounts and the publishing process: the next node is a new one.
            words = (*bootseer, "standby", "--end")
            subprocess.run(words, env=job.environ, check=True, timeout=_DEADLINE_S)
            job.wait_for_end()

        def take() -> Sample:
            job.clear()
            try:
                start, failure, again = job.start(), job.fail(), job.again()
                more = {}
                if is_hot:
                    end()
                    standby = (*bootseer, "standby", "--preload", *prepared, "--")
                    job.prepare(standby, (*bootseer, "standby", "--status"), "modules are in")
                    ready = job.start()
                    more = {f"standby_{name}": ready[name] for name in ("agent_s", "first_s")}
                return _sample(start, failure, again, **more)
            finally:
                end()

        # A first start, which records.
        job.clear()
        job.start()
        end()
        yield take

    return session


def _ratio(top: str, above: str, bottom: str, below: str, what: str, target: Target) -> Ratio:
    return ratio_of(f"{top} / {bottom}, {what}", (top, above), (bottom, below), target)


CASE = Case(
    name="restart",
    description="A job of four workers starts on a new node, loses a worker, and is started again.",
    prepare=_prepare,
    variants=(
        Variant("plain", "torchrun; nothing of the start is kept elsewhere", _plain),
        Variant("bootseer", "`bootseer run --checkpoint`", _bootseer()),
        Variant("hot", "the same with --preload --linger 10m", _bootseer(*_HOT)),
    ),
    ratios=(
        _ratio(
            "bootseer",
            "start_s",
            "hot",
            "failure_s",
            "start on a new node / worker killed",
            at_least(5),
        ),
        _ratio(
            "plain",
            "failure_s",
            "hot",
            "failure_s",
            "worker killed",
            at_least(3),
        ),
        _ratio(
            "bootseer",
            "start_s",
            "hot",
            "again_s",
            "start on a new node / job killed",
            at_least(5),
        ),
        _ratio("plain", "again_s", "hot", "again_s", "job killed", at_least(3)),
        _ratio(
            "hot",
            "workers_bytes",
            "plain",
            "workers_bytes",
            "memory of four workers",
            at_most(0.5),
        ),
    ),
    columns=(
        Column("new node s", "start_s"),
        Column("worker killed s", "failure_s"),
        Column("job killed s", "again_s"),
        Column("first line s", "failure_line_s", digits=3),
        Column("until started s", "failure_begin_s"),
        Column("imports s", "failure_import_s"),
        Column("connected s", "failure_connect_s"),
        Column("load s", "failure_load_s"),
        Column("step s", "failure_compute_s"),
        Column("workers MB", "workers_bytes", scale=1e-6, digits=0),
        Column("launcher s", "launcher_s"),
        Column("launcher after standby s", "standby_agent_s"),
        Column("worker after standby s", "standby_first_s"),
    ),
    runs=3,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
