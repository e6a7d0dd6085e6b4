"""Buckets on moto and on Ceph's gateway, beyond the conformance suite."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
    exit_code_of,
)
from bootseer.store import Backend, Store, open_backend, open_store
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.s3 import client_of
from tests.bootseer.store.conftest import AZURE, BUCKETS, RGW
from tests.bootseer.store.using import put, race

MIB = 1 << 20
on_buckets = pytest.mark.parametrize("backend_url", BUCKETS, indirect=True)


def run_python(code: str, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


# ---- races ------------------------------------------------------------------------------------

_RACE = """
import sys
from bootseer.errors import AlreadyExistsError
from bootseer.store import open_backend
backend, number = open_backend(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
for turn in range(5):
    try:
        with backend.create(f"new/{turn}") as writer:
            writer.write(number.encode() * 1000)
        won.append(turn)
    except AlreadyExistsError:
        pass
print(won, flush=True)
"""


@on_buckets
def test_of_eight_processes_one_creates_each_object(backend_url: str, backend: Backend) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACE, backend_url, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(8)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    won: list[int] = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    for number, racer in enumerate(racers):
        out, _ = racer.communicate(timeout=120)
        mine = json.loads(out)
        for turn in mine:
            assert backend.read(f"new/{turn}") == str(number).encode() * 1000
        won += mine
    assert sorted(won) == list(range(5))


@on_buckets
def test_one_of_many_leases_on_a_gateway(backend: Backend) -> None:
    store = Store(backend)
    assert race(8, lambda i: store.lease("leases/x", ttl_s=60, owner=str(i)) is not None) == 1


# ---- many, large, cut --------------------------------------------------------------------------


@pytest.mark.parametrize("backend_url", [RGW], indirect=True)
def test_more_keys_than_one_answer_has(backend: Backend, backend_url: str) -> None:
    bucket, _, prefix = backend_url.removeprefix("s3://").partition("/")
    client = client_of(dict(os.environ))
    names = [f"{number:04}" for number in range(1002)]
    for name in names:
        backend.create(f"many/{name}").close()
    assert [info.path for info in backend.list("many")] == [f"many/{name}" for name in names]
    backend.delete("many", recursive=True)
    assert not client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("KeyCount")


@on_buckets
def test_a_folder_of_another_tool_is_one(backend: Backend, backend_url: str) -> None:
    bucket, _, prefix = backend_url.removeprefix("s3://").partition("/")
    client_of(dict(os.environ)).put_object(Bucket=bucket, Key=f"{prefix}/theirs/", Body=b"")
    assert backend.stat("theirs").is_dir
    assert list(backend.list("theirs")) == []
    assert [(info.path, info.is_dir) for info in backend.list("")] == [("theirs", True)]


def test_names_that_no_path_can_have(moto: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every writer to the bucket chooses names: none leaves its folder, and each is reported."""
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    client = client_of(moto)
    for number, name in enumerate(("../x", "./y", "a//b", "..", "ctrl\x01", "/lead")):
        client.put_object(Bucket="conformance", Key=f"odd{number}/{name}", Body=b"x")
        client.put_object(Bucket="conformance", Key=f"odd{number}/good", Body=b"x")
        backend = open_backend(f"s3://conformance/odd{number}")
        assert backend.stat("").is_dir
        assert backend.read("good") == b"x"
        with pytest.raises(UnsupportedError, match="rename or delete it"):
            # A folder's own listing sees the names in it only.
            list(Store(backend).list())
    client.put_object(Bucket="conformance", Key=f"long/{'n' * 300}", Body=b"x")
    client.put_object(Bucket="conformance", Key="long/good", Body=b"x")
    assert [info.path for info in open_backend("s3://conformance/long").list("")] == ["good"]


@on_buckets
def test_an_upload_that_is_killed_is_not_seen(backend: Backend, backend_url: str) -> None:
    code = """
import os, sys
from bootseer.store import open_backend
writer = open_backend(sys.argv[1]).create("large", overwrite=True)
for _ in range(7):
    writer.write(bytes(16 << 20))
print("half", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, backend_url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
    with pytest.raises(NotFoundError):
        backend.stat("large")
    put(backend, "large", b"whole")
    assert backend.read("large") == b"whole"


@on_buckets
def test_a_large_object_that_is_there_already(backend: Backend) -> None:
    put(backend, "large", b"small")
    writer = backend.create("large")
    with pytest.raises(AlreadyExistsError):  # noqa: PT012
        for _ in range(9):
            writer.write(bytes(8 * MIB))
        writer.close()
    writer.abort()
    assert backend.read("large") == b"small"


# ---- forks -------------------------------------------------------------------------------------


@on_buckets
def test_a_forked_child_is_refused_at_once(backend: Backend, backend_url: str) -> None:
    """The child would wait for threads that exist only in its parent."""
    code = """
import os, signal, sys
from bootseer.errors import UnsupportedError
from bootseer.store import open_backend
backend = open_backend(sys.argv[1])
list(backend.list("")) if sys.argv[2] == "used" else None
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    code = 1
    try:
        for each in (backend, open_backend(sys.argv[1])):
            try:
                each.stat("")
                code = 3
            except UnsupportedError as error:
                code = 0 if "forkserver" in str(error) else 2
    finally:
        os._exit(code)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    put(backend, "file", b"x")
    assert run_python(code, backend_url, "used").returncode == 0
    assert run_python(code, backend_url, "new").returncode == 3, "a child of its own is no copy"


# ---- who asks ----------------------------------------------------------------------------------


@pytest.fixture
def home(moto: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home without ~/.aws, in an environment without credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path


def listed(url: str = "s3://conformance") -> str:
    """Return "there", or the text of the error of a look at the bucket."""
    try:
        open_backend(url).stat("")
    except BootseerError as error:
        return str(error)
    return "there"


def test_profiles(home: Path, moto: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = moto["AWS_ENDPOINT_URL"]
    (home / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
        "[other]\naws_access_key_id = c\naws_secret_access_key = d\naws_session_token = e\n"
    )
    (home / ".aws/config").write_text(
        f"[default]\nendpoint_url = {endpoint}\nregion = eu-west-1\n"
        f"[profile other]\nendpoint_url = {endpoint}\n"
        f"[profile process]\nendpoint_url = {endpoint}\n"
        f"credential_process = {sys.executable} -c \"print('"
        + json.dumps({"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "q"}).replace('"', '\\"')
        + "')\"\n"
        f"[profile sso]\nendpoint_url = {endpoint}\nsso_start_url = https://x\n"
    )
    with FaultyRelay(endpoint.removeprefix("http://")) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{relay.host}")
        for profile, key, token in (
            ("", "a", ""), ("other", "c", "e"), ("process", "p", ""),
        ):  # fmt: skip
            monkeypatch.setenv("AWS_PROFILE", profile)
            relay.seen.clear()
            assert listed() == "there"
            headers = {name.lower(): value for name, value in relay.seen[0].headers.items()}
            assert f"Credential={key}/" in headers["authorization"]
            assert headers.get("x-amz-security-token", "") == token
        monkeypatch.setenv("AWS_PROFILE", "")
        # The environment comes before ~/.aws.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env")
        relay.seen.clear()
        assert listed() == "there"
        headers = {name.lower(): value for name, value in relay.seen[0].headers.items()}
        assert "Credential=env/" in headers["authorization"]
        assert "/eu-west-1/" in headers["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "missing")
    assert "there is no profile 'missing'" in listed()


def test_no_credentials_at_all(home: Path) -> None:
    with pytest.raises(PermissionDeniedError, match="no credentials were found") as caught:
        open_backend("s3://conformance/x").stat("")
    assert exit_code_of(caught.value) == 12


def test_unreadable_configuration_is_named(home: Path) -> None:
    (home / ".aws/config").write_bytes(b"no section = 1\n\xff")
    with pytest.raises(InvalidInputError, match=r"\.aws/config cannot be read"):
        open_backend("s3://conformance/x").stat("")


def test_a_secret_is_in_no_message(
    home: Path, moto: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYOFMINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheimgeheim")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    backend = open_backend("s3://conformance/x", deadline_s=2)
    for call in (
        lambda: backend.stat("a"),
        lambda: backend.read("a"),
        lambda: put(backend, "a", b""),
    ):
        with pytest.raises(UnavailableError) as caught:
            call()
        assert "geheim" not in str(caught.value)
        assert "KEYOFMINE" not in str(caught.value)
        assert "at http://127.0.0.1:1: Connection refused" in str(caught.value)
        assert "\n" not in str(caught.value)


# ---- what servers answer -----------------------------------------------------------------------


@pytest.fixture
def relay(moto: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRelay]:
    """Yield a relay in front of moto; `s3://conformance/` leads to it."""
    with FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://")) as running:
        for name, value in {**moto, "AWS_ENDPOINT_URL": f"http://{running.host}"}.items():
            monkeypatch.setenv(name, value)
        yield running


def answer(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><RequestId>REQ1</RequestId></Error>".encode()


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", PermissionDeniedError, "the credentials do not allow it"),
        (403, "SignatureDoesNotMatch", PermissionDeniedError, "the secret key is wrong"),
        (403, "InvalidAccessKeyId", PermissionDeniedError, "does not know this access key"),
        (403, "RequestTimeTooSkewed", PermissionDeniedError, "the clock of this node is wrong"),
        (400, "ExpiredToken", PermissionDeniedError, "the credentials have expired"),
        (301, "PermanentRedirect", InvalidInputError, "another region; set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", InvalidInputError, "another region"),
        (404, "NoSuchBucket", InvalidInputError, "there is no bucket conformance"),
        (503, "SlowDown", UnavailableError, "503 SlowDown"),
        (500, "InternalError", UnavailableError, "500 InternalError"),
    ],
)
def test_each_answer_says_what_to_do(
    relay: FaultyRelay, status: int, code: str, kind: type[BootseerError], words: str
) -> None:
    with open_store("s3://conformance/answers", deadline_s=20) as store:
        relay.faults = [Fault("(GET|PUT) ", 1000, status=status, body=answer(code))]
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.read("key"), lambda: store.publish("key", b"x"),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(kind, match=words) as caught:
                call()
            assert f"s3://conformance/answers/key at http://{relay.host}" in str(caught.value)
            if code not in ("NoSuchBucket", "PermanentRedirect", "AuthorizationHeaderMalformed"):
                assert f"{status} {code} (request id REQ1)" in str(caught.value)


def test_an_answer_that_was_lost_is_no_lost_race(relay: FaultyRelay) -> None:
    """The second attempt finds the object that the first attempt made."""
    with open_store("s3://conformance/lost", deadline_s=60) as store:
        backend = store.backend
        put(backend, "warm", b"")
        relay.faults = [Fault("PUT .*/key", 1, lose=True)]
        assert store.publish("key", b"mine")
        assert relay.count("PUT .*/key") == 2
        relay.faults = [Fault("PUT .*/key", 1, status=503, body=answer("SlowDown"))]
        assert not store.publish("key", b"another's")


def test_a_body_that_is_shorter_than_its_range_is_asked_for_again(relay: FaultyRelay) -> None:
    headers = {
        "Content-Range": "bytes 0-9/10",
        "ETag": '"1"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    }
    with open_store("s3://conformance/short", deadline_s=60) as store:
        store.publish("key", b"0123456789")
        relay.faults = [Fault("GET .*/key", 1, 206, headers, body=b"012")]
        assert store.read("key", 0, 10) == b"0123456789"
        assert relay.count("GET .*/key") == 2


def doctor_says(*words: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    return found


@pytest.mark.parametrize(
    ("refused", "rights"),
    [
        ("GET /conformance[?]", "s3:ListBucket"),
        ("PUT ", "s3:PutObject"),
        ("GET /conformance/doctored/doctor/", "s3:GetObject"),
        ("POST ", "s3:DeleteObject"),
        ("(PUT|POST) ", "s3:PutObject, s3:DeleteObject"),
    ],
)
def test_the_doctor_names_the_rights_that_are_missing(
    relay: FaultyRelay, tmp_path: Path, refused: str, rights: str
) -> None:
    relay.faults = [Fault(refused, 1000, status=403, body=answer("AccessDenied"))]
    words = ["--store", "s3://conformance/doctored", "--cache-dir", str(tmp_path), "doctor"]
    (store,) = [one for one in doctor_says(*words) if one["name"] == "store"]
    assert store["status"] == "fail"
    assert store["seen"].endswith(f"the credentials may not {rights}")
    assert "docs/stores/s3.md" in store["advice"]


def test_the_doctor_finds_a_gateway_that_ignores_conditions(
    relay: FaultyRelay, tmp_path: Path
) -> None:
    words = ["--store", "s3://conformance/doctored", "--cache-dir", str(tmp_path), "doctor"]
    for ignores, status in ((False, "ok"), (True, "warn")):
        relay.ignores_conditions = ignores
        found = {one["name"]: one for one in doctor_says(*words)}
        assert found["store atomic"]["status"] == status
        assert "a rule of the bucket" in found["store uploads"]["seen"]


def test_what_passes_is_asked_again(relay: FaultyRelay) -> None:
    with open_store("s3://conformance/again", deadline_s=60) as store:
        relay.faults = [Fault("PUT ", 2, status=503, body=answer("SlowDown"))]
        assert store.publish("key", b"x")
        relay.faults = [Fault("GET ", 2, status=500, body=b"")]
        assert store.read("key") == b"x"
        relay.faults = [Fault("GET ", 2, lose=True)]
        assert store.read("key") == b"x"


def test_options_of_fsspec_that_mean_nothing_here_are_refused() -> None:
    options = {"requester_pays": True}
    fs = fsspec.filesystem("bootseer", target_protocol="s3", target_options=options)
    with pytest.raises(InvalidInputError, match="the option 'requester_pays' of s3 is not known"):
        fs.ls("bucket/x")


@pytest.mark.usefixtures("fresh_interpreters")
def test_fsspec_needs_no_other_package_for_a_bucket(moto: dict[str, str]) -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "import fsspec\n"
        "with fsspec.open('bootseer::s3://conformance/fsspec/x', 'wb') as file:\n"
        "    file.write(b'abc')\n"
        "fs, path = fsspec.url_to_fs('bootseer::s3a://conformance/fsspec')\n"
        "print(fs.ls(path, detail=False), fs.cat(path + '/x'))"
    )
    done = run_python(code, **moto)
    assert done.stdout == "['conformance/fsspec/x'] b'abc'\n", done.stderr


def test_fsspec_has_its_own_file_system_for_buckets(tmp_path: Path) -> None:
    """Our entry points do not replace fsspec's own packages for buckets.

    Where such a package is not installed, the error names it.
    """
    (tmp_path / "gcsfs.py").write_text("class GCSFileSystem: protocol = 'gs', 'gcs'")
    code = (
        f"import sys; sys.modules['s3fs'] = None; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import fsspec\n"
        "print(fsspec.get_filesystem_class('gs'))\n"
        "fsspec.open('s3://bucket/x')"
    )
    done = run_python(code)
    assert done.stdout == "<class 'gcsfs.GCSFileSystem'>\n", done.stderr
    assert "ImportError: fsspec opens s3:// by the package s3fs" in done.stderr.splitlines()[-1]
    assert "bootseer" in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("fresh_interpreters")
def test_without_obstore_the_package_is_named() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from bootseer.store import open_backend\n"
        "open_backend('s3://bucket/x').stat('a')"
    )
    done = run_python(code, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    assert "pip install bootseer[s3]" in done.stderr.splitlines()[-1]
    assert "UnsupportedError" in done.stderr.splitlines()[-1]


def test_a_url_with_credentials_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="takes no credentials from a URL"):
        open_backend("s3://key:secret@bucket/x")
    with pytest.raises(UnsupportedError, match="names no bucket"):
        open_backend("s3://").stat("")


# ---- Azure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend_url", [AZURE], indirect=True)
def test_azure_says_what_is_refused(backend: Backend) -> None:
    with pytest.raises(InvalidInputError, match="no name has a backslash"):
        put(backend, "back\\slash", b"")
    missing = open_backend("az://missing/folder")
    for call in (lambda: missing.read("x"), lambda: missing.stat("x"), lambda: missing.list("")):
        with pytest.raises(InvalidInputError, match="there is no bucket missing"):
            call()
