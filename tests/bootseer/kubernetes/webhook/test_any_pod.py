"""For any pod, the patch applies, removes nothing, and needs no second patch."""

import json
import posixpath
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bootseer.kubernetes.webhook.plan import ANNOTATIONS, CHECKPOINT, Cluster
from tests.bootseer.kubernetes.webhook.pod_objects import patched, planned, response_to, review_of
from tests.bootseer.kubernetes.webhook.restricted import violations

_NAMES = st.sampled_from(
    ("data", "bootseer-environment", "bootseer-checkpoint", "BOOTSEER_JOB", "RANK", "PATH")
)
_PATHS = st.sampled_from(("/mnt/checkpoints", "/opt/environment/", "/opt/environment", "/x", "/"))
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_VALUES = st.one_of(
    st.sampled_from(
        ("auto", "off", "required", "", "hdfs://n/c", "file:///$(A)", "env-1", "/", "/mnt/a")
    ),
    _TEXT,
)
_VARIABLE = st.fixed_dictionaries(
    {"name": _NAMES}, optional={"value": _TEXT, "valueFrom": st.just({"fieldRef": {}})}
)
_MOUNTS = st.lists(
    st.fixed_dictionaries({"name": _NAMES, "mountPath": _PATHS}),
    max_size=3,
    unique_by=lambda mount: str(mount["mountPath"]),
)


def _or_null(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


_CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from("abc")},
    optional={
        "image": _TEXT,
        "env": _or_null(st.lists(_VARIABLE, max_size=3)),
        "envFrom": _or_null(st.lists(st.just({"configMapRef": {"name": "x"}}), max_size=1)),
        "volumeMounts": _or_null(_MOUNTS),
        "volumeDevices": st.just([{"name": "d", "devicePath": "/dev/x"}]),
    },
)
_CSI = {
    "driver": "csi.bootseer.io",
    "readOnly": True,
    "volumeAttributes": {"kind": "environment", "environment": "env-1"},
}
_VOLUMES = st.lists(
    st.fixed_dictionaries(
        {"name": _NAMES}, optional={"emptyDir": st.just({}), "csi": st.just(_CSI)}
    ),
    max_size=3,
    unique_by=lambda volume: str(volume["name"]),
)
_OWNER = st.fixed_dictionaries(
    {"kind": st.sampled_from(("Job", "StatefulSet", "ReplicaSet", "RayCluster")), "uid": _TEXT},
    optional={"name": _TEXT, "controller": _or_null(st.booleans())},
)
_KEYS = st.sampled_from(
    (
        *ANNOTATIONS,
        *("bootseer.io/checkpoint-path", "bootseer.io/environment-path"),
        *("io.containerd.cri.runtime-handler", "job-name", "jobset.sigs.k8s.io/jobset-name"),
        *("bootseer.io/warnings", "kubernetes.io/config.mirror", "volcano.sh/task-index"),
    )
)
_PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                "name": _TEXT,
                "annotations": _or_null(st.dictionaries(_KEYS, _VALUES, max_size=5)),
                "labels": _or_null(st.dictionaries(_KEYS, _VALUES, max_size=4)),
                "ownerReferences": _or_null(st.lists(_OWNER, max_size=2)),
            },
        ),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(_CONTAINER, min_size=1, max_size=2)},
            optional={
                "initContainers": _or_null(st.lists(_CONTAINER, max_size=2)),
                "volumes": _or_null(_VOLUMES),
                "runtimeClassName": st.sampled_from(("", "bootseer", "gvisor")),
                "hostUsers": _or_null(st.booleans()),
                "unknown": st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=2)),
            },
        ),
    }
)
_CLUSTERS = st.builds(
    Cluster,
    has_driver=st.booleans(),
    handler=st.sampled_from(("", "bootseer")),
    store_url=st.sampled_from(("", "hdfs://n/s")),
)


@given(_PODS, _CLUSTERS)
def test_a_patch_only_adds_and_a_second_one_is_empty(pod: dict[str, Any], found: Cluster) -> None:
    after = patched(pod, found)
    again = planned(after, found)
    assert not again.patch
    assert again.warnings == planned(pod, found).warnings
    _check_valid(pod, after)
    _check_kept(pod, after)
    # A pod that a namespace allows, as one that is `restricted`, it allows afterwards.
    assert violations(after) <= violations(pod)


@given(_PODS, _CLUSTERS)
def test_pods_without_annotations_come_back_untouched(pod: dict[str, Any], found: Cluster) -> None:
    annotations = pod["metadata"].get("annotations") or {}
    pod["metadata"]["annotations"] = {
        name: value for name, value in annotations.items() if name not in ANNOTATIONS
    }
    (pod["metadata"].get("labels") or {}).pop(CHECKPOINT, None)
    response = response_to(review_of(pod), found)
    assert response.keys() == {"uid", "allowed", "apiVersion"}


@given(_PODS, _CLUSTERS)
def test_a_pod_is_refused_only_where_its_label_requires_a_folder(
    pod: dict[str, Any], found: Cluster
) -> None:
    response = response_to(review_of(pod), found)
    (pod["metadata"].get("labels") or {}).pop(CHECKPOINT, None)
    after = response_to(review_of(pod), found)
    assert after["allowed"]
    if not response["allowed"]:
        # A folder that every container would have is no reason.
        assert not planned(pod, found).has_checkpoint


@given(
    st.recursive(
        st.one_of(st.none(), st.text(), st.integers()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    (
                        "metadata",
                        "spec",
                        "annotations",
                        "containers",
                        "env",
                        "name",
                        "bootseer.io/replay",
                    )
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=20,
    )
)
def test_objects_that_are_no_pods_are_allowed(document: Any) -> None:
    response = response_to(review_of(document))
    assert response["allowed"] is True
    json.dumps(response)


def _check_valid(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Assert the API server's rules for the added parts (validation.go)."""
    volumes = [volume["name"] for volume in after["spec"].get("volumes") or ()]
    assert len(volumes) == len(set(volumes))
    for kind in ("containers", "initContainers"):
        for place, container in enumerate(after["spec"].get(kind) or ()):
            mounts = container.get("volumeMounts") or []
            paths = [mount["mountPath"] for mount in mounts]
            assert len(paths) == len(set(paths))
            old = before["spec"][kind][place].get("volumeMounts") or []
            for mount in mounts[len(old) :]:
                assert mount["name"] in volumes
                assert posixpath.isabs(mount["mountPath"])
                assert ":" not in mount["mountPath"]
            new = (container.get("env") or [])[len(before["spec"][kind][place].get("env") or []) :]
            for variable in new:
                assert ("value" in variable) != ("valueFrom" in variable)


def _check_kept(before: Any, after: Any) -> None:
    """Assert that nothing was removed, and that lists only grew at their ends."""
    if isinstance(before, dict):
        for name, value in before.items():
            if value is not None and name not in ("runtimeClassName", "bootseer.io/warnings"):
                _check_kept(value, after[name])
    elif isinstance(before, list):
        assert len(after) >= len(before)
        for one, other in zip(before, after, strict=False):
            _check_kept(one, other)
    else:
        assert before == after
