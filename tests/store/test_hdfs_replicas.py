"""Which DataNode is read from: evenly, and not the one that is slow or away."""

from bootseer.store.hdfs_replicas import Replica, Replicas
from bootseer.store.opened import Attempt

A, B, C = (("10.0.0.1", 9866), ("10.0.0.2", 9866), ("10.0.0.3", 9866))
HERE = (Replica(A), Replica(B))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_one_with_the_fewest_reads_is_chosen() -> None:
    replicas = Replicas()
    first, second = Attempt(), Attempt()
    assert replicas.begin(HERE, first) == A
    assert replicas.begin(HERE, second) == B
    assert replicas.begin((Replica(B), Replica(C)), Attempt()) == C
    replicas.end(B, second)
    assert replicas.begin(HERE, Attempt()) == B


def test_what_is_late_is_asked_for_elsewhere_and_so_is_what_comes_next() -> None:
    clock = Clock()
    replicas = Replicas(clock)
    late = Attempt()
    assert replicas.begin(HERE, late) == A
    late.is_late = True
    assert [replicas.begin(HERE, Attempt()) for _ in range(3)] == [B, B, B]
    replicas.end(A, late)
    clock.now_s = 59.0
    assert replicas.begin(HERE, Attempt()) == B
    assert replicas.begin((Replica(A),), Attempt()) == A, "rather slowly than not at all"
    clock.now_s = 61.0
    assert replicas.begin(HERE, Attempt()) == A


def test_one_that_failed_is_left_alone_for_a_while() -> None:
    clock = Clock()
    replicas = Replicas(clock)
    replicas.failed(A)
    assert [replicas.begin(HERE, Attempt()) for _ in range(2)] == [B, B]
    assert replicas.begin((Replica(A),), Attempt()) is None
    assert replicas.begin((), Attempt()) is None
    clock.now_s = 61.0
    assert replicas.begin((Replica(A),), Attempt()) == A


def test_one_in_another_rack_is_for_when_the_near_one_is_slow() -> None:
    replicas = Replicas()
    apart = (Replica(A), Replica(B, is_far=True))
    attempts = [Attempt(), Attempt()]
    assert [replicas.begin(apart, attempt) for attempt in attempts] == [A, A]
    attempts[0].is_late = True
    assert replicas.begin(apart, Attempt()) == B
