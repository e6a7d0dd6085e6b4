"""Choice of the DataNode to read from: by speed, and none that is down."""

from bootseer.store.hdfs.namenode import Address, Replica
from bootseer.store.hdfs.reading import ReplicaChooser
from bootseer.transfer.attempt import Attempt

A, B, C = (("10.0.0.1", 9866), ("10.0.0.2", 9866), ("10.0.0.3", 9866))
HERE = (Replica(A), Replica(B))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_one_with_the_fewest_reads_is_chosen() -> None:
    replicas = ReplicaChooser()
    first, second = Attempt(), Attempt()
    assert replicas.begin(HERE, first) == A
    assert replicas.begin(HERE, second) == B
    assert replicas.begin((Replica(B), Replica(C)), Attempt()) == C
    replicas.end(B, second)
    assert replicas.begin(HERE, Attempt()) == B


def _read(replicas: ReplicaChooser, clock: Clock, address: Address, seconds: float) -> None:
    """Record a read of 1 MiB from a DataNode that takes `seconds`."""
    attempt = Attempt()
    assert replicas.begin((Replica(address),), attempt) == address
    clock.now_s += seconds
    attempt.done_bytes = 1 << 20
    replicas.end(address, attempt)


def test_one_that_is_slower_gets_as_much_less() -> None:
    clock = Clock()
    replicas = ReplicaChooser(clock)
    _read(replicas, clock, A, 10.0)
    _read(replicas, clock, B, 1.0)
    _read(replicas, clock, C, 1.2)
    chosen = [replicas.begin(HERE, Attempt()) for _ in range(11)]
    assert chosen.count(A) == 1
    assert chosen[0] == B
    assert replicas.begin((Replica(A),), Attempt()) == A, "rather slowly than not at all"
    assert [replicas.begin((Replica(C), Replica(A)), Attempt()) for _ in range(3)] == [C, C, C]


def test_those_that_differ_little_are_read_from_evenly() -> None:
    clock = Clock()
    replicas = ReplicaChooser(clock)
    _read(replicas, clock, A, 2.0)
    _read(replicas, clock, B, 1.0)
    assert [replicas.begin(HERE, Attempt()) for _ in range(4)] == [A, B, A, B]


def test_what_does_not_come_is_asked_for_elsewhere_and_so_is_what_comes_next() -> None:
    clock = Clock()
    replicas = ReplicaChooser(clock)
    _read(replicas, clock, B, 0.03)
    stuck = Attempt()
    assert replicas.begin(HERE, stuck) == A
    clock.now_s += 1.0
    assert [replicas.begin(HERE, Attempt()) for _ in range(5)] == [B] * 5
    stuck.give_up()
    replicas.end(A, stuck)
    assert replicas.begin(HERE, Attempt()) == B
    clock.now_s += 61.0
    assert replicas.begin(HERE, Attempt()) == A, "it has a new chance"


def test_what_was_given_up_early_does_not_look_fast() -> None:
    clock = Clock()
    replicas = ReplicaChooser(clock)
    _read(replicas, clock, B, 1.0)
    _read(replicas, clock, A, 20.0)
    stopped = Attempt()
    assert replicas.begin((Replica(A),), stopped) == A
    stopped.give_up()
    replicas.end(A, stopped)
    assert [replicas.begin(HERE, Attempt()) for _ in range(3)] == [B, B, B]


def test_one_whose_bytes_waited_once_is_soon_read_again() -> None:
    """Regression: it served nothing for a minute, so that the others had more to do."""
    clock = Clock()
    replicas = ReplicaChooser(clock)
    _read(replicas, clock, A, 0.03)
    _read(replicas, clock, B, 0.03)
    waited_s = []
    for _ in range(7):
        late = Attempt()
        assert replicas.begin((Replica(A),), late) == A
        clock.now_s += 0.5
        late.give_up()
        replicas.end(A, late)
        given_up_s = clock.now_s
        while replicas.begin(HERE, attempt := Attempt()) == B:
            replicas.end(B, attempt)
            _read(replicas, clock, B, 0.03)
            clock.now_s += 0.47
        replicas.end(A, attempt)
        waited_s.append(clock.now_s - given_up_s)
    assert waited_s[0] < 3
    assert waited_s == sorted(waited_s), "the longer, the more often it was late"
    assert 30 < waited_s[-1] < 61
    _read(replicas, clock, A, 0.03)
    assert replicas.begin(HERE, Attempt()) in (A, B)


def test_equals_take_turns() -> None:
    """Regression: beside a slow one, the busiest of seven served a quarter more than its share."""
    replicas = ReplicaChooser()
    chosen = []
    for _ in range(4):
        address = replicas.begin(HERE, attempt := Attempt())
        assert address is not None
        replicas.end(address, attempt)
        chosen.append(address)
    assert chosen == [A, B, A, B]


def test_one_that_failed_is_left_alone_for_a_while() -> None:
    clock = Clock()
    replicas = ReplicaChooser(clock)
    replicas.failed(A)
    assert [replicas.begin(HERE, Attempt()) for _ in range(2)] == [B, B]
    assert replicas.begin((Replica(A),), Attempt()) is None
    assert replicas.begin((), Attempt()) is None
    clock.now_s = 61.0
    assert replicas.begin((Replica(A),), Attempt()) == A


def test_one_in_another_rack_is_for_when_the_near_one_has_much_to_do() -> None:
    replicas = ReplicaChooser()
    apart = (Replica(A), Replica(B, is_far=True))
    assert [replicas.begin(apart, Attempt()) for _ in range(6)] == [A, A, A, A, B, A]
