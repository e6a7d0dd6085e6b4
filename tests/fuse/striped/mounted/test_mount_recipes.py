"""Documented ways to mount on nodes: fstab's helper, the systemd unit, Kubernetes manifests."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bootseer.errors import InvalidInputError
from bootseer.fuse.striped.mounted.options import parse_options
from testbed.mounts.fuse_mount import run
from testbed.needs import MissingError
from testbed.paths import REPOSITORY

DOCKER = REPOSITORY / "docker"


def test_mount_options_are_translated() -> None:
    options, run_dir = parse_options(
        [
            "ro,allow_other,_netdev,nofail,x-systemd.automount",
            "memory=1GiB,umask=027,run_dir=/run/x",
        ]
    )
    assert options == {
        "read_only": True,
        "allow_other": True,
        "memory_bytes": 2**30,
        "umask": 0o027,
    }
    assert run_dir == Path("/run/x")
    for bad in ("sync_now", "memory", "memory=many", "umask=9", "allow_other=1"):
        with pytest.raises(InvalidInputError, match=bad):
            parse_options([bad])


@pytest.mark.parametrize(
    "option",
    [
        *("uid=-1", "uid=4294967295", "gid=99999999999", "umask=-1", "umask=1000"),
        *("deadline=0", "deadline=-1", "deadline=nan", "deadline=inf", "deadline=1e9"),
    ],
)
def test_numbers_that_the_kernel_or_a_clock_does_not_take_are_refused(option: str) -> None:
    with pytest.raises(InvalidInputError, match="it is not from"):
        parse_options([option])


def test_every_mount_option_is_documented() -> None:
    text = (REPOSITORY / "docs" / "mounting.md").read_text(encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        parse_options(["nonsense"])
    for name in str(caught.value).partition("there are ")[2].split(", "):
        assert f"`{name}" in text, name


FSTAB = """
set -eu
mkdir {tmp}/sbin
printf '#!/bin/sh\\nexec %s -m bootseer.cli.mount_helper "$@"\\n' {python} \\
    > {tmp}/sbin/mount.bootseer
chmod 755 {tmp}/sbin/mount.bootseer
sbin=$(readlink -f /sbin)
mount -t overlay -o lowerdir={tmp}/sbin:$sbin none $sbin
options=run_dir={tmp}/run,memory=128MiB,umask=077,_netdev
echo "{tmp}/stored {mnt} bootseer $options 0 0" > {tmp}/fstab
mount --fstab {tmp}/fstab {mnt}
grep -q "{mnt} fuse.bootseer-stripe rw" /proc/self/mounts
echo hello > {mnt}/f
test "$(stat -c %a {mnt}/f)" = 600
umount {mnt}
! mount -t bootseer {tmp}/stored {mnt} -o nonsense 2> {tmp}/err
grep -q "nonsense" {tmp}/err
mount -t bootseer -o ro,run_dir={tmp}/run {tmp}/stored {mnt}
grep -q hello {mnt}/f
! touch {mnt}/g 2> /dev/null
umount {mnt}
"""


@pytest.mark.needs("mount", "fuse", programs=["unshare"])
def test_a_line_of_fstab_mounts(tmp_path: Path, mountpoint: Path) -> None:
    probe = f"d=$(mktemp -d); mount -t overlay -o lowerdir=$d:{tmp_path} none $d"
    if subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True).returncode:
        raise MissingError(
            "overlays cannot be mounted here, to put the helper where mount(8) looks"
        )
    text = FSTAB.format(tmp=tmp_path, mnt=mountpoint, python=sys.executable)
    # The server ends with its mount: nothing outlives the namespace.
    done = run(["unshare", "-m", "--propagation", "private", "sh", "-c", text], deadline_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "stored" / "f").read_text() == "hello\n"


def test_the_systemd_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        raise MissingError("needs systemd-analyze")
    unit = (DOCKER / "systemd" / "bootseer-checkpoints@.service").read_text(encoding="utf-8")
    # systemd-analyze checks that the programs exist.
    program = tmp_path / "bootseer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    place = tmp_path / "bootseer-checkpoints@.service"
    place.write_text(unit.replace("/opt/bootseer/bin/bootseer", str(program)))
    instance = tmp_path / "bootseer-checkpoints@main.service"
    instance.symlink_to(place)
    done = run([analyze, "verify", "--man=no", str(instance)])
    ours = [line for line in done.stderr.splitlines() if "bootseer-checkpoints" in line]
    assert done.returncode == 0, done.stderr
    assert not ours


def manifests() -> list[Path]:
    return sorted((DOCKER / "kubernetes").glob("checkpoints-*.yaml"))


def test_mounts_propagate_from_the_one_that_mounts_to_those_that_use_it() -> None:
    for path in manifests():
        containers: list[dict[str, Any]] = []
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document["kind"] not in ("DaemonSet", "Job"):
                continue
            pod = document["spec"]["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
                containers.append(container)
        ways = {}
        for container in containers:
            (shared,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/mnt"]
            ways[shared["mountPropagation"]] = container
            # Without a mount, a trainer must not write to the node's disk.
            assert shared.get("readOnly", False) == (shared["mountPropagation"] != "Bidirectional")
        assert set(ways) == {"Bidirectional", "HostToContainer"}
        assert ways["Bidirectional"]["securityContext"]["privileged"]
        assert not ways["HostToContainer"].get("securityContext", {}).get("privileged")


def test_no_hook_unmounts_checkpoints_while_a_trainer_saves() -> None:
    """A kubelet runs a sidecar's `preStop` at once; SIGTERM comes after the trainer's end."""
    for path in manifests():
        text = path.read_text(encoding="utf-8")
        pods = [
            document["spec"]["template"]["spec"]
            for document in yaml.safe_load_all(text)
            if document["kind"] in ("DaemonSet", "Job")
        ]
        for pod in pods:
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                assert "lifecycle" not in container
                words = container["command"]
                timeouts = [word for word in words if word.startswith("--timeout=")]
                for timeout in timeouts:
                    assert int(timeout.partition("=")[2]) < pod["terminationGracePeriodSeconds"]
