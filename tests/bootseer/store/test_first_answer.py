"""A process that awaits the first answer of its store: what ends the wait, and what lifts it."""

import math
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from bootseer.base.wait_budget import WAIT_BUDGET, first_answer_s
from bootseer.errors import BootseerError, DeadlineError, NotFoundError, UnavailableError
from bootseer.store import open_store
from bootseer.store.deadline import Call, DeadlineCaller
from testbed.servers.answering import talking
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.waiting import pause

URLS = ("hdfs://{}/s", "s3://bucket/s", "http://{}/s", "oci://{}/a/b@sha256:" + "0" * 64)
DEADLINE_S = 60.0


@pytest.fixture
def limit() -> Iterator[Callable[[float], None]]:
    """Yield a function that limits the wait for the first answer, as a start does."""
    yield lambda first_s: WAIT_BUDGET.limit(DEADLINE_S, first_answer_s=first_s)
    WAIT_BUDGET.limit(math.inf)


@pytest.fixture
def bucket_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def lead_to(host: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")

    return lead_to


# A client of HDFS that was left goes on in its thread; tests/bootseer/launch has it in a process.
@pytest.mark.parametrize("url", URLS[1:])
def test_a_store_that_is_silent_is_waited_for_once(
    url: str, limit: Callable[[float], None], bucket_at: Callable[[str], None]
) -> None:
    def hang(connection: socket.socket, over: threading.Event) -> None:
        over.wait(600)

    with talking(hang) as host:
        bucket_at(host)
        with open_store(url.format(host), deadline_s=DEADLINE_S) as store:
            limit(0.6)
            with pytest.raises(BootseerError) as first:
                store.read("a")
            assert "in earlier calls" not in str(first.value)
            with pytest.raises(DeadlineError, match=r"within 0\.6 s, in earlier calls"):
                store.read("b")
        # So does another stage, which opens the store anew.
        with (
            open_store(url.format(host), deadline_s=DEADLINE_S) as store,
            pytest.raises(DeadlineError, match="in earlier calls"),
        ):
            store.info("c")


@pytest.mark.parametrize("url", URLS)
def test_a_store_that_refuses_is_asked_again_for_a_moment_only(
    url: str,
    limit: Callable[[float], None],
    bucket_at: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("bootseer.base.wait_budget.REFUSED_S", 0.2)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{unheard.getsockname()[1]}"
        bucket_at(host)
        with open_store(url.format(host), deadline_s=DEADLINE_S) as store:
            limit(DEADLINE_S)
            with pytest.raises(UnavailableError, match="Connection refused"):
                store.read("a")
            with pytest.raises(DeadlineError, match="nobody took a connection, in earlier calls"):
                store.read("b")
    assert not [one for one in caplog.messages if "waiting up to" in one]


@pytest.fixture
def relay(moto: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRelay]:
    """Yield the relay through which buckets are reached."""
    with FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://")) as faulty:
        for name, value in {**moto, "AWS_ENDPOINT_URL": f"http://{faulty.host}"}.items():
            monkeypatch.setenv(name, value)
        yield faulty


def test_a_store_that_is_busy_is_not_away(
    relay: FaultyRelay, limit: Callable[[float], None]
) -> None:
    relay.faults = [Fault("", 1000, status=503, body=b"")]
    with open_store("s3://conformance/busy", deadline_s=DEADLINE_S) as store:
        limit(DEADLINE_S)
        with pytest.raises(UnavailableError):
            store.read("a")
        assert not WAIT_BUDGET.awaits_first_answer
        relay.faults = []
        with pytest.raises(NotFoundError):
            store.read("a")


def test_the_first_of_several_requests_of_a_call_is_an_answer(
    relay: FaultyRelay, limit: Callable[[float], None]
) -> None:
    """Regression: a store behind a slow proxy was away, although it had said "no such object"."""
    relay.faults = [Fault("HEAD ", hang_s=1.5), Fault("GET ", hang_s=1.5)]
    with open_store("s3://conformance/slow", deadline_s=DEADLINE_S) as store:
        limit(2.5)
        with pytest.raises(NotFoundError):
            store.info("a")
    assert relay.count("GET ") == 1


def test_the_first_answer_lifts_the_limit(limit: Callable[[float], None]) -> None:
    caller = DeadlineCaller("test", 2)
    limit(5.0)

    def miss(_: Call[None]) -> None:
        raise NotFoundError("no such object")

    with pytest.raises(NotFoundError):
        caller.run(miss, DEADLINE_S)
    assert WAIT_BUDGET.left_s == DEADLINE_S
    caller.close()


def test_bytes_that_arrive_lift_the_limit_of_the_call_itself(
    limit: Callable[[float], None],
) -> None:
    caller = DeadlineCaller("test", 2)
    limit(1.0)

    def move(call: Call[str]) -> str:
        call.progress()
        pause(1.5)
        return "moved"

    assert caller.run(move, DEADLINE_S) == "moved"
    caller.close()


def test_a_caller_without_an_alternative_waits_longer(limit: Callable[[float], None]) -> None:
    caller = DeadlineCaller("test", 4)
    release = threading.Event()
    limit(0.6)
    assert not WAIT_BUDGET.wait_longer(), "nothing has failed yet"
    with pytest.raises(DeadlineError, match=r"within 0\.6 s$"):
        caller.run(lambda _: release.wait(60), DEADLINE_S)
    assert WAIT_BUDGET.wait_longer()
    assert caller.run(lambda _: 5, DEADLINE_S) == 5
    assert not WAIT_BUDGET.wait_longer(), "the first answer is there"
    release.set()
    caller.close()


def test_the_limit_follows_a_deadline_that_is_short_or_long() -> None:
    assert [first_answer_s(one) for one in (2.0, 60.0, 240.0)] == [2.0, 6.0, 20.0]


def test_a_name_for_which_the_resolver_asks_twice_is_waited_for() -> None:
    """Regression: one lost packet of DNS, and the store was away; resolv.conf(5) has the 5 s."""
    resolver_timeout_s = 5.0
    assert first_answer_s(60.0) >= resolver_timeout_s + 1.0
