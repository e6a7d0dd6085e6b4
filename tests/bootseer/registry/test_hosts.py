"""containerd's hosts.toml: the servers that are asked, their order, and their settings."""

from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.registry.hosts import RegistryHost, load_hosts


def write(directory: Path, name: str, text: str) -> Path:
    (directory / name).mkdir(parents=True)
    (directory / name / "hosts.toml").write_text(text)
    return directory


def urls(hosts: tuple[RegistryHost, ...]) -> list[str]:
    return [host.base_url for host in hosts]


@pytest.mark.parametrize(
    ("registry", "url"),
    [
        ("docker.io", "https://registry-1.docker.io/v2"),
        ("quay.io", "https://quay.io/v2"),
        ("localhost:5000", "http://localhost:5000/v2"),
        ("[::1]:5000", "http://[::1]:5000/v2"),
        ("10.0.0.1:5000", "https://10.0.0.1:5000/v2"),
    ],
)
def test_without_a_file(registry: str, url: str, tmp_path: Path) -> None:
    (host,) = load_hosts(registry, tmp_path / "absent")
    assert (host.base_url, host.namespace, host.verify) == (url, "", True)


def test_the_hub_is_logged_in_to_by_its_name(tmp_path: Path) -> None:
    assert load_hosts("docker.io", tmp_path)[0].name == "docker.io"


def test_mirrors_come_first_in_order(tmp_path: Path) -> None:
    write(
        tmp_path,
        "docker.io",
        """
        server = "https://registry-1.docker.io"
        [host."https://mirror.lan"]
        capabilities = ["pull", "resolve"]
        skip_verify = true
        ca = "ca.pem"
        client = [["a.cert", "a.key"], ["b.pem", ""]]
        [host."https://mirror.lan".header]
        x-site = ["one", "two"]
        [host."http://10.0.0.1:5000/v2/hub"]
        override_path = true
        ca = ["/etc/x.pem", "y.pem"]
        """,
    )
    first, second, own = load_hosts("docker.io", tmp_path)
    assert first == RegistryHost(
        "mirror.lan",
        "https://mirror.lan/v2",
        capabilities=frozenset(("pull", "resolve")),
        namespace="docker.io",
        verify=False,
        ca_files=(tmp_path / "docker.io/ca.pem",),
        client_certificates=(
            (tmp_path / "docker.io/a.cert", tmp_path / "docker.io/a.key"),
            (tmp_path / "docker.io/b.pem", None),
        ),
        headers=(("x-site", "one, two"),),
    )
    assert second.base_url == "http://10.0.0.1:5000/v2/hub"
    assert second.ca_files == (Path("/etc/x.pem"), tmp_path / "docker.io/y.pem")
    assert (own.base_url, own.namespace) == ("https://registry-1.docker.io/v2", "")


def test_a_file_may_name_only_the_server(tmp_path: Path) -> None:
    write(tmp_path, "10.0.0.1:5000", 'server = "http://10.0.0.1:5000"')
    assert urls(load_hosts("10.0.0.1:5000", tmp_path)) == ["http://10.0.0.1:5000/v2"]


def test_the_server_is_not_asked_twice(tmp_path: Path) -> None:
    write(tmp_path, "r.io", 'server = "https://r.io"\n[host."https://r.io"]')
    assert urls(load_hosts("r.io", tmp_path)) == ["https://r.io/v2"]


def test_a_folder_without_colon_and_the_default(tmp_path: Path) -> None:
    write(tmp_path, "_default", '[host."https://all.lan"]')
    assert urls(load_hosts("r.io:5000", tmp_path)) == ["https://all.lan/v2", "https://r.io:5000/v2"]
    write(tmp_path, "r.io_5000_", '[host."https://one.lan"]')
    assert urls(load_hosts("r.io:5000", tmp_path)) == ["https://one.lan/v2", "https://r.io:5000/v2"]


def test_the_registry_itself_has_the_settings_of_its_table(tmp_path: Path) -> None:
    write(
        tmp_path,
        "r.io",
        """
        [host."https://first.lan"]
        [host."https://R.io:443/v2/"]
        capabilities = ["Pull"]
        ca = "ca.pem"
        client = [["a.cert", "a.key"]]
        dial_timeout = "1m1.5s"
        proxy = "http://proxy.lan:8080/"
        [host."https://R.io:443/v2/".header]
        x-site = "one"
        [host."https://last.lan"]
        """,
    )
    first, own, last = load_hosts("r.io", tmp_path)
    assert urls((first, last)) == ["https://first.lan/v2", "https://last.lan/v2"]
    assert own == RegistryHost(
        "r.io",
        "https://r.io/v2",
        namespace="",
        ca_files=(tmp_path / "r.io/ca.pem",),
        client_certificates=((tmp_path / "r.io/a.cert", tmp_path / "r.io/a.key"),),
        headers=(("x-site", "one"),),
        connect_s=61.5,
        proxy="http://proxy.lan:8080",
        is_registry=True,
    )


def test_what_the_top_of_the_file_says_holds_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        "r.io",
        """
        server = "https://r.io"
        ca = "top.pem"
        capabilities = ["pull"]
        [host."https://r.io"]
        skip_verify = true
        capabilities = ["resolve"]
        """,
    )
    (own,) = load_hosts("r.io", tmp_path)
    assert (own.verify, own.ca_files) == (False, (tmp_path / "r.io/top.pem",))
    assert own.capabilities == {"pull", "resolve"}


def test_the_registry_by_another_scheme_is_a_server_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "10.0.0.1:5000", '[host."http://10.0.0.1:5000"]')
    plain, own = load_hosts("10.0.0.1:5000", tmp_path)
    assert (plain.base_url, plain.namespace) == ("http://10.0.0.1:5000/v2", "")
    assert (own.base_url, own.is_registry) == ("https://10.0.0.1:5000/v2", True)


def test_no_capabilities_are_all(tmp_path: Path) -> None:
    write(tmp_path, "r.io", '[host."https://m.lan"]\ncapabilities = []')
    assert load_hosts("r.io", tmp_path)[0].capabilities == {"pull", "resolve", "push"}


def test_a_folder_of_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "r.io_5000_"
    folder.mkdir()
    for name in ("b.crt", "a.crt", "node.cert", "node.key", "both.cert", "readme"):
        (folder / name).touch()
    write(tmp_path, "_default", '[host."https://all.lan"]')
    (own,) = load_hosts("r.io:5000", tmp_path)
    assert (own.base_url, own.is_registry) == ("https://r.io:5000/v2", True)
    assert own.ca_files == (folder / "a.crt", folder / "b.crt")
    assert own.client_certificates == (
        (folder / "both.cert", None),
        (folder / "node.cert", folder / "node.key"),
    )


@pytest.mark.parametrize("text", ["500ms", "0.5s", "500000us"])
def test_durations(text: str, tmp_path: Path) -> None:
    write(tmp_path, "r.io", f'dial_timeout = "{text}"')
    assert load_hosts("r.io", tmp_path)[0].connect_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "text",
    [
        'dial_timeout = "soon"',
        "dial_timeout = 5",
        'proxy = "socks5://x"',
        'proxy = "http://me:secret@x/path"',
        'server = "https://x:port"',
        "= broken",
        "host = 7",
        "server = 7",
        'server = "ftp://x"',
        'server = "https://me:secret@x"',
        '[host."https://x"]\ncapabilities = ["sing"]',
        '[host."https://x"]\ncapabilities = "pull"',
        '[host."https://x"]\nca = 7',
        '[host."https://x"]\nclient = [[]]',
        '[host."https://x"]\nclient = [["a", "b", "c"]]',
        '[host."https://x"]\nheader = 7',
        "#" * (2**20 + 1),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text: str, tmp_path: Path) -> None:
    write(tmp_path, "r.io", text)
    with pytest.raises(InvalidInputError, match=r"hosts\.toml") as caught:
        load_hosts("r.io", tmp_path)
    assert "secret" not in str(caught.value)
