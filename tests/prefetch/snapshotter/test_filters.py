"""Filters of lists have containerd's meaning."""

import pytest

from bootseer.errors import InvalidInputError
from bootseer.prefetch.snapshotter.snapshot import Snapshot, SnapshotKind, any_of

LABELS = {"containerd.io/snapshot.ref": "sha256:aa", "plain": "x y", "empty": ""}
SNAPSHOT = Snapshot(1, "k8s.io/4/one", "k8s.io/3/zero", SnapshotKind.COMMITTED, LABELS, 0, 0)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("", True),
        ("kind==committed", True),
        ("kind==active", False),
        ("kind!=active,name==k8s.io/4/one", True),
        ("kind!=active,name==other", False),
        ('labels."containerd.io/snapshot.ref"==sha256:aa,parent=="k8s.io/3/zero"', True),
        ('labels."containerd.io/snapshot.ref"==sha256:aa,parent==""', False),
        ('labels.plain=="x y"', True),
        ("labels.plain", True),
        ("labels.empty", True),
        ("labels.absent", False),
        ("labels.absent!=x", True),
        ('name~="^k8s[.]io/"', True),
        ("name~=zero", False),
        ("labels.absent~=.*", False),
        ("other==x", False),
    ],
)
def test_a_filter_accepts_as_containerds(text: str, accepted: bool) -> None:
    assert any_of([text])(SNAPSHOT) is accepted


def test_one_of_several_is_enough_and_none_accept_all() -> None:
    assert any_of(["kind==view", "kind==committed"])(SNAPSHOT)
    assert any_of([])(SNAPSHOT)


@pytest.mark.parametrize(
    "text",
    ["==", "kind=", "kind==a b", 'name=="open', "name~=[", "kind==a,,", "x" * 9000, 'name=="\\q"'],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        any_of([text])
