"""Processes of containers, derived from untrusted images as docker derives them."""

from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError, NotFoundError, SetupFailedError
from bootseer.prefetch.container.process import (
    DEFAULT_PATH,
    ProcessSpec,
    User,
    arguments_of,
    find_program,
    image_environment,
    job_environment,
    resolve_user,
)
from bootseer.prefetch.container.root import Bind, parse_bind
from bootseer.prefetch.container.runc import BOUND_SYSFS, DeviceNode, runtime_config
from bootseer.prefetch.index.records import ImageConfig


def config(**changes: object) -> ImageConfig:
    plain: dict[str, object] = {
        "env": (),
        "entrypoint": (),
        "cmd": (),
        "working_dir": "",
        "user": "",
        "architecture": "amd64",
        "diff_ids": (),
    }
    return ImageConfig(**{**plain, **changes})  # type: ignore[arg-type]


def test_a_command_replaces_cmd_but_not_the_entrypoint() -> None:
    image = config(entrypoint=("/entry", "-x"), cmd=("serve",))
    assert arguments_of(image, ()) == ("/entry", "-x", "serve")
    assert arguments_of(image, ("train", "1")) == ("/entry", "-x", "train", "1")
    assert arguments_of(image, ("x",), "/other") == ("/other", "x")
    assert arguments_of(image, ("x",), "") == ("x",)
    # As in docker, CMD belongs to the entrypoint that it came with.
    assert arguments_of(image, (), "/other") == ("/other",)
    for nothing in (config(), None), (image, ""):
        with pytest.raises(InvalidInputError, match="no command"):
            arguments_of(nothing[0], (), nothing[1])


def test_a_jobs_environment_is_the_launchers_without_the_hosts_files() -> None:
    host = {
        "RANK": "3",
        "MASTER_ADDR": "n1",
        "PATH": "/host/bin",
        "PYTHONPATH": "/host",
        "LD_LIBRARY_PATH": "/host/lib",
        "XDG_RUNTIME_DIR": "/run/user/0",
        "CUDA": "host",
    }
    found = job_environment(config(env=("CUDA=12", "EMPTY=", "PATH=/opt/bin")), host)
    assert found == {
        "RANK": "3",
        "MASTER_ADDR": "n1",
        "CUDA": "12",
        "EMPTY": "",
        "PATH": "/opt/bin",
    }
    assert image_environment(config()) == {"PATH": DEFAULT_PATH}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nweb:x:33:34::/srv:/bin/sh\nodd:x:abc:0::/:\nshort:x\n"
    )
    (root / "etc/group").write_text("root:x:0:\nweb:x:34:\nlogs:x:50:adm,web\n")
    return root


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("", User(0, 0, (), "/root")),
        ("web", User(33, 34, (50,), "/srv")),
        ("33", User(33, 34, (50,), "/srv")),
        ("web:logs", User(33, 50, (), "/srv")),
        ("1234", User(1234, 0, (), "/")),
        ("1234:99", User(1234, 99, (), "/")),
    ],
)
def test_users_are_looked_up_in_the_image(root: Path, text: str, user: User) -> None:
    assert resolve_user(root, text) == user


@pytest.mark.parametrize("text", ["nobody", "web:none", "odd", "4294967295", "-1"])
def test_users_that_do_not_exist(root: Path, text: str) -> None:
    with pytest.raises(InvalidInputError):
        resolve_user(root, text)


def test_a_missing_or_odd_passwd_knows_numbers_only(root: Path) -> None:
    (root / "etc/passwd").unlink()
    assert resolve_user(root, "7") == User(7, 0, (), "/")
    (root / "etc/passwd").mkdir()
    assert resolve_user(root, "") == User(0, 0, (), "/")


def test_binds_are_parsed_and_checked(tmp_path: Path) -> None:
    assert parse_bind(f"{tmp_path}:/data") == Bind(tmp_path, "/data")
    assert parse_bind(f"{tmp_path}:/data:ro") == Bind(tmp_path, "/data", True)
    for text in ("x", f"{tmp_path}:data", f"{tmp_path}:/data:rx", ":/data"):
        with pytest.raises(InvalidInputError, match="not a bind"):
            parse_bind(text)
    with pytest.raises(NotFoundError):
        parse_bind(f"{tmp_path}/missing:/data")


def test_programs_are_found_as_execvp_finds_them(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a/tool").write_text("")
    (tmp_path / "a/tool").chmod(0o644)
    path = f"{tmp_path}/a:{tmp_path}/b"

    def found(name: str, folder: str = "/") -> str:
        return find_program(ProcessSpec((name,), {"PATH": path}, folder, User(0, 0, (), "/")))

    with pytest.raises(SetupFailedError, match="may not execute tool") as refused:
        found("tool")
    assert refused.value.exit_code == 126
    (tmp_path / "b/tool").write_text("")
    (tmp_path / "b/tool").chmod(0o755)
    assert found("tool") == f"{tmp_path}/b/tool"
    assert found("b/tool", str(tmp_path)) == f"{tmp_path}/b/tool"
    with pytest.raises(SetupFailedError, match="no command") as missing:
        found("other")
    assert missing.value.exit_code == 127


def test_runtime_configuration() -> None:
    spec = ProcessSpec(("x", "y"), {"A": "1"}, "/w", User(5, 6, (7,), "/"))
    found = runtime_config(
        spec,
        "/r",
        [Bind(Path("/s"), "/t", True)],
        [DeviceNode("c", 10, 229)],
        terminal=True,
        sysfs=BOUND_SYSFS,
    )
    assert found["process"]["args"] == ["x", "y"]
    assert found["process"]["env"] == ["A=1"]
    assert found["process"]["user"] == {"uid": 5, "gid": 6, "additionalGids": [7]}
    assert found["mounts"][-1] == {
        "destination": "/t",
        "type": "bind",
        "source": "/s",
        "options": ["rbind", "rprivate", "ro"],
    }
    # Not recursively, since mounts below the host's /sys, such as cgroups, would be writable.
    (system,) = [one for one in found["mounts"] if one["destination"] == "/sys"]
    assert system["options"] == ["bind", "nosuid", "noexec", "nodev", "ro"]
    # The list of containerd and Docker; a container reads none of these on any kernel.
    assert set(found["linux"]["maskedPaths"]) == {
        *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
        *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
        *("/sys/devices/virtual/powercap", "/sys/firmware"),
    }
    assert set(found["linux"]["readonlyPaths"]) == {
        *("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"),
        "/sys/fs/cgroup",
    }
    kinds = [namespace["type"] for namespace in found["linux"]["namespaces"]]
    assert "network" not in kinds
    assert "pid" in kinds
