"""Output of `bootseer kubernetes containerd` where another runtime than containerd answers."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.errors import BootseerError, CorruptError, UnsupportedError

_SERVICE = "runtime.v1.RuntimeService"


def info(**entries: str) -> bytes:
    """Return a StatusResponse of CRI, whose second field is a map of texts."""
    pairs = [
        b"\n%c%s\x12%c%s" % (len(name), name.encode(), len(text), text.encode())
        for name, text in entries.items()
    ]
    return b"".join(b"\x12%c%s" % (len(pair), pair) for pair in pairs)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Yield a short path, as a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="cri-") as name:
        yield Path(name, "s")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", UnsupportedError),
        (info(config='{"sandboxImage": "pause:3.9"}'), UnsupportedError),
        (info(config='{"containerd": null}'), UnsupportedError),
        (info(config='{"containerd": 1}'), CorruptError),
        (info(config="[crio]"), CorruptError),
    ],
)
@pytest.mark.needs("mount", "fuse")
def test_another_runtime_is_named(
    socket_path: Path, answer: bytes, kind: type[BootseerError]
) -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)
    service = grpc.method_handlers_generic_handler(_SERVICE, {"Status": handler})
    server = grpc.server(ThreadPoolExecutor(2), handlers=(service,))
    server.add_insecure_port(f"unix:{socket_path}")
    server.start()
    try:
        words = ["kubernetes", "containerd", "status", "--socket", str(socket_path)]
        done = CliRunner().invoke(cli, words)
    finally:
        server.stop(None).wait(30)
    assert isinstance(done.exception, kind), done.exception
    assert str(socket_path) in str(done.exception)
