"""Random choice of the exerciser's operations. Pure: uses a generator and a model."""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.fuse.striped.exerciser.model import Description, Model, Operation

_FILES = ["a", "b", "c", "d/a", "d/b", "e/a", "d/e/a"]
_FILE_WEIGHTS = [8, 5, 2, 4, 2, 2, 1]
_FEW_FILES = [8, 3, 0, 2, 0, 0, 0]
_DIRECTORIES = ["d", "e", "d/e"]
_DIRECTORY_WEIGHTS = [4, 2, 1]
_TRIES = 200
_OPEN_MAX = 5
"""Largest number of files that a process has open."""
_FORKS_MAX = 2
_PLAN_SHARE = 0.5
"""Probability that the next operation begins a plan if none is under way."""
_STEP_SHARE = 0.8
"""Probability that the next operation is the next one of the current plan."""
_CUT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

WEIGHTS: Mapping[str, float] = {
    "open": 20,
    "write": 18,
    "peek": 12,
    "stat": 8,
    "fstat": 6,
    "read": 10,
    "list": 4,
    "close": 12,
    "dup": 2,
    "fsync": 5,
    "ftruncate": 4,
    "truncate": 4,
    "rename": 10,
    "unlink": 4,
    "mkdir": 2,
    "rmdir": 2,
    "map": 5,
    "look": 7,
    "unmap": 2,
    "fork": 3,
    "spawn": 3,
    "exit": 2,
    "kill": 2,
    "restart": 0.25,
}
"""Relative frequency of each kind of operation."""


def _theme(**weights: float) -> Mapping[str, float]:
    return weights


THEMES: Sequence[Mapping[str, float]] = (
    WEIGHTS,
    # Sizes of files that are read while they are written.
    _theme(
        open=20, write=16, ftruncate=8, truncate=8, map=10, look=16, fstat=10, peek=10, close=12
    ),
    # Readers and writers of names that change.
    _theme(open=20, write=12, rename=22, read=16, peek=10, close=8, unlink=3, kill=3, stat=4),
    # Reading back written bytes.
    _theme(open=14, write=22, fsync=14, ftruncate=8, read=24, unlink=7, close=5, rename=3),
    # Processes that inherit the writing descriptor.
    _theme(open=16, write=18, fork=5, spawn=8, dup=4, close=12, exit=3, kill=4, peek=16, fsync=3),
)
"""Weights of sequences; used in turn, so that each kind of fault is found within a minute."""


class Chooser:
    """Draws operations that make sense in the model's state."""

    def __init__(
        self,
        generator: random.Random,
        model: Model,
        weights: Mapping[str, float] = WEIGHTS,
        *,
        has_plans: bool = False,
    ) -> None:
        """With `has_plans`, half of the operations follow plans, each made for one kind of
        fault."""
        self._random = generator
        self._model = model
        self._file_weights = _FILE_WEIGHTS if weights is WEIGHTS else _FEW_FILES
        self._kinds = list(weights)
        self._weights = list(weights.values())
        self._count = 0
        self._plan: Iterator[Operation] = iter(())
        self._is_planned = False
        self._plans_left: list[Callable[[], Iterator[Operation]]] = []
        self._has_plans = has_plans

    def draw(self) -> Operation:
        """Return the next operation."""
        return (self._draw_planned() if self._has_plans else None) or self._draw_any()

    def _draw_planned(self) -> Operation | None:
        if not self._is_planned:
            if self._luck() >= _PLAN_SHARE:
                return None
            self._is_planned, self._plan = True, self._next_plan()
        elif self._luck() >= _STEP_SHARE:
            return None
        operation = next(self._plan, None)
        if operation is not None and self._model.permits(operation):
            return operation
        self._is_planned = False  # at its end, or something else came in between
        return None

    def _next_plan(self) -> Iterator[Operation]:
        """Return the next plan: each one once before any comes again."""
        if not self._plans_left:
            self._plans_left = [
                self._plan_cut,
                self._plan_truncated,
                self._plan_moved,
                self._plan_overwritten,
                self._plan_refused_rename,
                self._plan_removed,
                self._plan_child,
                self._plan_given_up,
            ]
            self._random.shuffle(self._plans_left)
        return self._plans_left.pop()()

    def _draw_any(self) -> Operation:
        for _ in range(_TRIES):
            (do,) = self._random.choices(self._kinds, self._weights)
            operation = getattr(self, f"_{do}")(do)
            if operation is not None and self._model.permits(operation):
                return dict(operation)
        raise AssertionError("no operation is possible")

    # ---- arguments ------------------------------------------------------------------------

    def _who(self) -> str:
        return self._random.choice([one for one in self._model.processes if one[1:] != "0"])

    def _new(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _file(self) -> str:
        return self._random.choices(_FILES, self._file_weights)[0]

    def _written_file(self) -> str:
        """Return a name, every other time that of a file that is being written."""
        names = {one.name for one in self._model.descriptions if one.writer is not None}
        written = sorted(name for name in names if name is not None)
        return self._random.choice(written) if written and self._luck() < 0.5 else self._file()

    def _luck(self) -> float:
        return self._random.random()

    def _directory(self) -> str:
        return self._random.choices(_DIRECTORIES, _DIRECTORY_WEIGHTS)[0]

    def _size(self) -> int:
        unit = self._model.unit_bytes
        sizes = [1, 700, unit - 1, unit, unit + 1, 2 * unit, 3 * unit + 5, 5 * unit + 17]
        return self._random.choice([*sizes, self._random.randint(1, 6 * unit)])

    def _slot(self, who: str) -> tuple[str, Description] | None:
        slots = self._model.slots(who)
        return self._random.choice(sorted(slots.items(), key=lambda s: s[0])) if slots else None

    def _at_slot(self, do: str) -> Operation | None:
        who = self._who()
        found = self._slot(who)
        return {"do": do, "who": who, "slot": found[0]} if found else None

    # ---- operations -----------------------------------------------------------------------

    def _open(self, do: str) -> Operation | None:
        who = self._who()
        if len(self._model.slots(who)) >= _OPEN_MAX:
            return None
        flags = self._random.choice(
            [
                os.O_RDONLY,
                os.O_RDONLY,
                os.O_RDONLY,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                os.O_RDWR | os.O_CREAT | os.O_TRUNC,
                os.O_RDWR | os.O_CREAT,
                os.O_RDWR,
                os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                os.O_RDWR | os.O_APPEND,
                os.O_RDWR | os.O_CREAT | os.O_EXCL,
            ]
        )
        return {
            "do": do, "who": who, "slot": self._new("f"), "path": self._file(), "flags": flags
        }  # fmt: skip

    def _write(self, do: str) -> Operation | None:
        operation = self._at_slot(do)
        if operation is None:
            return None
        one = self._model.slots(operation["who"])[operation["slot"]]
        if not one.writes and self._random.random() < 0.9:
            return None
        offset: int | None = None
        if not one.flags & os.O_APPEND:
            writer = one.writer
            end = writer.size if writer is not None else 0
            if writer is None and one.base is not None:
                end = len(one.base.content)
            offset = end
            luck = self._random.random()
            if writer is not None and writer.announced > len(writer.content):
                offset = len(writer.content)
            elif luck < 0.1:
                offset = self._random.randint(0, end)
            elif luck < 0.15:
                offset = end + self._random.choice([1, 100, self._model.unit_bytes])
        return {
            **operation,
            "offset": offset,
            "size": self._size(),
            "seed": self._random.randrange(2**30),
        }

    def _peek(self, do: str) -> Operation | None:
        # Processes that only read are chosen more often, each on a node of its own.
        looking = [one for one in self._model.processes if one[1:] == "0"]
        who = self._random.choice([*looking, self._who()])
        return {"do": do, "who": who, "path": self._file()}

    def _stat(self, do: str) -> Operation | None:
        operation = self._peek(do)
        if operation is not None and self._random.random() < 0.1:
            operation["path"] = self._directory()
        return operation

    def _list(self, do: str) -> Operation | None:
        path = self._random.choice(["", "", self._directory()])
        return {**(self._peek(do) or {}), "path": path}

    def _range(self, length: int) -> dict[str, int]:
        if self._random.random() < 0.4:
            return {"offset": 0, "length": 2**40}
        offset = self._random.randint(0, length)
        return {"offset": offset, "length": self._random.choice([1, 5000, 200_000])}

    def _fstat(self, do: str) -> Operation | None:
        return self._at_slot(do)

    def _read(self, do: str) -> Operation | None:
        operation = self._at_slot(do)
        if operation is None:
            return None
        one = self._model.slots(operation["who"])[operation["slot"]]
        if not one.reads and self._random.random() < 0.9:
            return None
        length = len(one.generation.content) if one.generation is not None else 0
        if one.writer is not None:
            length = one.writer.size
        return {**operation, **self._range(length)}

    def _close(self, do: str) -> Operation | None:
        return self._at_slot(do)

    def _fsync(self, do: str) -> Operation | None:
        return self._at_slot(do)

    def _dup(self, do: str) -> Operation | None:
        operation = self._at_slot(do)
        return {**operation, "new": self._new("f")} if operation else None

    def _ftruncate(self, do: str) -> Operation | None:
        operation = self._at_slot(do)
        if operation is None:
            return None
        one = self._model.slots(operation["who"])[operation["slot"]]
        if not one.writes:
            return None
        return {**operation, "size": self._new_size(one.writer.size if one.writer else 0)}

    def _new_size(self, size: int) -> int:
        return self._random.choice([0, 0, max(0, size - 1), size, size + 1000, self._size()])

    def _truncate(self, do: str) -> Operation | None:
        path = self._file()
        current = self._model.files.get(path)
        size = self._new_size(len(current.content) if current else 0)
        return {"do": do, "who": self._who(), "path": path, "size": size}

    def _unlink(self, do: str) -> Operation | None:
        return {"do": do, "who": self._who(), "path": self._written_file()}

    def _mkdir(self, do: str) -> Operation | None:
        return {"do": do, "who": self._who(), "path": self._directory()}

    def _rmdir(self, do: str) -> Operation | None:
        return {"do": do, "who": self._who(), "path": self._directory()}

    def _rename(self, do: str) -> Operation | None:
        is_dir = self._random.random() < 0.2
        target_is_file = not is_dir if self._random.random() < 0.9 else is_dir
        return {
            "do": do,
            "who": self._who(),
            "source": self._directory() if is_dir else self._written_file(),
            "target": self._file() if target_is_file else self._directory(),
            "replace": self._random.random() < 0.85,
            "target_is_file": target_is_file,
        }

    def _map(self, do: str) -> Operation | None:
        operation = self._at_slot(do)
        return {**operation, "new": self._new("m")} if operation else None

    def _look(self, do: str) -> Operation | None:
        who = self._who()
        mapped = self._model.mapped(who)
        if not mapped:
            return None
        slot = self._random.choice(sorted(mapped))
        one = mapped[slot]
        length = len(one.generation.content) if one.generation is not None else 0
        return {"do": do, "who": who, "slot": slot, **self._range(length)}

    def _unmap(self, do: str) -> Operation | None:
        who = self._who()
        mapped = sorted(self._model.mapped(who))
        return {"do": do, "who": who, "slot": self._random.choice(mapped)} if mapped else None

    def _fork(self, do: str) -> Operation | None:
        who = self._who()
        forks = sum("." in one for one in self._model.processes)
        if forks >= _FORKS_MAX or "." in who:
            return None
        return {"do": do, "who": who, "child": f"{who}.{self._new('')}"}

    def _spawn(self, do: str) -> Operation | None:
        return {"do": do, "who": self._who(), "inherits": self._random.random() < 0.4}

    def _exit(self, do: str) -> Operation | None:
        return {"do": do, "who": self._who()}

    def _kill(self, do: str) -> Operation | None:
        return {"do": do, "who": self._who()}

    def _restart(self, do: str) -> Operation | None:
        how = self._random.choice(["kill", "kill", "force", "wait"])
        return {"do": do, "mount": self._random.choice(self._model.mounts), "how": how}

    # ---- plans ----------------------------------------------------------------------------

    def _stored(self, who: str, path: str, size: int) -> Iterator[Operation]:
        """Save a file."""
        slot = self._new("f")
        yield {"do": "open", "who": who, "slot": slot, "path": path, "flags": _CUT_FLAGS}
        yield self._written(who, slot, 0, size)
        yield {"do": "close", "who": who, "slot": slot}

    def _written(self, who: str, slot: str, offset: int, size: int) -> Operation:
        seed = self._random.randrange(2**30)
        return {
            "do": "write", "who": who, "slot": slot, "offset": offset, "size": size, "seed": seed
        }  # fmt: skip

    def _several_units(self) -> int:
        return self._random.randint(2 * self._model.unit_bytes, 6 * self._model.unit_bytes)

    def _neighbour(self, who: str) -> str:
        """Return a process of the same mount, possibly the same one."""
        mount = who[0]  # also of one that has ended
        return self._random.choice([p for p, its in self._model.processes.items() if its == mount])

    def _reader(
        self, who: str, path: str, flags: int = os.O_RDONLY
    ) -> tuple[list[Operation], list[Operation]]:
        """Return operations that open and map a file, and operations that read it later."""
        at = {"who": self._neighbour(who), "slot": self._new("f")}
        mapped = {"who": at["who"], "slot": self._new("m")}
        whole = {"offset": 0, "length": 2**40}
        begin: list[Operation] = [{"do": "open", **at, "path": path, "flags": flags}]
        looks: list[Operation] = [{"do": "fstat", **at}, {"do": "read", **at, **whole}]
        if self._luck() < 0.5:
            begin.append({"do": "map", **at, "new": mapped["slot"]})
            looks.append({"do": "look", **mapped, **whole})
        self._random.shuffle(looks)
        return begin, looks

    def _peeks(self, path: str) -> list[Operation]:
        """Return a new reader on each node."""
        found = [{"do": "peek", "who": f"{m}0", "path": path} for m in self._model.mounts]
        self._random.shuffle(found)
        return found

    def _plan_cut(self) -> Iterator[Operation]:
        """Cut a file through a descriptor; read it by other readers and by the descriptor."""
        who, path = self._who(), self._file()
        size = self._several_units()
        yield from self._stored(who, path, size)
        begin, looks = self._reader(who, path)
        yield from begin
        slot = self._new("f")
        yield {"do": "open", "who": who, "slot": slot, "path": path, "flags": os.O_RDWR}
        if self._luck() < 0.7:
            # It then has a generation to add to.
            yield self._written(who, slot, size, 5000)
            if self._luck() < 0.3:
                yield {"do": "fsync", "who": who, "slot": slot}
        yield {"do": "ftruncate", "who": who, "slot": slot, "size": 0}
        yield from looks
        written = self._random.choice([0, 700, size // 2, size - 1])
        if written:
            yield self._written(who, slot, 0, written)
        # No more than the earlier size: only that could be in the answer.
        read = {"do": "read", "who": who, "slot": slot, "offset": 0, "length": 5000}
        yield read
        if self._luck() < 0.5:
            yield {"do": "fsync", "who": who, "slot": slot}
            yield {**read, "length": 2**40}
        yield {"do": "close", "who": who, "slot": slot}
        yield from self._peeks(path)

    def _plan_truncated(self) -> Iterator[Operation]:
        """Cut a file by its name while it is read and mapped."""
        who, path = self._who(), self._file()
        size = self._several_units()
        yield from self._stored(who, path, size)
        begin, looks = self._reader(who, path)
        yield from begin
        new_size = self._random.choice([0, 0, size + 1000])
        yield {"do": "truncate", "who": self._neighbour(who), "path": path, "size": new_size}
        yield from looks
        yield from self._peeks(path)

    def _plan_moved(self) -> Iterator[Operation]:
        """Rename a file, mostly an ordinary one, twice while it is read."""
        who = self._who()
        mover = self._neighbour(who)
        path, other, third = self._random.choice(
            [("a", "b", "a"), ("a", "b", "c"), ("d/a", "d/b", "d/a"), ("a", "d/a", "b")]
        )
        yield from self._stored(who, path, self._random.choice([700, 5000, self._several_units()]))
        # Without O_DIRECT the kernel may read an ordinary file past the server.
        flags = self._random.choice([os.O_RDONLY, os.O_RDONLY | os.O_DIRECT])
        begin, looks = self._reader(who, path, flags)
        yield from begin
        names = {"do": "rename", "who": mover, "replace": True, "target_is_file": True}
        yield {**names, "source": path, "target": other}
        if self._luck() < 0.3:
            yield from looks
        yield {**names, "source": other, "target": third}
        yield from looks
        yield from self._peeks(third)

    def _plan_overwritten(self) -> Iterator[Operation]:
        """Overwrite a file while it is read, to the end or until a refused write."""
        who, path = self._who(), self._file()
        size = self._several_units()
        yield from self._stored(who, path, size)
        begin, looks = self._reader(who, path)
        is_early = self._luck() < 0.5
        if is_early:
            yield from begin
        slot = self._new("f")
        yield {"do": "open", "who": who, "slot": slot, "path": path, "flags": _CUT_FLAGS}
        yield self._written(who, slot, 0, size + self._random.choice([-1000, 70_000]))
        if not is_early:
            yield from begin
        yield {"do": "stat", "who": self._neighbour(who), "path": path}
        yield from looks
        if self._luck() < 0.5:
            yield self._written(who, slot, 0, 700)
            yield from looks
        yield from self._peeks(path)
        yield {"do": "close", "who": who, "slot": slot}
        yield from looks
        yield from self._peeks(path)

    def _plan_refused_rename(self) -> Iterator[Operation]:
        """Try a rename that is impossible while the file is written."""
        who, path = self._who(), self._random.choice(["a", "b", "d/a"])
        target, replace = self._random.choice(
            [("d", True), ("e", True), ("e/a", True), ("c", False), ("d/b", False)]
        )
        yield from self._stored(who, path, self._several_units())
        if not replace:
            yield from self._stored(who, target, 700)
        slot = self._new("f")
        yield {"do": "open", "who": who, "slot": slot, "path": path, "flags": _CUT_FLAGS}
        half = self._several_units()
        yield self._written(who, slot, 0, half)
        names = {"source": path, "target": target, "replace": replace}
        mover = self._neighbour(who)
        yield {"do": "rename", "who": mover, **names, "target_is_file": target not in ("d", "e")}
        yield from self._peeks(path)
        yield self._written(who, slot, half, 5000)
        yield {"do": "close", "who": who, "slot": slot}
        yield from self._peeks(path)

    def _plan_removed(self) -> Iterator[Operation]:
        """Remove or replace a file while it is written, and read it back."""
        who, path = self._who(), self._file()
        slot = self._new("f")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        yield {"do": "open", "who": who, "slot": slot, "path": path, "flags": flags}
        size = self._several_units()
        yield self._written(who, slot, 0, size)
        yield {"do": "unlink", "who": self._neighbour(who), "path": path}
        if self._luck() < 0.5:
            yield self._written(who, slot, size, 5000)
        yield {"do": "fsync", "who": who, "slot": slot}
        yield {"do": "read", "who": who, "slot": slot, "offset": 0, "length": 2**40}
        yield {"do": "close", "who": who, "slot": slot}
        yield from self._peeks(path)

    def _plan_given_up(self) -> Iterator[Operation]:
        """Use a name in a process that could not open the file for writing."""
        who, (path, other) = self._who(), self._random.choice([("a", "b"), ("b", "a")])
        far = self._random.choice(
            [p for p in self._model.processes if p[0] != who[0] and p[1:] != "0"]
        )
        yield from self._stored(far, path, self._random.choice([700, self._several_units()]))
        yield {"do": "peek", "who": who, "path": path}
        yield {"do": "unlink", "who": far, "path": path}
        yield {
            "do": "open", "who": who, "slot": self._new("f"), "path": path, "flags": os.O_WRONLY
        }  # fmt: skip
        yield from self._stored(far, path, self._several_units())
        names = {"source": path, "target": other, "replace": True, "target_is_file": True}
        yield {"do": "rename", "who": who, **names}
        yield from self._stored(self._random.choice([who, far]), path, 5000)
        yield from self._stored(who, path, self._several_units())
        yield from self._peeks(path)
        yield from self._peeks(other)

    def _plan_child(self) -> Iterator[Operation]:
        """Start a child process in the middle of a save, whose writer may die."""
        who, path = self._who(), self._file()
        yield from self._stored(who, path, self._several_units())
        slot = self._new("f")
        yield {"do": "open", "who": who, "slot": slot, "path": path, "flags": _CUT_FLAGS}
        half = self._several_units()
        yield self._written(who, slot, 0, half)
        child = f"{who}.{self._new('')}"
        if "." not in who and self._luck() < 0.5:
            yield {"do": "fork", "who": who, "child": child}
            yield {"do": "exit", "who": child}
        else:
            yield {"do": "spawn", "who": who, "inherits": True}
        yield from self._peeks(path)
        if self._luck() < 0.5:
            yield {"do": "kill", "who": who}
        else:
            yield self._written(who, slot, half, 5000)
            yield {"do": "close", "who": who, "slot": slot}
        yield from self._peeks(path)
