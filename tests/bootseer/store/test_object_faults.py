"""Buckets whose server is throttled, broken or slow: its errors, and an end by the deadline.

The server is moto's, behind a scripted relay.
"""

import re
import threading
from collections.abc import Callable, Iterator

import pytest

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    exit_code_of,
)
from bootseer.store import Backend, Store, open_backend, open_store
from bootseer.store.objects.lease import LeaseRenewal
from bootseer.transfer.attempt import Attempt
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.waiting import wait_for
from tests.bootseer.store.using import put

MIB = 2**20
PATIENT_S = 240.0
"""Deadline of calls that succeed, also on a busy machine."""
SHORT_S = 1.0
"""Deadline of calls that hang."""


@pytest.fixture
def relay(moto: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRelay]:
    """Yield a relay in front of the server; `s3://...` leads to it."""
    with FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://")) as running:
        for name, value in {**moto, "AWS_ENDPOINT_URL": f"http://{running.host}"}.items():
            monkeypatch.setenv(name, value)
        yield running


def bucket_of(request: pytest.FixtureRequest) -> str:
    return "s3://conformance/" + re.sub(r"\W", "-", request.node.name)


@pytest.fixture
def store(relay: FaultyRelay, request: pytest.FixtureRequest) -> Iterator[Store]:
    with open_store(bucket_of(request), deadline_s=PATIENT_S) as opened:
        yield opened


def throttled(when: str, times: int = 1000) -> Fault:
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce</Message></Error>"
    return Fault(when, times, status=503, body=body, headers={"Content-Type": "application/xml"})


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_cannot_answer_now_is_unavailable(
    relay: FaultyRelay, store: Store, status: int
) -> None:
    relay.faults = [Fault("PUT ", 1000, status=status, body=b"")]
    with pytest.raises(UnavailableError):
        store.publish("key", b"x")


def test_a_throttled_bucket_does_not_end_the_renewal_of_a_lease(
    relay: FaultyRelay, store: Store
) -> None:
    held = store.lease("leases/x", ttl_s=3600, owner="me")
    assert held is not None
    was_ns = held.expires_at_ns
    relay.faults = [throttled("PUT .*renewed", 5)]  # as often as the client tries
    with LeaseRenewal(held, 3.0):
        wait_for(lambda: held.expires_at_ns > was_ns, "a renewal after the throttled one")
    assert relay.count("PUT .*renewed") > 5


@pytest.mark.parametrize("body", [b"", b"<Error><Code>PreconditionFailed</Code></Error>"])
def test_a_lost_race_for_a_name_is_no_failure(
    relay: FaultyRelay, store: Store, body: bytes
) -> None:
    relay.faults = [Fault("PUT .*/key", 1, status=412, body=body)]
    assert not store.publish("key", b"x"), "Ceph RGW answers 412 without a body"


def test_a_conflict_is_a_race_that_is_lost_or_run_again(relay: FaultyRelay, store: Store) -> None:
    conflict = b"<Error><Code>ConditionalRequestConflict</Code><Message>x</Message></Error>"
    relay.faults = [Fault("PUT .*/key", 1, status=409, body=conflict)]
    assert store.publish("key", b"x"), "nobody else has it after all"
    relay.faults = [Fault("PUT .*/key", 1, status=409, body=conflict)]
    assert not store.publish("key", b"y")
    relay.faults = [Fault("PUT .*/other", 1000, status=409, body=conflict)]
    with pytest.raises(UnavailableError):
        store.publish("other", b"y")


def test_refused_access_says_so(relay: FaultyRelay, store: Store) -> None:
    relay.faults = [Fault("(PUT|GET|HEAD) ", 1000, status=403, body=b"")]
    for call in (
        lambda: store.publish("key", b"x"),
        lambda: store.read("key"),
        lambda: list(store.list()),
    ):
        with pytest.raises(PermissionDeniedError):
            call()


def test_a_bucket_that_is_missing_is_no_empty_store(relay: FaultyRelay) -> None:
    with open_store("s3://no-such-bucket/store", deadline_s=PATIENT_S) as store:
        calls: tuple[Callable[[], object], ...] = (
            lambda: list(store.list()),
            lambda: store.read("key"),
            lambda: store.exists("key"),
            lambda: store.publish("key", b"x"),
            lambda: store.publish("key", b"x" * MIB),
            lambda: store.lease("leases/x", ttl_s=60, owner="me"),
            lambda: store.sweep(),
            lambda: store.backend.read_into("key", 0, memoryview(bytearray(1)), Attempt()),
            lambda: store.backend.delete("key"),
        )
        for call in calls:
            with pytest.raises(InvalidInputError, match=r"bucket no-such-bucket") as caught:
                call()
            assert exit_code_of(caught.value) == 2
    with open_store("s3://no-such-bucket", deadline_s=PATIENT_S) as store:
        calls = (
            lambda: list(store.list()),
            lambda: store.backend.stat(""),
            lambda: store.backend.mkdir(""),
        )
        for call in calls:
            with pytest.raises(InvalidInputError, match=r"bucket no-such-bucket"):
                call()


def asked(relay: FaultyRelay) -> list[str]:
    """Return the methods of the requests since the last call."""
    methods = [one.method for one in relay.seen]
    relay.seen.clear()
    return methods


def test_what_a_small_object_and_a_lease_cost(relay: FaultyRelay, store: Store) -> None:
    assert store.publish("key", b"x")
    assert asked(relay) == ["PUT"]
    assert not store.publish("key", b"y")
    asked(relay)
    assert store.read("key") == b"x"
    assert asked(relay) == ["GET"]
    held = store.lease("leases/x", ttl_s=60, owner="me")
    assert held is not None
    assert asked(relay) == ["PUT"]
    assert store.lease("leases/x", ttl_s=60, owner="you") is None
    assert asked(relay) == ["PUT", "GET", "GET"]
    held.renew()
    assert asked(relay) == ["PUT", "GET"]
    held.release()
    # And its renewal. obstore deletes by DeleteObjects.
    assert asked(relay) == ["POST", "POST"]
    again = store.lease("leases/x", ttl_s=60, owner="you")
    assert again is not None
    asked(relay)
    again.release()
    assert asked(relay) == ["POST"]


def test_a_large_object_that_is_there_is_not_sent(relay: FaultyRelay, store: Store) -> None:
    data = b"x" * MIB
    assert store.publish("key", data)
    relay.seen.clear()
    assert not store.publish("key", data)
    assert relay.count("PUT ") == 0


def test_many_objects_are_deleted_by_one_request(relay: FaultyRelay, store: Store) -> None:
    keys = [f"a/{name}" for name in ("x", "with space", "star*", "[x]", "q?", "ü")]
    for key in (*keys, "a/starfish"):
        store.publish(key, b"x")
    relay.seen.clear()
    store.delete_many([*keys, "a/missing"])
    assert [one.method for one in relay.seen] == ["POST"]
    assert [info.path for info in store.list()] == ["a/starfish"]
    refused = (
        "<DeleteResult><Error><Key>{}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        "</DeleteResult>"
    )
    own = store.url.removeprefix("s3://conformance/") + "/a/starfish"
    relay.faults = [Fault("POST ", 1, status=200, body=refused.format(own).encode())]
    with pytest.raises(PermissionDeniedError, match="AccessDenied"):
        store.delete_many(["a/starfish"])


def test_what_is_missing_is_told_by_one_request(relay: FaultyRelay, store: Store) -> None:
    """A second request once looked for a folder of that name."""
    assert not store.exists("key")
    # The first time, whether there is such a bucket.
    assert asked(relay) == ["HEAD", "GET"]
    put(store.backend, "folder/x", b"x")
    asked(relay)
    assert not store.exists("key")
    assert not store.exists("folder")
    assert asked(relay) == ["HEAD", "HEAD"]


def test_a_store_is_listed_by_one_request_for_a_thousand_objects(
    relay: FaultyRelay, store: Store
) -> None:
    """Each folder once had its own request, and traces and bundles have one folder each."""
    keys = [f"{number % 3}/{number}/{name}" for number in range(12) for name in ("a", "b-", "b")]
    for key in (*keys, "x-", "x"):
        store.publish(key, b"x")
    store.backend.mkdir("empty/one")
    put(store.backend, ".tmp/x", b"x")
    asked(relay)
    assert [info.path for info in store.list()] == sorted((*keys, "x-", "x"))
    assert [info.path for info in store.list("1/1")] == sorted(
        key for key in keys if key.startswith("1/1")
    )
    assert [info.path for info in store.list("none/")] == []
    assert asked(relay) == ["GET", "GET", "GET"]


def test_what_leases_leave_behind_goes_by_few_requests(relay: FaultyRelay, store: Store) -> None:
    for number in range(30):
        put(store.backend, f".tmp/renewed-{number}", b"x")
    relay.seen.clear()
    assert store.sweep(older_than_s=-60) == 30
    # A list, the storage's clock, and one for all.
    assert asked(relay) == ["GET", "PUT", "HEAD", "POST", "POST"]
    store.publish("key", b"x")
    store.delete("key")
    assert asked(relay) == ["PUT", "HEAD", "POST"]


def test_an_answer_that_names_another_key_is_no_panic(relay: FaultyRelay, store: Store) -> None:
    error = b"<Error><Key>k</Key><Code>X</Code><Message>n</Message></Error>"
    body = b"<DeleteResult>" + error + b"</DeleteResult>"
    relay.faults = [Fault("POST ", 1000, status=200, body=body)]
    with pytest.raises(UnavailableError):
        store.delete_many(["a"])


def test_a_folder_is_deleted_with_what_is_in_it_and_nothing_else(store: Store) -> None:
    for key in ("star*/a", "star*/b/c", "starfish/a", "star/x"):
        store.publish(key, b"x")
    store.backend.delete("star*", recursive=True)
    assert [info.path for info in store.list()] == ["star/x", "starfish/a"]


def _write(backend: Backend) -> None:
    put(backend, "new", b"x" * 1000)


HANGING: tuple[tuple[str, Callable[[Backend], object]], ...] = (
    ("HEAD |GET ", lambda at: at.stat("key")),
    ("GET ", lambda at: at.read("key")),
    ("GET ", lambda at: at.read("key", 0, 10)),
    ("GET ", lambda at: at.read_into("key", 0, memoryview(bytearray(10)))),
    ("GET ", lambda at: at.read_into("key", 0, memoryview(bytearray(10)), Attempt())),
    ("GET ", lambda at: list(at.list(""))),
    ("PUT ", _write),
    ("PUT ", lambda at: at.rename("key", "new")),
    ("(DELETE|POST) ", lambda at: at.delete("key")),
    ("PUT ", lambda at: at.mkdir("folder")),
)


@pytest.mark.parametrize(("when", "call"), HANGING)
def test_a_server_that_hangs_is_left_at_the_deadline(
    relay: FaultyRelay,
    request: pytest.FixtureRequest,
    when: str,
    call: Callable[[Backend], object],
) -> None:
    put(open_backend(bucket_of(request), deadline_s=PATIENT_S), "key", b"x" * 1000)
    relay.faults = [Fault(when, 1000, hang_s=600)]
    backend = open_backend(bucket_of(request), deadline_s=SHORT_S)
    ends: list[BaseException] = []

    def run() -> None:
        try:
            call(backend)
        except BaseException as error:
            ends.append(error)

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    wait_for(lambda: ends, "the end of a call to a server that hangs")
    assert isinstance(ends[0], DeadlineError)
    assert "s3://conformance/" in str(ends[0])
    backend.close()


def test_a_body_that_drips_is_left_and_one_that_flows_is_not(
    relay: FaultyRelay, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket_of(request)
    data = bytes(range(256)) * 4096
    put(open_backend(url, deadline_s=PATIENT_S), "key", data)
    relay.faults = [Fault("GET .*/key", 1000, trickle_s=0.02)]
    backend = open_backend(url, deadline_s=SHORT_S)
    for read in (
        lambda: backend.read_into("key", 0, memoryview(bytearray(len(data))), Attempt()),
        lambda: backend.read("key"),
    ):
        with pytest.raises((DeadlineError, UnavailableError)):
            read()
    relay.faults = []
    assert open_backend(url, deadline_s=PATIENT_S).read("key") == data
    backend.close()


def test_what_a_failed_upload_has_sent_never_appears(relay: FaultyRelay, store: Store) -> None:
    """A part that fails must not make an object of the parts before it."""
    relay.faults = [Fault("PUT .*partNumber=2", 1, status=403, body=b"")]
    piece = b"x" * (16 * MIB)
    with pytest.raises(BootseerError):
        store.publish("large", (piece for _ in range(8)), replace=True)
    with pytest.raises(NotFoundError):
        store.read("large", 0, 1)
