"""Servers that send or take a byte now and then: the total time counts, not the last byte."""

import gc
import threading

from bootseer.errors import BootseerError, UnavailableError
from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import digest_of
from bootseer.registry.hosts import RegistryHost
from bootseer.transfer.policy import Policy
from testbed.servers.registry import QuietHandler, serve
from testbed.waiting import TIMEOUT_S


def test_who_waits_for_a_token_that_fails_does_not_ask_again() -> None:
    """Otherwise a token server that hangs would hold each thread in turn."""
    count = 8
    asked: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            if self.path.startswith("/token"):
                asked.append(self.path)
                if len(asked) == 1:
                    threading.Event().wait(2.0)  # by then most of them wait for the token
                self.reply(503, b"{}")
                return
            ask = f'Bearer realm="http://{host}/token",service="s"'
            self.reply(401, b"{}", **{"WWW-Authenticate": ask})

    server = serve(Handler)
    host = f"127.0.0.1:{server.server_address[1]}"
    failures: list[BootseerError] = []
    with RegistryClient(
        "a/b",
        [RegistryHost(host, f"http://{host}/v2")],
        find_login=lambda *_: None,
        deadline_s=240,
        policy=Policy(attempts=1),
    ) as client:

        def ask() -> None:
            try:
                client.manifest("v1")
            except BootseerError as error:
                failures.append(error)

        askers = [threading.Thread(target=ask) for _ in range(count)]
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join(TIMEOUT_S)
    server.shutdown()
    server.server_close()
    assert [type(one) for one in failures] == [UnavailableError] * count
    assert len(asked) < count


def test_blobs_without_number_leave_nothing_behind() -> None:
    """A process that runs for weeks reads the beginnings of millions of blobs."""
    blob = b"0123456789"

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.reply(200, blob)

    server = serve(Handler)
    host = f"127.0.0.1:{server.server_address[1]}"
    digests = [digest_of(b"%d" % number) for number in range(1100)]
    with RegistryClient(
        "a/b", [RegistryHost(host, f"http://{host}/v2")], find_login=lambda *_: None, deadline_s=240
    ) as client:
        for digest in digests:
            assert client.file(digest, len(blob)).read(0, len(blob)) == blob
        gc.collect()
        wanted = set(digests)
        # By exact type: lazy objects of other libraries answer isinstance() by loading.
        kept = [dict.keys(one) for one in gc.get_objects() if issubclass(type(one), dict)]
        assert 0 < max(len(wanted & keys) for keys in kept) <= 1000
    server.shutdown()
    server.server_close()
