"""File exerciser: `python -m tests.fuse.striped.support.fsx MOUNTED LOCAL SEED COUNT UNIT`.

After Apple's fsx: random operations on one file, within the promises of docs/SEMANTICS.md, on a
mount and on a local file side by side; all reads must return the same bytes. Prints the number of
operations after each, and its history when reads differ. A process of its own, since it uses the
mount.
"""

import errno
import mmap
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest


class Exerciser:
    """Two files with the same operations: `ours` is striped, `theirs` is right."""

    def __init__(self, ours: Path, theirs: Path, seed: int, unit: int) -> None:
        self.paths = (ours, theirs)
        self.numbers = random.Random(seed)
        self.unit = unit
        self.fds: tuple[int, int] | None = None
        self.size = 0
        self.fixed = 0
        """Offset before which bytes may not be changed any more."""
        self.was_synced = False
        self.appends = False
        """Whether the file was opened with O_APPEND: pwrite then ignores its offset on Linux."""
        self.was_there = False
        self.done: Counter[str] = Counter()
        self.log: list[str] = []

    def note(self, what: str, *values: object) -> None:
        self.done[what] += 1
        self.log.append(f"{what} {' '.join(map(str, values))}")

    def some_bytes(self) -> bytes:
        numbers = self.numbers
        most = numbers.choice(
            [1, 100, 5000, self.unit - 1, self.unit, self.unit + 1, 3 * self.unit]
        )
        return numbers.randbytes(numbers.randint(1, most))

    def sent(self) -> int:
        """Return the offset before which full units are sent: each one once another byte follows
        it."""
        if self.fixed:
            return self.size
        return max(0, self.size - 1) // self.unit * self.unit

    # ---- with the file open ---------------------------------------------------------------

    def open(self) -> None:
        flags = self.numbers.choice([os.O_TRUNC, os.O_TRUNC, os.O_APPEND])
        self.note("open", "append" if flags == os.O_APPEND else "anew")
        ours, theirs = (os.open(path, os.O_RDWR | os.O_CREAT | flags) for path in self.paths)
        self.fds = ours, theirs
        self.size = os.fstat(theirs).st_size
        self.fixed = self.size
        self.appends = flags == os.O_APPEND
        self.was_synced = False

    def each(self, call: object, *values: object) -> None:
        assert self.fds is not None
        results = [call(fd, *values) for fd in self.fds]  # type: ignore[operator]
        assert results[0] == results[1], (call, results)

    def append(self) -> None:
        data = self.some_bytes()
        self.note("append", len(data), "at", self.size)
        for fd in self.fds or ():
            at = 0
            os.lseek(fd, 0, os.SEEK_END)
            while at < len(data):
                at += os.write(fd, data[at:])
        self.size += len(data)

    def overwrite(self) -> None:
        first = self.sent()
        if first >= self.size:
            return
        offset = self.numbers.randrange(first, self.size)
        data = self.numbers.randbytes(self.numbers.randint(1, self.size - offset))
        self.note("overwrite", len(data), "at", offset)
        self.each(os.pwrite, data, offset)

    def leave_a_gap(self) -> None:
        gap = self.numbers.randint(1, self.unit // 2)
        data = self.numbers.randbytes(self.numbers.randint(1, 3000))
        self.note("gap", gap, "at", self.size)
        self.each(os.pwrite, data, self.size + gap)
        self.size += gap + len(data)

    def truncate(self) -> None:
        size = self.numbers.choice([0, self.numbers.randint(self.sent(), self.size)])
        self.note("truncate", size)
        self.each(os.ftruncate, size)
        self.size = size
        if not size:
            self.fixed = 0

    def fsync(self) -> None:
        self.note("fsync")
        self.each(os.fsync)
        self.was_synced = True
        self.fixed = self.size
        self.compare_here()

    def compare_here(self) -> None:
        """Compare through the writing descriptor, which sees the published bytes."""
        for _ in range(3):
            offset = self.numbers.randint(0, self.size)
            self.each(os.pread, self.numbers.choice([1, 4096, 2 * self.unit]), offset)
        assert os.fstat((self.fds or (0,))[0]).st_size == self.size

    def refused(self) -> None:
        """Write before the unit that is being filled: refused, and the old file stays."""
        first = self.sent()
        if self.was_synced or self.fixed or not first:
            return
        self.note("refused", self.size)
        before = self.paths[0].read_bytes() if self.was_there else None
        ours, theirs = self.fds or (-1, -1)
        for call in (
            lambda: os.pwrite(ours, b"x", self.numbers.randrange(first)),
            lambda: os.write(ours, b"x"),
            lambda: os.close(ours),
        ):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == errno.EOPNOTSUPP, caught.value
        os.close(theirs)
        self.fds = None
        after = self.paths[0].read_bytes() if before is not None else None
        assert before == after
        if before is None:
            assert not self.paths[0].exists()
            self.paths[1].unlink()
        else:
            self.paths[1].write_bytes(before)

    def close(self) -> None:
        self.note("close", self.size)
        self.each(os.close)
        self.fds = None
        self.was_there = True

    # ---- with the file closed -------------------------------------------------------------

    def compare(self) -> None:
        self.note("compare")
        if not self.was_there:
            return
        ours, theirs = self.paths
        data = theirs.read_bytes()
        assert ours.stat().st_size == len(data), (ours.stat().st_size, len(data))
        with ours.open("rb", buffering=0) as file:
            for _ in range(4):
                offset = self.numbers.randint(0, len(data))
                length = self.numbers.choice([1, 4096, self.unit, 5 * self.unit])
                assert os.pread(file.fileno(), length, offset) == data[offset : offset + length]
            if data:
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                    assert mapped[:] == data
            assert file.read() == data

    def rename_over(self) -> None:
        if not self.was_there:
            return
        self.note("rename")
        for path in self.paths:
            other = path.with_name(path.name + ".old")
            other.write_bytes(b"old" * self.numbers.randint(0, self.unit))
            os.rename(path, other)
            os.rename(other, path)

    def unlink(self) -> None:
        if not self.was_there:
            return
        self.note("unlink")
        data = self.paths[1].read_bytes()
        with self.paths[0].open("rb") as file:
            for path in self.paths:
                path.unlink()
            assert file.read() == data
        self.was_there = False

    def step(self) -> None:
        if self.fds is None:
            weights = {self.open: 5, self.compare: 3, self.rename_over: 1, self.unlink: 1}
        else:
            weights = {
                self.append: 10,
                self.truncate: 1,
                self.fsync: 1,
                self.close: 3,
            }
            if not self.appends:
                weights |= {self.overwrite: 4, self.leave_a_gap: 2, self.refused: 1}
        self.numbers.choices(list(weights), list(weights.values()))[0]()


def main() -> None:
    folder, local, seed, count, unit = sys.argv[1:]
    exerciser = Exerciser(Path(folder) / "fsx", Path(local) / "fsx", int(seed), int(unit))
    try:
        for number in range(1, int(count) + 1):
            exerciser.step()
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
        if exerciser.fds is not None:
            exerciser.close()
        exerciser.compare()
    except BaseException:
        sys.stderr.write("\n".join(exerciser.log[-40:]) + "\n")
        raise
    sys.stdout.write(f"{dict(exerciser.done)}\n")


if __name__ == "__main__":
    main()
