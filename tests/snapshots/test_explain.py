"""Reasons for running a set-up: the differences from stored snapshots, and the dry run."""

import json
import os
import shutil
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.diff import compare_parts, nearest
from bootseer.snapshots.environment import HELD, Known, Situation, decide, run_setup
from bootseer.snapshots.explain import IN_PLACE, RESTORE, RUN, Explanation, explain_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.manifest import Manifest, StoredIndex, Target, encode
from bootseer.store import open_store
from tests.snapshots.conftest import MakeNode

_STORED = StoredIndex("sha256:" + "0" * 64, 1)


def _manifest(parts: list[Part], created_ns: int = 1) -> Manifest:
    target = Target(
        path=b"/t",
        whole=True,
        blob=_STORED,
        index=_STORED,
        deletions=(),
        file_count=1,
        content_bytes=1,
    )
    return Manifest(
        fingerprint=fingerprint(parts),
        name="",
        created_ns=created_ns,
        setup_ns=1,
        node="n",
        version="",
        parts=tuple(sorted(parts)),
        targets=(target,),
    )


def _parts(**values: str) -> list[Part]:
    return [Part(name.replace("_", " "), value) for name, value in values.items()]


def test_the_nearest_has_the_same_command_then_the_fewest_differences_then_is_newest() -> None:
    now = _parts(command="a", interpreter="x 3.11.1 abi", salt="", target_t="")
    other_command = _manifest(_parts(command="b", interpreter="x 3.11.1 abi", salt="", target_t=""))
    two = _manifest(_parts(command="a", interpreter="y", salt="1", target_t=""), 9)
    one = _manifest(_parts(command="a", interpreter="x 3.11.1 abi", salt="2", target_t=""), 2)
    newer = _manifest(_parts(command="a", interpreter="x 3.11.1 abi", salt="3", target_t=""), 3)
    assert nearest(now, [other_command, two, one, newer]) is newer
    assert nearest(now, [other_command, two]) is two
    assert nearest(now, []) is None


def test_what_differs_is_said_in_plain_words() -> None:
    def note(name: str, stored: str, now: str) -> str:
        (difference,) = compare_parts([Part(name, stored)], [Part(name, now)])
        assert (difference.part, difference.stored, difference.now) == (name, stored, now)
        return difference.note

    patch = note("interpreter", "cpython 3.11.4 abi", "cpython 3.11.6 abi")
    assert patch == "only the patch version differs: 3.11.4 then, 3.11.6 now"
    assert "3.10.1 then" in note("interpreter", "cpython 3.10.1 abi", "cpython 3.11.6 abi")
    assert note("interpreter", "cpython 3.11.4 a", "cpython 3.11.4 b") == "another ABI"
    assert note("interpreter", "pypy 3.11.4 a", "cpython 3.11.4 b") == "another interpreter"
    assert note("before /t", "nothing", "sha256:1") == "/t holds something already"
    assert note("before /t", "sha256:1", "nothing") == "/t is missing or empty now"
    (gone,) = compare_parts([Part("input x", "1")], [])
    assert (gone.stored, gone.now, gone.note[:7]) == ("1", None, "decided")


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_comparing_finds_exactly_what_differs(one: dict[str, str], other: dict[str, str]) -> None:
    found = compare_parts([Part(*pair) for pair in one.items()], [Part(*p) for p in other.items()])
    mended = dict(one)
    for difference in found:
        assert one.get(difference.part) == difference.stored != difference.now
        if difference.now is None:
            del mended[difference.part]
        else:
            mended[difference.part] = difference.now
    assert mended == other


def _explain(settings: Settings, request: SetupRequest) -> Explanation:
    return explain_setup(settings, request, lambda sentence: None)


def _everything(tmp_path: Path) -> dict[str, int]:
    return {
        str(path): path.lstat().st_mtime_ns
        for path in sorted(tmp_path.rglob("*"))
        if "nodes" in path.parts or "store" in path.parts or "env" in path.parts
    }


def test_explain_follows_a_set_up_through_its_life(tmp_path: Path, make_node: MakeNode) -> None:
    (tmp_path / "input").write_text("1")
    env = tmp_path / "env"
    request = SetupRequest(
        command=["sh", "-c", f"mkdir {env}; echo hello > {env}/file"],
        targets=[str(env)],
        inputs=[str(tmp_path / "input")],
        environ={**os.environ, "PIP_INDEX_URL": "https://user:secret@host/simple"},
    )
    first = _explain(make_node("a"), request)
    assert (first.outcome, first.nearest, first.differences) == (RUN, None, ())
    assert "secret" not in json.dumps([part.value for part in first.parts])
    assert run_setup(make_node("a"), request).fingerprint == first.fingerprint
    before = _everything(tmp_path)
    found = _explain(make_node("a"), request)
    assert (found.outcome, found.fingerprint) == (IN_PLACE, first.fingerprint)
    shutil.rmtree(env)
    found = _explain(make_node("b"), request)
    assert (found.outcome, found.fingerprint) == (RESTORE, first.fingerprint)
    (tmp_path / "input").write_text("2")
    found = _explain(make_node("b"), request)
    assert found.outcome == RUN
    assert found.nearest is not None
    assert [(one.part, one.note) for one in found.differences] == [
        (f"input {tmp_path}/input", "its contents have changed")
    ]
    # Only the folder of the environment, which the test removed, has changed.
    assert _everything(tmp_path).items() <= before.items()


def test_a_damaged_manifest_is_explained_as_a_run(tmp_path: Path, make_node: MakeNode) -> None:
    env = tmp_path / "env"
    request = SetupRequest(
        command=["sh", "-c", f"mkdir {env}; echo x > {env}/f"], targets=[str(env)]
    )
    key = run_setup(make_node("a"), request).fingerprint
    shutil.rmtree(env)
    stored = tmp_path / "store" / catalogue.manifest_key(key)
    stored.write_bytes(stored.read_bytes().replace(b'"node": "a"', b'"node": "b"'))
    found = _explain(make_node("b"), request)
    assert (found.outcome, "damaged" in found.reason) == (RUN, True)
    assert run_setup(make_node("b"), request).how == "captured"


def test_what_is_old_and_in_place_is_kept_for_another_job_that_runs_on_it() -> None:
    manifest = _manifest(_parts(command="a"), created_ns=0)

    def situation(now_s: int, in_place: str, *, is_used: bool = False) -> Situation:
        known = Known(manifest, max_age_s=10, in_place=in_place, is_used=is_used)
        return decide(known, now_s * 10**9).situation

    assert situation(10, HELD) is Situation.IN_PLACE
    assert situation(11, HELD) is Situation.TOO_OLD
    assert situation(11, HELD, is_used=True) is Situation.IN_PLACE
    assert situation(11, "") is Situation.TOO_OLD
    assert situation(10, "") is Situation.STORED


def _make_older(settings: Settings, key: str, age_s: float) -> None:
    with open_store(settings.store_url) as store:
        manifest = catalogue.load(store, key)
        assert manifest is not None
        older = replace(manifest, created_ns=time.time_ns() - int(age_s * 1e9))
        store.publish(catalogue.manifest_key(key), encode(older), replace=True)


def test_a_snapshot_beyond_the_maximum_age_is_made_anew_once(
    tmp_path: Path, make_node: MakeNode
) -> None:
    env = tmp_path / "env"
    script = (
        f"echo x >> {tmp_path}/runs; rm -rf {env}; mkdir {env}; "
        f"perl -e 'open F, q({tmp_path}/runs); @all = <F>; print scalar @all, q( x)' > {env}/f"
    )
    request = SetupRequest(command=["sh", "-c", script], targets=[str(env)])

    def node(name: str) -> Settings:
        return replace(make_node(name), snapshot_max_age_s=86_400.0)

    key = run_setup(node("a"), request).fingerprint
    said: list[str] = []
    for name, how in (("b", "restored"), ("c", "captured"), ("d", "restored")):
        shutil.rmtree(env)
        if name == "c":
            _make_older(node(name), key, 2 * 86_400)
            # Other set-ups are not affected.
            assert _explain(make_node(name), request).outcome == RESTORE
            explained = _explain(node(name), request)
            assert (explained.outcome, "2 d ago" in explained.reason) == (RUN, True)
        result = run_setup(node(name), request, report=said.append)
        assert (result.how, result.fingerprint) == (how, key)
    assert (tmp_path / "runs").read_text() == "x\n" * 2
    assert (env / "f").read_text().startswith("2 ")
    assert any("2 d old" in sentence for sentence in said)
    # An existing environment is ignored, as are stored ones.
    _make_older(node("d"), key, 2 * 86_400)
    assert run_setup(make_node("d"), request).how == "in place"
    explained = _explain(node("d"), request)
    assert (explained.outcome, "2 d ago" in explained.reason) == (RUN, True)
    assert run_setup(node("d"), request).how == "captured"
