"""Timelines in the store: published by real starts, read elsewhere, limited, and collected."""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner
from msgspec.structs import replace

from bootseer.cli.command_tree import cli
from bootseer.errors import CorruptError
from bootseer.gc.plan import DAY_S, Rules
from bootseer.linux.processes import ProcessId
from bootseer.profile.publish.duty import Schedule, TimelineDuty
from bootseer.profile.publish.note import LauncherNote
from bootseer.profile.publish.outgoing import encode, outgoing
from bootseer.report.decoding import decode, decode_events
from bootseer.report.sources import (
    BYTES_MAX,
    MergedSources,
    StoredTimelines,
    TimelineFolder,
    list_starts,
    pack,
    read_start,
    unpack,
)
from bootseer.store import Store, open_store
from bootseer.timeline import Timeline
from bootseer.timeline.stored import (
    OBJECT_BYTES_MAX,
    decode_gathered,
    encode_gathered,
    gathered_key_of,
    key_of,
)
from testbed.mounts.image_mounts import settings_at
from testbed.node import node_at
from testbed.waiting import wait_for
from tests.bootseer.gc.collecting import age, run_gc
from tests.bootseer.launch.conftest import silent_url

__all__ = ["silent_url"]

_ON = {"BOOTSEER_PUBLISH_TIMELINES": "on", "SLURM_JOB_ID": "7"}
_SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
_SECRET = "hf_" + "x" * 20
_TRAIN = f"""
import bootseer
try:
    with bootseer.stage("load"):
        raise OSError("cannot log in with token={_SECRET}")
except OSError:
    pass
bootseer.ready()
"""


@contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(
    params=[
        "local",
        pytest.param("hdfs", marks=pytest.mark.hdfs),
        pytest.param("s3", marks=pytest.mark.moto),
    ],
)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the URL of a store that does not exist yet, and the variables that it needs."""
    if request.param == "local":
        yield (tmp_path / "store").as_uri(), {}
    elif request.param == "hdfs":
        yield request.getfixturevalue("hdfs_url"), {}
    else:
        environment: dict[str, str] = request.getfixturevalue("moto")
        with _variables(environment):
            yield f"s3://conformance/{tmp_path.name}", environment


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_a_start_of_two_nodes_is_explained_from_the_store_alone(
    shared: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    url, more = shared
    python = ("--", sys.executable, "-c", _TRAIN)
    with node_at(tmp_path / "a", url) as a, node_at(tmp_path / "b", url) as b:
        running = [
            # Two launchers of one node, as `srun` starts them, and one of another.
            node.start(
                "run",
                *python,
                variables={**_ON, **more, "BOOTSEER_NODE": name, "RANK": rank},
                **_SILENT,
            )
            for node, name, rank in ((a, "a", "0"), (a, "a", "1"), (b, "b", "2"))
        ]
        for process in running:
            assert process.wait(60) == 0
        a.wait_clean()
        b.wait_clean()
    with open_store(url) as store:
        keys = [info.path for info in store.list("starts/")]
        assert len(keys) == 2
        assert all(key.startswith("starts/job/7-0/2") for key in keys)
        data = b"".join(unpack(store.read(key)) for key in keys)
    assert _SECRET.encode() not in data
    assert b"cannot log in with token=" in data
    far = ("--store", url, "--timeline-dir", str(tmp_path / "none"))
    document = json.loads(_run(*far, "report", "job", "--json"))
    assert (document["submission"], document["node_count"]) == ("7", 2)
    assert document["ready"]["rank_count"] == 3
    assert "7:0" in _run(*far, "report", "job", "--list")
    assert "trend" in _run(*far, "report", "job", "--history")
    assert "2 node(s), 3 process(es) ready" in _run(*far, "watch", "job", "--once")


def test_a_start_is_in_the_store_while_its_job_runs(tmp_path: Path) -> None:
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as node:
        code = "import bootseer, time; bootseer.ready(); time.sleep(600)"
        job = node.start("run", "--", sys.executable, "-c", code, variables=_ON, **_SILENT)
        try:
            objects = tmp_path / "store" / "starts" / "job" / "7-0"
            wait_for(lambda: objects.is_dir() and any(objects.iterdir()), "the timeline")
            with open_store(node.store) as store:
                names = {stage.name for stage in read_start(StoredTimelines(store), "job")}
            assert names >= {"start", "ready"}
        finally:
            job.kill()
            job.wait(60)
        node.wait_clean()
        # The folder in which launchers leave notes goes with the last.
        assert not any((node.base / "run" / "services").iterdir())


def test_a_rank_that_starts_again_takes_the_place_of_its_first_start(tmp_path: Path) -> None:
    code = "import bootseer, os; bootseer.stage(os.environ['STAGE']).end(); input()"
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as node:
        timelines = node.base / "timeline"

        def has(name: str) -> Callable[[Path], bool]:
            return lambda path: f'"{name}"' in path.read_text()

        def begin(rank: str, name: str) -> "subprocess.Popen[str]":
            variables = {**_ON, "RANK": rank, "STAGE": name}
            pipes = {**_SILENT, "stdin": subprocess.PIPE}
            job = node.start("run", "--", sys.executable, "-c", code, variables=variables, **pipes)
            wait_for(lambda: any(map(has(name), timelines.rglob("*.jsonl"))), f"the stage {name}")
            return job

        first, other = begin("0", "first"), begin("1", "other")
        first.communicate("\n", timeout=60)
        again = begin("0", "again")
        other.communicate("\n", timeout=60)
        again.communicate("\n", timeout=60)
        node.wait_clean()
        with open_store(node.store) as store:
            names = {stage.name for stage in read_start(StoredTimelines(store), "job")}
    assert {"again", "other"} <= names
    assert "first" not in names


def test_a_rank_that_starts_again_may_have_a_timeline_of_as_many_bytes(tmp_path: Path) -> None:
    """A named fault: an equal size was taken for an unchanged timeline, and the failed start was
    kept."""
    settings = replace(settings_at(tmp_path), publish_timelines=True)
    duty = TimelineDuty()
    sizes = set()
    for number, name in enumerate(("first", "again")):
        resource = {"bootseer.job": settings.job, "host.name": "node"}
        path = tmp_path / f"20260101T00000{number}Z-7-node-0.jsonl"
        timeline = Timeline(path, trace_id="1" * 32, parent_id="", resource=resource)
        timeline.note(name, 1_700_000_000_000_000_000 + number, 1000)
        sizes.add(timeline.path.stat().st_size)
        duty.add(LauncherNote(settings, timeline.path, ProcessId(0, "gone")))
    assert len(sizes) == 1
    duty.publish()
    with open_store(settings.store_url) as store:
        assert {stage.name for stage in read_start(StoredTimelines(store), settings.job)} == {
            "again"
        }


def test_what_killed_publishers_left_goes(tmp_path: Path) -> None:
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as node:
        left = node.base / "run" / "services" / "start-0123456789abcdef"
        left.mkdir(parents=True, mode=0o700)
        (node.base / "run").chmod(0o700)
        (left / "lock").touch()
        logs = node.base / "run" / "logs"
        logs.mkdir(mode=0o700)
        (logs / "start-1.log").write_text("old")
        (logs / "start-2.log").write_text("young")
        for path in (left, logs / "start-1.log"):
            os.utime(path, (0, 0))
        assert node.run("run", "--", "true", variables=_ON).returncode == 0
        node.wait_clean()
        assert not any(left.parent.iterdir())
        assert not (logs / "start-1.log").exists()
        assert (logs / "start-2.log").exists()


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "dead"])
def test_a_store_that_does_not_answer_costs_a_start_nothing(
    tmp_path: Path, silent_url: str, is_silent: bool
) -> None:
    url = silent_url if is_silent else "hdfs://127.0.0.1:1/store"
    with node_at(tmp_path / "node", url) as node:
        done = node.run(
            "run", "--", "sh", "-c", "echo done", variables={**_ON, "BOOTSEER_DEADLINE": "1"}
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
        node.wait_clean()
        (log,) = (node.base / "run" / "logs").iterdir()
        assert log.read_text().count("the store: ") == 1


def test_a_default_store_is_no_place_for_timelines(tmp_path: Path) -> None:
    with node_at(tmp_path / "node", "") as node:
        assert node.run("run", "--", "sh", "-c", ":", variables=_ON).returncode == 0
        node.wait_clean()
        assert not (node.base / "run").exists()


def test_a_store_that_fails_leaves_what_the_folder_has(tmp_path: Path) -> None:
    Timeline.start(tmp_path, job="j", submission="s", attempt=0, node="n", rank=0).span(
        "image"
    ).end()
    for unusable in ("nosuch://store/x", "oci://127.0.0.1:1/store:v1"):
        shown = _run("--store", unusable, "--timeline-dir", str(tmp_path), "report", "j")
        assert "submission s" in shown
    url = ("--store", "hdfs://127.0.0.1:1/store?deadline_s=2")
    shown = _run(*url, "--timeline-dir", str(tmp_path), "report", "j")
    assert "submission s" in shown
    failed = CliRunner().invoke(cli, [*url, "--timeline-dir", str(tmp_path / "x"), "report", "j"])
    assert "127.0.0.1:1" in str(failed.exception)


def test_looks_get_rarer_and_end() -> None:
    schedule = Schedule(0, 1)
    looks: list[float] = []
    while not schedule.is_over:
        looks.append(schedule.next_s)
        schedule.on_round(schedule.next_s)
    assert looks[:4] == [30, 90, 210, 450]
    assert len(looks) < 110
    schedule.on_ready(looks[3])
    after: list[float] = []
    while not schedule.is_over:
        after.append(schedule.next_s)
        schedule.on_round(schedule.next_s)
    assert after[0] == looks[3] + 2
    assert len(after) == 8


# ---- what others write there ---------------------------------------------------------------------


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with closing(open_store(store_url)) as opened:
        yield opened


def _line(tmp_path: Path, node: str = "n") -> bytes:
    timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=0, node=node, rank=0)
    timeline.span("image").end()
    return timeline.path.read_bytes()


def test_hostile_objects_are_left_out(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = _line(tmp_path / "one")
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(BYTES_MAX + 1))
    assert len(bomb) < 100_000
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    far_window = stream.compress(os.urandom(2**20)) + stream.flush()
    for number, data in enumerate((pack(good), bomb, b"no zstd", pack(b"[[[[" * 9999), b"")):
        name = f"20261123T00000{number}Z-1-n{number}-0"
        store.publish(key_of("j", "s", 0, name), data)
    for key in (
        "starts/j/s-0/readme",
        "starts/j/s-0/20261123T000000Z-1-\x1b[31m-0.jsonl.zst",
        "starts/j/s-0/deep/20261123T000000Z-1-n-0.jsonl.zst",
        "starts/j/nonsense/20261123T000000Z-1-n-0.jsonl.zst",
        "starts/j/s-99999999999/20261123T000000Z-1-n-0.jsonl.zst",
    ):
        store.publish(key, pack(good))
    (start,) = list_starts(StoredTimelines(store), "j")
    assert (start.name, len(start.files)) == ("s:0", 5)
    assert {stage.name for stage in start.stages()} == {"image"}
    assert caplog.text.count("is left out") == 3
    with pytest.raises(CorruptError):
        unpack(far_window)
    assert list_starts(StoredTimelines(store), "nobody") == []


def test_an_object_that_was_cut_off_is_no_timeline() -> None:
    lines = b"".join(
        b'{"line": %d, "text": "%s"}\n' % (n, os.urandom(99).hex().encode()) for n in range(5000)
    )
    packed = pack(lines)
    assert unpack(packed) == lines
    for end in (0, 20, len(packed) // 2, len(packed) - 1):
        with pytest.raises(CorruptError):
            unpack(packed[:end])
    # Without a stated size nobody could tell a part from the whole.
    sizeless = zstandard.ZstdCompressor(write_content_size=False).compress(lines)
    with pytest.raises(CorruptError, match="state"):
        unpack(sizeless[: len(sizeless) // 2])


def test_objects_are_bounded_by_who_writes_them() -> None:
    with pytest.raises(CorruptError, match="too many"):
        pack(bytes(BYTES_MAX + 1))
    with pytest.raises(CorruptError, match="too many"):
        pack(os.urandom(OBJECT_BYTES_MAX))


def test_a_timeline_in_both_places_is_read_once(store: Store, tmp_path: Path) -> None:
    line = _line(tmp_path / "folder", "a")
    (path,) = (tmp_path / "folder").rglob("*.jsonl")
    store.publish(key_of("j", "s", 0, path.stem), pack(line))
    other = path.stem.replace("-a-", "-b-")
    store.publish(key_of("j", "s", 0, other), pack(line.replace(b'"a"', b'"b"')))
    both = MergedSources(TimelineFolder(tmp_path / "folder"), StoredTimelines(store))
    (start,) = list_starts(both, "j")
    assert sorted(stage.resource["host.name"] for stage in start.stages()) == ["a", "b"]


def test_gathered_timelines_and_those_of_their_own_are_read_together(
    store: Store, tmp_path: Path
) -> None:
    """Of a timeline in two objects nobody knows the newer one: both count, each stage once."""
    names, lines = {}, {}
    for node in "abc":
        timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=0, node=node, rank=0)
        open_stage = timeline.span("open")
        timeline.span("image").end()
        timeline.event("bootseer.imports", "[]")
        names[node], lines[node] = timeline.path.stem, timeline.path.read_bytes()
        open_stage.end()
        timeline.span("late").end()
        lines[f"{node} later"] = timeline.path.read_bytes()
    gathered = {names["a"]: pack(lines["a later"]), names["b"]: pack(lines["b"])}
    store.publish(
        gathered_key_of("j", "s", 0, "20261128T000000Z-1-a"),
        encode_gathered({**gathered, "20261128T000000Z-1-x-0": b"no zstd"}),
    )
    for node, data in (("a", lines["a"]), ("b", lines["b later"]), ("c", lines["c"])):
        store.publish(key_of("j", "s", 0, names[node]), pack(data))
    for key, data in (
        ("20261128T000000Z-1-y.tar", b"no archive"),
        ("20261128T000000Z-1-z.tar", b""),
        ("strange.tar", encode_gathered(gathered)),
    ):
        store.publish(f"starts/j/s-0/{key}", data)
    (start,) = list_starts(StoredTimelines(store), "j")
    assert not start.are_local
    stages = start.bounded().stages()
    assert sorted((stage.resource["host.name"], stage.name) for stage in stages) == [
        ("a", "image"),
        ("a", "late"),
        ("a", "open"),
        ("b", "image"),
        ("b", "late"),
        ("b", "open"),
        ("c", "image"),
        ("c", "open"),
    ]
    assert [stage.resource["host.name"] for stage in stages if stage.end_ns is None] == ["c"]
    assert start.events("bootseer.imports") == ["[]"] * 3
    # What a folder has is read from there, whatever the objects say of it.
    for path in tmp_path.rglob("*-[bc]-0.jsonl"):
        path.unlink()
    both = MergedSources(TimelineFolder(tmp_path), StoredTimelines(store))
    (start,) = list_starts(both, "j")
    assert sorted(stage.name for stage in start.stages() if stage.resource["host.name"] == "a") == [
        "image",
        "late",
        "open",
    ]
    assert len(start.parts(1)) == 4  # one has nothing but damage


def test_a_hostile_archive_is_read_within_bounds() -> None:
    name = "20261128T000000Z-1-{}-0"
    many = encode_gathered({name.format(number): b"" for number in range(2000)})
    assert len(list(decode_gathered(many))) == 1024
    whole = encode_gathered({name.format("a"): bytes(5000), name.format("b"): b"b"})
    with pytest.raises(ValueError, match=r"."):
        list(decode_gathered(whole[:3000]))
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        link = tarfile.TarInfo(name.format("l") + ".jsonl.zst")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/shadow"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("../" + name.format("m") + ".jsonl.zst"))
    assert list(decode_gathered(target.getvalue())) == []


# ---- how long they stay --------------------------------------------------------------------------


def test_timelines_of_old_starts_go(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    with open_store(settings.store_url) as store:
        for number in range(5):
            for node in "ab":
                name = f"20261123T00000{number}Z-1-{node}-0"
                store.publish(key_of("j", str(number), 0, name), pack(b""))
        store.publish(key_of("other", "1", 0, "20261123T000000Z-1-a-0"), pack(b""))
        store.publish("starts/strange", b"")
        store.publish("preload/j.json", b"{}")
        age(settings, "preload", 8 * DAY_S)
        store.publish("preload/other.json", b"{}")
    for number in range(5):
        age(settings, f"starts/j/{number}-0", (10 - number) * DAY_S)
    assert run_gc(settings)[0].deletions == ()
    assert run_gc(settings, Rules(keep_starts=3))[1].deleted_count == 4
    # Of a start that is older than both, nothing stays; one that is young stays in any case.
    # The record of imports is as old as what goes.
    assert run_gc(settings, Rules(keep_start_days=7.5))[1].deleted_count == 3
    run_gc(settings, Rules(keep_starts=0))
    with open_store(settings.store_url) as store:
        keys = [info.path for info in store.list("starts/")]
    assert keys == ["starts/other/1-0/20261123T000000Z-1-a-0.jsonl.zst", "starts/strange"]


def test_the_command_tells_what_would_go(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        store.publish(key_of("j", "1", 0, "20261123T000000Z-1-a-0"), pack(b""))
    old = time.time() - 100 * DAY_S
    for path in (tmp_path / "store" / "starts").rglob("*.zst"):
        os.utime(path, (old, old))
    for more, count in (((), 1), (("--keep-start-days", "101"), 0)):
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "--store", url, "gc", "--json", *more],
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert len(json.loads(done.stdout)["deletions"]) == count


def test_a_published_timeline_is_smaller_and_says_the_same(tmp_path: Path) -> None:
    """Ended stages of one writer share a line, and their begins are left out."""
    timeline = Timeline.start(tmp_path, job="j", submission="", attempt=0, node="n", rank=0)
    other = timeline.with_resource({"bootseer.process": "p"})
    for number in range(20):
        with timeline.span(f"a{number}"), other.span(f"b{number}", {"bootseer.bytes": number}):
            pass
    timeline.span("open")
    timeline.event("bootseer.imports", "[]")
    with timeline.path.open("ab") as file:
        file.write(
            b'{"resourceSpans":[{"scopeSpans":[{"scope":{"name":"x"},"spans":[7]}]}]}\n[1]\n'
        )
    lines = list(outgoing([timeline.path]))
    data = encode(lines)
    assert decode(data) == decode(timeline.path.read_bytes())
    assert decode_events(data, "bootseer.imports") == ["[]"]
    assert len(data) < timeline.path.stat().st_size / 2
    assert {"name": "x"} in [
        json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["scope"]
        for line in data.splitlines()
        if b"resourceSpans" in line
    ]


def test_a_secret_that_becomes_known_later_is_hidden_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline.start(tmp_path, job="j", submission="", attempt=0, node="n", rank=0)
    with timeline.span("fetch with swordfish-17"):
        pass
    assert b"swordfish-17" in encode(outgoing([timeline.path]))
    monkeypatch.setenv("FETCH_TOKEN", "swordfish-17")
    assert b"swordfish-17" not in encode(outgoing([timeline.path]))
