"""Hostile attributes, targets and secrets of pods are refused."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bootseer.errors import BootseerError, InvalidInputError, PermissionDeniedError
from bootseer.kubernetes.csi.attributes import (
    CheckpointVolume,
    EnvironmentVolume,
    ImageVolume,
    check_secrets,
    parse_volume,
    server_variables,
)
from bootseer.kubernetes.csi.service import IDENTITY
from bootseer.kubernetes.pod_stages import start_of_volume
from testbed.mounts.image_mounts import TIMEOUT_S
from testbed.waiting import wait_for
from tests.bootseer.kubernetes.csi.conftest import CAPABILITY, Kubelet, refused

_KEPT = {"kind": "checkpoint", "source": "hdfs://namenode:8020/checkpoints/team"}
_ENVIRONMENT = {"kind": "environment", "environment": "torch"}


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({}, "use one of image, environment, checkpoint"),
        ({"kind": "host"}, "'host'"),
        ({"kind": "image"}, "needs the attribute image"),
        ({"kind": "image", "image": "oci:/etc"}, "write registry://HOST/NAME:TAG"),
        ({"kind": "image", "image": "docker-archive:/x"}, "write registry://"),
        ({"kind": "image", "image": "/etc"}, "write registry://"),
        ({"kind": "image", "image": "registry://h/../x"}, "write registry://"),
        ({"kind": "image", "image": "app:1", "workload": "../x"}, "workload"),
        ({"kind": "image", "image": "app:1", "source": "hdfs://x/y"}, "no attribute 'source'"),
        ({**_ENVIRONMENT, "environment": "../x"}, "not a snapshot's name"),
        ({**_ENVIRONMENT, "writable": "yes"}, "true or false"),
        ({**_ENVIRONMENT, "size": "1GiB"}, "only a writable volume"),
        ({**_ENVIRONMENT, "writable": "true", "size": "12"}, "less than 1MiB"),
        ({**_ENVIRONMENT, "writable": "true", "size": "-1GiB"}, "is not a size"),
        ({**_ENVIRONMENT, "uid": "-1"}, "not the number"),
        ({**_ENVIRONMENT, "gid": "4294967295"}, "not the number"),
        ({**_ENVIRONMENT, "target": "opt"}, "not an absolute path"),
        ({**_ENVIRONMENT, "target": "/opt\n"}, "unprintable"),
        ({**_ENVIRONMENT, "x" * 5000: "y"}, "'xxxx"),
        ({**_ENVIRONMENT, "environment": "x" * 5000}, "too long"),
        ({"kind": "checkpoint"}, "needs the attribute source"),
        ({**_KEPT, "run_dir": "/etc"}, "no attribute 'run_dir'"),
        ({**_KEPT, "allow_other": "true"}, "no attribute 'allow_other'"),
        ({**_KEPT, "uid": "1,run_dir=/etc"}, "uid"),
        ({**_KEPT, "source": "hdfs://n/checkpoints/../../user"}, "has . or .."),
        ({**_KEPT, "source": "hdfs://n/checkpoints/%2e%2e/user"}, "has . or .."),
        ({**_KEPT, "source": "s3://b/x::file:///etc"}, "is a chain of URLs"),
        ({**_KEPT, "source": "simplecache::s3://b/x"}, "is a chain of URLs"),
        ({**_KEPT, "deadline": "nan"}, "deadline=nan"),
        ({**_KEPT, "source": "hdfs://me:secret@n/x"}, "nodePublishSecretRef"),
    ],
)
def test_attributes_that_mean_nothing_are_refused(context: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_volume(context, ())
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        *("file:///etc", "/etc", "etc", "local:///etc", "memory://x", "http://169.254.169.254/x"),
        *("simplecache::file:///etc", "zip://x::file:///etc", "limit+file:///etc", "hdfs://"),
        *("hdfs://n/x?user=root", "arrow_hdfs://n/x", "github://a:b@/", "sftp://localhost/etc"),
    ],
)
def test_a_source_that_is_no_storage_of_the_cluster_is_refused(source: str) -> None:
    with pytest.raises(BootseerError):
        parse_volume({"kind": "checkpoint", "source": source}, ())


def test_sources_may_be_limited() -> None:
    allowed = ("hdfs://namenode:8020/checkpoints/", "file:///mnt/nfs")
    for source in ("hdfs://namenode:8020/checkpoints/team", "file:///mnt/nfs"):
        assert parse_volume({**_KEPT, "source": source}, allowed) == CheckpointVolume(source)
    for source in (
        *("hdfs://namenode:8020/checkpoints-of-others", "hdfs://namenode:8020/", "hdfs://other/"),
        *("file:///mnt/nfs2", "s3://checkpoints"),
        # It may be a link, which a user of that folder has put there.
        "file:///mnt/nfs/a",
    ):
        with pytest.raises(PermissionDeniedError, match="is not below"):
            parse_volume({**_KEPT, "source": source}, allowed)
    chained = "hdfs://namenode:8020/checkpoints/x::file:///etc"
    with pytest.raises(InvalidInputError, match="is a chain of URLs"):
        parse_volume({**_KEPT, "source": chained}, allowed)


def test_a_volume_cannot_have_the_memory_of_all_others() -> None:
    volume = parse_volume({**_KEPT, "memory": "4GiB"}, ())
    assert volume == CheckpointVolume(_KEPT["source"], ("memory=4GiB",))
    with pytest.raises(PermissionDeniedError, match="more than 4GiB"):
        parse_volume({**_KEPT, "memory": "4.1GiB", "read_newest": "true"}, ())


def test_a_volume_cannot_wait_for_its_storage_without_end() -> None:
    volume = parse_volume({**_KEPT, "deadline": "120"}, ())
    assert volume == CheckpointVolume(_KEPT["source"], ("deadline=120",))
    with pytest.raises(PermissionDeniedError, match="more than 120 seconds"):
        parse_volume({**_KEPT, "deadline": "120.5"}, ())


def test_what_a_kubelet_adds_is_no_attribute() -> None:
    told = {
        "csi.storage.k8s.io/ephemeral": "true",
        "csi.storage.k8s.io/pod.name": "train-0",
        "csi.storage.k8s.io/pod.uid": "0b",
        "csi.storage.k8s.io/serviceAccount.tokens": "a secret",
    }
    assert parse_volume({**_ENVIRONMENT, **told}, ()) == EnvironmentVolume("torch")
    image = {"kind": "image", "image": "registry://host:5000/team/app@sha256:0"}
    assert parse_volume({**image, **told}, ()) == ImageVolume(image["image"])
    # Clusters of IPv6 alone, and those that give each namespace users of its own (OpenShift).
    image["image"] = "registry://[fd00::1]:5000/team/app:1"
    assert parse_volume(image, ()) == ImageVolume(image["image"])
    users = {"uid": "1000650000", "gid": "4294967294"}
    owned = EnvironmentVolume("torch", owner=(1000650000, 4294967294))
    assert parse_volume({**_ENVIRONMENT, **users}, ()) == owned
    start = start_of_volume({**told, "job": "../../etc", "attempt": "x", "rank": "3"})
    assert (start.submission, start.attempt, start.rank) == ("0b", 0, 3)
    assert start.job == "etc"


def test_secrets_are_few_and_never_shown() -> None:
    volume = parse_volume(_KEPT, ())
    assert check_secrets(volume, {"HADOOP_USER_NAME": "team"}) == {"HADOOP_USER_NAME": "team"}
    for name in ("LD_PRELOAD", "PYTHONPATH", "PATH", "BOOTSEER_STORE", "X\0"):
        with pytest.raises(InvalidInputError) as caught:
            check_secrets(volume, {name: "hunter2"})
        assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidInputError, match="only volumes of the kind checkpoint"):
        check_secrets(parse_volume(_ENVIRONMENT, ()), {"AWS_REGION": "x"})


def test_secrets_are_not_mixed_with_the_nodes_own() -> None:
    amazon = ("AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL")
    azure = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_CLIENT_SECRET")
    other = ("PATH", "HADOOP_CONF_DIR", "AWS_CA_BUNDLE", "AWS_EC2_METADATA_DISABLED", "AWSOME")
    general = ("FSSPEC_S3_SECRET", "FSSPEC_ABFS_SAS_TOKEN")
    node = (*amazon, *azure, *other, *general)
    for secrets, left_out in (
        ({"AWS_ENDPOINT_URL": "https://mine"}, (*amazon, *general)),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "mine"}, (*azure, *general)),
        ({"HADOOP_USER_NAME": "team"}, ()),
        ({}, ()),
    ):
        found = server_variables(secrets, node)
        assert found == {**dict.fromkeys(left_out), **secrets}


@pytest.mark.needs("mount", "fuse")
def test_a_folder_of_the_node_is_no_image(kubelet: Kubelet) -> None:
    """A command looks up names with a slash in its working directory."""
    assert Path("tests/bootseer").is_dir()
    code, _ = refused(kubelet.publish, "a", {"kind": "image", "image": "tests/bootseer"})
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.needs("mount", "fuse")
def test_publishes_that_wait_leave_room_for_other_calls() -> None:
    """With 16 of them there was no thread left to unpublish, or for the probe."""
    with (
        Kubelet(deadline_s=2 * TIMEOUT_S) as kubelet,
        ThreadPoolExecutor(20) as pods,
        # Connections to it are made, and nobody ever answers.
        socket.create_server(("127.0.0.1", 0), backlog=64) as registry,
    ):
        image = f"registry://127.0.0.1:{registry.getsockname()[1]}/team/app:1"
        context = {"kind": "image", "image": image}
        asked = [pods.submit(refused, kubelet.publish, str(n), context) for n in range(20)]
        wait_for(lambda: sum(one.done() for one in asked) == 8, "a refusal of 8 of 20")
        for code, said in (one.result() for one in asked if one.done()):
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "12 other volumes are being published" in said
        kubelet.unpublish("none")
        assert kubelet.call("Probe", IDENTITY).ready.value
        assert sum(one.done() for one in asked) == 8
        registry.close()
        for one in asked:
            assert one.result()[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.needs("mount", "fuse")
def test_no_path_leads_out_of_the_kubelets_folder(kubelet: Kubelet, tmp_path: Path) -> None:
    kubelet.make_environment("torch", {"a": b"a"})
    (tmp_path / "outside").mkdir()
    (kubelet.folder / "pods").mkdir()
    (kubelet.folder / "pods/link").symlink_to(tmp_path / "outside")
    folder = str(kubelet.folder)
    for target in (
        *("/etc", "/", "etc", f"{folder}/pods/../../x", f"{folder}//pods/x", f"{folder}/./pods/x"),
        *(f"{folder}/pods/link/mount", folder, f"{folder}/pods", f"{folder}-2/pods/x/mount"),
    ):
        fields = {"volume_id": "v", "target_path": target}
        code, said = refused(
            kubelet.call,
            "NodePublishVolume",
            volume_capability=CAPABILITY,
            volume_context=_ENVIRONMENT,
            **fields,
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT, (target, said)
        code, _ = refused(kubelet.call, "NodeUnpublishVolume", **fields)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, target
    assert list((tmp_path / "outside").iterdir()) == []
    assert kubelet.folder.is_dir()


@pytest.mark.needs("mount", "fuse")
def test_other_forms_of_volumes_are_refused(kubelet: Kubelet) -> None:
    for capability, words in (
        ({"block": {}}, "not a block device"),
        ({"mount": {"mount_flags": ["exec"]}}, "as attributes of the volume"),
    ):
        code, said = refused(
            kubelet.call,
            "NodePublishVolume",
            volume_id="v",
            target_path=str(kubelet.target("a")),
            volume_capability=capability,
            volume_context=_ENVIRONMENT,
        )
        assert (code, words in said) == (grpc.StatusCode.INVALID_ARGUMENT, True), said


@pytest.mark.needs("mount", "fuse")
def test_a_server_with_secrets_has_none_of_the_nodes_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stored").mkdir()
    source = (tmp_path / "stored").as_uri()
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the node")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "of the node")
    with Kubelet("--source", source) as kubelet:
        context = {"kind": "checkpoint", "source": source}
        kubelet.publish("a", context, secrets={"AWS_ENDPOINT_URL": "https://mine"})
        (server,) = kubelet.servers()
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert b"AWS_ENDPOINT_URL=https://mine" in environment
        assert b"AZURE_STORAGE_SAS_TOKEN=of the node" in environment
        assert not [one for one in environment if one.startswith(b"AWS_SESSION_TOKEN=")]


@pytest.mark.needs("mount", "fuse")
def test_secrets_reach_no_log_and_no_record(local: Kubelet, tmp_path: Path) -> None:
    (tmp_path / "stored").mkdir()
    context = {"kind": "checkpoint", "source": (tmp_path / "stored").as_uri()}
    secrets = {"HADOOP_USER_NAME": "team", "AWS_SECRET_ACCESS_KEY": "hunter2"}
    local.publish("a", context, secrets=secrets)
    local.publish("b", context)
    assert len(local.servers()) == 2
    (told, _) = local.servers()
    environment = Path(f"/proc/{told.pid}/environ").read_bytes()
    assert b"AWS_SECRET_ACCESS_KEY=hunter2" in environment.split(b"\0")
    code, said = refused(local.publish, "c", context, secrets={"X": "hunter2"})
    assert (code, "hunter2" in said) == (grpc.StatusCode.INVALID_ARGUMENT, False)
    kept = [path for path in local.base.rglob("*") if path.is_file() and not path.is_socket()]
    assert not [path for path in kept if b"hunter2" in path.read_bytes()]
