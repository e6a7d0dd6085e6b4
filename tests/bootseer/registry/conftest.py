"""Real registry of all tests here; each test uses repositories of its own."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bootseer.registry.client import RegistryClient
from bootseer.registry.credentials import Credential
from bootseer.registry.hosts import RegistryHost
from bootseer.transfer.policy import Policy
from testbed.servers.registry import Registry, running_registry


@pytest.fixture(scope="package")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def repository() -> str:
    """Return the name of a repository that no other test uses."""
    return f"tests/r{secrets.token_hex(6)}"


Connect = Callable[..., RegistryClient]


@pytest.fixture
def connect(repository: str, tmp_path: Path) -> Iterator[Connect]:
    """Yield a function that makes clients of the repository without any login of the user.

    The function's arguments are the servers as HOST:PORT; the last one is the registry.
    """
    with ExitStack() as stack:

        def make(
            *servers: str, login: Credential | None = None, deadline_s: float = 30.0
        ) -> RegistryClient:
            hosts = [
                RegistryHost(
                    server,
                    f"http://{server}/v2",
                    namespace="" if server == servers[-1] else servers[-1],
                )
                for server in servers
            ]
            client = RegistryClient(
                repository,
                hosts,
                find_login=lambda host, name: login,
                deadline_s=deadline_s,
                policy=Policy(base_s=0.01),
            )
            return stack.enter_context(client)

        yield make
