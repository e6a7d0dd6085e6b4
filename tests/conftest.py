"""Fixtures and hooks for all tests."""

import gc
import secrets
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from bootseer.demo import limited
from bootseer.linux import namespaces
from bootseer.settings.config import variable_of
from bootseer.store import TEST_NETWORK
from bootseer.transfer.pace import Pace
from testbed import zygote
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.running import running
from testbed.images.rootfs import python_root
from testbed.needs import MissingError, require
from testbed.processes import uninterruptible_threads
from testbed.search_path import usual_search_path
from testbed.servers.faulty_relay import FaultyRelay
from testbed.servers.registry import Registry, running_registry
from testbed.servers.s3 import make_bucket, rgw_server, s3_server
from tests.support import quarantine, scheduling, workers
from tests.support.made_once import made_once

if TYPE_CHECKING:
    from xdist.remote import Producer

# The time of an example shows only how busy the machine is.
settings.register_profile("bootseer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bootseer")
_LONGEST_NAME = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-durations", action="store_true", help="write tests/durations.txt anew")


def pytest_configure(config: pytest.Config) -> None:
    reset_signals()
    leave_mounts()
    zygote.install()
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        workers.install(config)
    if config.getoption("note_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations())


class _Durations:
    """Adds up the time of each test and its fixtures, and writes all times at the end."""

    def __init__(self) -> None:
        self._durations: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._durations[scheduling.bare(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        text = scheduling.durations_text(self._durations)
        scheduling.DURATIONS.write_text(text, encoding="utf-8")


def pytest_make_parametrize_id(config: pytest.Config, val: object) -> str | None:
    """Name a long parameter by its first characters and its length.

    Each worker sends all names to the controller, and pytest puts a test's name into the
    environment.
    """
    if isinstance(val, str | bytes) and len(val) > _LONGEST_NAME:
        return f"{val[:_LONGEST_NAME]!r}... of {len(val)}"
    return None


def leave_mounts() -> None:
    """Enter a mount namespace of this process's own.

    A namespace made by a test of another process would copy this process's mounts, and keep their
    servers alive.
    """
    # Without the rights, the tests that mount are skipped with a reason each.
    with suppress(OSError):
        namespaces.unshare(namespaces.CLONE_NEWNS)
        namespaces.make_private()


def reset_signals() -> None:
    """Set signals as after a login.

    `nohup make test &` ignores some signals, which all children of the tests would inherit.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_forked"] = zygote.failures


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that was killed has no output.
    zygote.failures += getattr(node, "workeroutput", {}).get("not_forked", ())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why programs were not forked: fresh interpreters take ten times the processor time."""
    if zygote.failures:
        terminalreporter.section("programs that could not be forked")
        for line in zygote.failures:
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return scheduling.worker_count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: "Producer"
) -> scheduling.Scheduling | None:
    return scheduling.Scheduling(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)  # xdist names the groups then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _quarantine(items)
    if hasattr(config, "workerinput"):
        text = scheduling.DURATIONS.read_text(encoding="utf-8")
        scheduling.arrange(items, scheduling.read_durations(text))


def _quarantine(items: list[pytest.Item]) -> None:
    """Mark the tests of tests/quarantine.txt as allowed to fail. Raises: ValueError for an old
    line."""
    listed = {
        line.node_id: line.reason
        for line in quarantine.read(quarantine.LIST.read_text(encoding="utf-8"), date.today())
    }
    for item in items:
        reason = listed.get(item.nodeid.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.xfail(strict=False, reason=f"quarantined: {reason}"))


def _skipped(reason: MissingError) -> BaseException:
    # Otherwise the summary names this file instead of the test's.
    return pytest.skip.Exception(str(reason), _use_item_location=True)  # noqa: TID251


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Skip a test whose `needs` mark names something that the machine lacks."""
    try:
        for mark in item.iter_markers("needs"):
            require(*mark.args, **mark.kwargs)
        return (yield)
    except MissingError as reason:
        raise _skipped(reason) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Skip a test that raises MissingError."""
    try:
        return (yield)
    except MissingError as reason:
        raise _skipped(reason) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure the processes that hang on a mount or disk that does not answer."""
    report = yield
    if report.failed and (stuck := uninterruptible_threads()):
        report.sections.append(("threads that wait in the kernel", stuck))
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    # Modules and collected tests stay: half a million objects that garbage collections need not
    # visit again, and whose pages forked children need not copy.
    gc.collect()
    gc.freeze()
    if session.config.getoption("loadgroup", default=False):
        scheduling.check_groups(session.items)


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(TEST_NETWORK, limited.__name__)
        # Without this, each start is followed by a process that copies its timeline to the store.
        patched.setenv(variable_of("publish_timelines"), "off")
        patched.setenv("PATH", usual_search_path())
        patched.delenv("VIRTUAL_ENV", raising=False)
        yield


@pytest.fixture
def fresh_interpreters() -> Iterator[None]:
    """Start real interpreters in a test of how an interpreter starts."""
    with zygote.without_zygote():
        yield


@pytest.fixture
def no_second_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never ask again for a late read.

    A test that counts reads or holds them back may be stopped for longer than a read may be silent.
    """
    monkeypatch.setattr(Pace, "has_credit", False)


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """URL of a local store that does not exist yet."""
    return (tmp_path / "store").as_uri()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    """Real HDFS of one NameNode and three DataNodes, shared by the whole session.

    A test uses a folder of its own (`hdfs_url`), and undoes its changes to the servers.
    """
    with running(MiniHdfs(tmp_path_factory.mktemp("hdfs"))) as cluster:
        yield cluster


@pytest.fixture
def hdfs_url(hdfs: MiniHdfs, tmp_path: Path) -> str:
    """URL of a folder for one test on a real HDFS, which does not exist yet."""
    # pytest removes the folder of a test that passed, and gives its name to a later test.
    return f"{hdfs.url}/{tmp_path.name}-{secrets.token_hex(4)}"


@pytest.fixture(scope="session")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a Ceph gateway that the session shares, with the bucket `conformance`.

    Tests that use it are marked `rgw`.
    """
    with rgw_server(tmp_path_factory.mktemp("rgw")) as environment:
        make_bucket(environment, "conformance")
        yield environment


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, str]]:
    """Environment of moto's S3 server that the session shares, with the bucket `conformance`."""
    with s3_server() as environment:
        make_bucket(environment, "conformance")
        yield environment


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real, small root file system with Python (`python_root`); not to be changed."""
    return made_once(tmp_path_factory, "small-root", python_root)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Real registry, shared by the tests of a file, each with repositories of its own."""
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def relay(registry: Registry) -> Iterator[FaultyRelay]:
    """Relay to the registry with faults of the test's choice."""
    with FaultyRelay(registry.host) as running:
        yield running
