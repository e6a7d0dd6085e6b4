"""In-memory model of a checkpoint tree that several nodes have mounted.

Pure: no I/O, and the time is an argument. `Model.apply` takes one operation and the real mount's
answer, raises `DeviationError` if docs/SEMANTICS.md does not allow that answer, and changes the
model's state accordingly. Where the page leaves a choice (a write that may be refused, a name that
may be a second old), the model allows every possibility and believes the answer. Results that only
a reader of the storage can find out are in `Model.open_questions` until `answer` is called.
"""

import errno
import hashlib
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

STALE_S = 1.0
"""Largest age of names and attributes that another node has changed."""
GRACE_S = 29.0
"""Time after which a reader of a file that another node replaced may get EIO; a second less than
promised."""

Operation = dict[str, Any]
Answer = dict[str, Any]


class DeviationError(AssertionError):
    """Answer of the mount that docs/SEMANTICS.md does not allow."""


@dataclass(eq=False)
class Generation:
    """Content of a name from one replacement to the next."""

    content: bytes
    is_striped: bool | None
    """Whether it is striped; None where the page leaves it open."""


@dataclass(eq=False)
class Writer:
    """Writes through one open file description."""

    content: bytearray
    base: Generation | None = None
    """Generation to which the writer adds."""
    published: Generation | None = None
    unsure_before: int = 0
    """Writes and truncations before this offset may be refused."""
    sent: int = 0
    """Reads before this offset may be refused until the next publication."""
    unchanged: int = 0
    """Number of first bytes that equal the stored ones, and so can be read back."""
    is_aligned: bool = True
    """Whether units are sent from the file's beginning, so that `sent` is known."""
    announced: int = 0
    is_dirty: bool = True
    wrote: set[str] = field(default_factory=set)
    """Processes that have changed something since the last publication."""
    errors: frozenset[int] = frozenset()
    """If not empty, the writer has failed, and each later call fails with one of these."""
    doubts: frozenset[int] = frozenset()
    """Errors with which the writer may have failed without a call that could report them."""
    is_detached: bool = False
    was_killed: bool = False
    """Whether a writing process was killed while another one had a copy of the descriptor."""
    was_restarted: bool = False
    may_be_published: bool = False
    """Whether everything written may be published already, unseen."""

    @property
    def size(self) -> int:
        return max(len(self.content), self.announced)

    def bytes_at(self, offset: int, length: int) -> bytes:
        whole = bytes(self.content).ljust(self.size, b"\0")
        return whole[offset : offset + length]


@dataclass(eq=False)
class Description:
    """Open file description: one open(2), and all copies of its descriptor."""

    mount: str
    name: str | None
    """Name that is written through it; None if the name is gone."""
    flags: int
    generation: Generation | None = None
    """Generation that it reads."""
    writer: Writer | None = None
    base: Generation | None = None
    """Generation to which it will add, before its first write."""
    holders: set[tuple[str, str]] = field(default_factory=set)
    maps: set[tuple[str, str]] = field(default_factory=set)
    made_the_name: bool = False
    found_no_file: bool = False
    """Whether no file was stored when it was opened, so that it may have made the name."""
    was_flushed: bool = False
    """Whether a copy was closed and nothing was written since."""
    is_superseded: bool | None = False
    """Whether it only emptied the file, and another writer has opened or made the file since; None
    where the page leaves it open."""
    refused: frozenset[int] = frozenset()
    """Errors with which its first write was refused; it has never begun to write."""
    lost_s: float | None = None
    """Time at which another node replaced, removed or renamed the file that it reads."""

    @property
    def reads(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def is_unfinished(self) -> bool:
        writer = self.writer
        return (
            writer is not None and writer.is_dirty and not writer.errors and not writer.is_detached
        )

    @property
    def has_unsaved_bytes(self) -> bool:
        """Return whether bytes are not saved, also of a file without a name."""
        return self.writer is not None and bool(self.writer.wrote) and not self.writer.errors

    @property
    def only_empties(self) -> bool:
        return self.is_unfinished and self.writer is not None and not self.writer.wrote

    @property
    def is_late(self) -> bool:
        """Return whether it could only empty a file that another writer has opened since."""
        return self.is_superseded is True and self.may_be_late

    @property
    def may_be_late(self) -> bool:
        """Return whether `is_late` is true, or the page leaves it open."""
        # A writer that empties the file itself since then publishes the empty file.
        is_cut = self.writer is not None and self.writer.may_be_published
        return self.only_empties and self.is_superseded is not False and not is_cut


@dataclass
class _Past:
    """Name as it was before a change."""

    until_s: float
    mount: str
    """Mount that has changed it."""
    path: str
    was: Generation | str | None
    """Earlier content of the name; "dir" for a directory."""


def content(seed: int, size: int) -> bytes:
    """Return the bytes that an operation with this seed writes."""
    return random.Random(seed).randbytes(size)


def described(data: bytes) -> list[Any]:
    """Return a worker's description of bytes that it has read."""
    return [len(data), hashlib.blake2b(data, digest_size=16).hexdigest()]


def parent_of(path: str) -> str:
    """Return the directory part of a path, "" for the root."""
    return path.rpartition("/")[0]


class Model:
    """Names, generations and open files, as every node must see them."""

    def __init__(self, mounts: Iterable[str], unit_bytes: int) -> None:
        self.mounts = tuple(mounts)
        self.unit_bytes = unit_bytes
        self.files: dict[str, Generation] = {}
        self.dirs: set[str] = {""}
        self.processes: dict[str, str] = {}
        """Mount of each living process by name."""
        self.descriptions: list[Description] = []
        self.open_questions: dict[str, list[tuple[Generation, Description]]] = {}
        """Names whose content the last operation may or may not have changed."""
        self.needs_releases: set[str] = set()
        """Mounts whose server must know of closed files before the next answer is exact."""
        self._past: list[_Past] = []
        self._begun_s = self._ended_s = 0.0

    # ---- for who chooses operations -------------------------------------------------------

    def slots(self, who: str) -> dict[str, Description]:
        """Return the open descriptors of a process."""
        return {
            slot: one for one in self.descriptions for holder, slot in one.holders if holder == who
        }

    def mapped(self, who: str) -> dict[str, Description]:
        """Return the mappings of a process."""
        return {
            slot: one for one in self.descriptions for holder, slot in one.maps if holder == who
        }

    def open_count(self, mount: str) -> int:
        """Return the number of open files of a mount."""
        return sum(one.mount == mount for one in self.descriptions)

    def at(self, mount: str, path: str) -> list[Description]:
        """Return the open files of a mount that write, or will write, a name."""
        return [
            one
            for one in self.descriptions
            if one.mount == mount and one.writes and one.name == path
        ]

    def children(self, path: str) -> set[str]:
        """Return the names in a directory that every node sees."""
        start = path + "/" if path else ""
        return {
            name[len(start) :]
            for name in (*self.files, *self.dirs)
            if name.startswith(start) and name != path and "/" not in name[len(start) :]
        }

    def permits(self, operation: Operation) -> bool:
        """Return whether the operation makes sense now, and the page defines its result."""
        do, who = operation["do"], operation.get("who", "")
        if do == "restart":
            return True
        if who not in self.processes:
            return False
        mount, slot = self.processes[who], operation.get("slot")
        slots = self.slots(who)
        if do == "open":
            return slot not in slots and self._may_open(mount, operation)
        if do in ("look", "unmap"):
            one = self.mapped(who).get(slot or "")
            # A page that cannot be read ends the process.
            return one is not None and (do == "unmap" or not self._reading_errors(one))
        if do == "map":
            one = slots.get(slot or "")
            return (
                one is not None
                and not one.writes
                and one.generation is not None
                and len(one.generation.content) > 0
                and operation["new"] not in self.mapped(who)
            )
        if do == "dup":
            return slot in slots and operation["new"] not in slots
        if do == "write":
            one = slots.get(slot or "")
            return one is not None and (not one.writes or operation["size"] > 0)
        if do == "ftruncate" and slot in slots and operation["size"] == 0:
            # It is not defined whether this changes an empty file.
            one = slots[slot]
            return one.writer is not None or one.base is None or len(one.base.content) > 0
        if slot is not None:
            return slot in slots
        if do == "fork":
            return operation["child"] not in self.processes
        if do == "truncate":
            return not self.at(mount, operation["path"]) and operation["path"] not in self.dirs
        if do == "mkdir":
            return parent_of(operation["path"]) in self.dirs
        if do in ("rename", "rmdir", "unlink"):
            return self._may_change(mount, operation)
        return True

    def _may_open(self, mount: str, operation: Operation) -> bool:
        path = operation["path"]
        if path in self.dirs:
            return False
        if parent_of(path) not in self.dirs and operation["flags"] & os.O_CREAT:
            # For another node the folder may still exist for a second.
            return False
        writes = operation["flags"] & os.O_ACCMODE != os.O_RDONLY
        return not writes or not any(
            one.only_empties and one.was_flushed and not one.is_late for one in self.at(mount, path)
        )

    def _may_change(self, mount: str, operation: Operation) -> bool:
        """Return whether the page defines the result of changing `directory`.

        It does not for folders in which another node has files open, and for names of several
        unfinished files.
        """
        if operation["do"] == "unlink":
            return operation["path"] not in self.dirs
        if operation["do"] == "rmdir":
            return not self._others_inside(mount, operation["path"])
        source, target = operation["source"], operation["target"]
        unfinished = [one for one in self.at(mount, source) if one.is_unfinished]
        if any(one.writer is not None and one.writer.was_killed for one in unfinished):
            # It depends on the closing process whether it is published.
            return False
        if any(one.may_be_late and not one.is_late for one in unfinished):
            return False
        if unfinished and source not in self.files and all(one.is_late for one in unfinished):
            return False
        if target not in self.files and target not in self.dirs:
            # Files and folders never get each other's names.
            is_file_name = source not in self.dirs
            if is_file_name != operation["target_is_file"]:
                return False
            if parent_of(target) not in self.dirs:
                return False
        moves_directories = source in self.dirs or target in self.dirs
        if moves_directories and any(self._others_inside(mount, d) for d in (source, target)):
            return False
        moving = [one for one in self.at(mount, source) if one.writer is not None]
        return len(moving) <= 1 and not any(
            one.writer is not None and (one.writer.errors or self._stale(one) != {False})
            for one in moving
        )

    def _others_inside(self, mount: str, directory: str) -> bool:
        """Return whether another node has a file of the directory open, removed files included."""
        return any(
            one.mount != mount and (one.name is None or one.name.startswith(directory + "/"))
            for one in self.descriptions
        )

    # ---- applying -------------------------------------------------------------------------

    def apply(
        self, operation: Operation, answer: Answer, begun_s: float = 0.0, ended_s: float = 0.0
    ) -> None:
        """Judge the answer to an operation, and change the state. Raises: DeviationError."""
        self._begun_s, self._ended_s = begun_s, ended_s
        arguments = {name: value for name, value in operation.items() if name != "do"}
        if "died" in answer and operation["do"] not in ("kill", "exit"):
            raise DeviationError(f"the process died with {answer['died']}")
        getattr(self, f"_do_{operation['do']}")(answer, **arguments)

    def answer(self, path: str, answer: Answer) -> None:
        """Use the result of a `peek` at the storage for an open question. Raises:
        DeviationError."""
        asked = self.open_questions.pop(path)
        current = self.files.get(path)
        if current is None:
            is_unchanged = answer.get("errno") == errno.ENOENT
        else:
            is_unchanged = _shows(answer, current.content)
        if is_unchanged:
            if len(asked) == 1 and asked[0][0].content != (current and current.content):
                assert asked[0][1].writer is not None
                asked[0][1].writer.may_be_published = False
            return
        for generation, one in asked:
            if _shows(answer, generation.content):
                self._replace(one.mount, path, generation)
                self._note_published(one, generation)
                return
        choices = [current, *(generation for generation, _ in asked)]
        raise DeviationError(f"{path} is none of what it may be: {answer}, {_sizes(choices)}")

    # ---- judging --------------------------------------------------------------------------

    def _refused(
        self, answer: Answer, errors: Iterable[int] = (), *, must_fail: bool = False
    ) -> bool:
        """Return whether the call was refused with an allowed error. Raises: DeviationError."""
        allowed = sorted(set(errors))
        names = [errno.errorcode[code] for code in allowed]
        if "errno" not in answer:
            if must_fail:
                raise DeviationError(f"succeeded with {answer.get('ok')!r}; expected {names}")
            return False
        if answer["errno"] not in allowed:
            got = errno.errorcode.get(answer["errno"], answer["errno"])
            raise DeviationError(
                f"failed with {got}; expected {'' if must_fail else 'success or '}{names}"
            )
        return True

    def _expect_value(self, answer: Answer, allowed: Iterable[Any], what: str) -> None:
        choices = list(allowed)
        if answer["ok"] not in choices:
            raise DeviationError(f"{what} is {answer['ok']!r}; expected one of {choices!r}")

    def _local(self, mount: str, path: str) -> set[bool]:
        """Return whether an unpublished name exists in a mount: one answer, or both."""
        found: set[bool] = set()
        for one in self.at(mount, path):
            if one.writer is None:
                continue
            writer = one.writer
            is_sure = one.made_the_name and not (
                writer.errors or writer.was_killed or writer.was_restarted or not writer.is_dirty
            )
            found.add(True)
            if is_sure:
                return {True}
        return found | {False}

    def _exists(self, mount: str, path: str) -> set[bool]:
        return {True} if path in self.files else self._local(mount, path)

    def _were(self, mount: str, path: str) -> Iterator[Generation | str | None]:
        """Yield everything that a name may still be for a node."""
        yield from (past.was for past in self._recent(mount) if past.path == path)

    def _recent(self, mount: str) -> Iterator[_Past]:
        """Yield the changes that a node may not have seen yet."""
        for past in self._past:
            if past.mount != mount and self._begun_s <= past.until_s + STALE_S:
                yield past

    def _stale(self, one: Description) -> set[bool]:
        """Return whether the file that a writer adds to was replaced: one answer, or both."""
        writer = one.writer
        base = writer.base if writer is not None else one.base
        if (writer is not None and writer.is_detached) or one.name is None:
            return {False}
        current = self.files.get(one.name)
        if writer is not None and writer.published is not None:
            if current is writer.published:
                return {False}
            return {True} if base is not None else {True, False}
        if base is None or current is base:
            return {False}
        return {True}

    # ---- changes --------------------------------------------------------------------------

    def _replace(self, mount: str, path: str, new: Generation | None) -> None:
        old = self.files.get(path)
        self._past = [p for p in self._past if p.until_s + STALE_S >= self._begun_s]
        self._past.append(_Past(self._ended_s, mount, path, old))
        if new is None:
            self.files.pop(path, None)
        else:
            self.files[path] = new
            for one in self.descriptions:
                if one.name == path:
                    one.made_the_name = False
        if old is None or old is new:
            return
        for one in self.descriptions:
            holds = one.generation is old or one.base is old
            if one.writer is not None:
                holds = holds or old in (one.writer.base, one.writer.published)
            if holds and one.mount != mount and one.lost_s is None:
                one.lost_s = self._begun_s

    def _note_published(self, one: Description, generation: Generation) -> None:
        writer = one.writer
        assert writer is not None
        writer.published = generation
        writer.content = bytearray(generation.content)
        writer.announced = 0
        writer.is_dirty = writer.was_killed = writer.may_be_published = False
        writer.wrote.clear()
        writer.sent = 0
        writer.unchanged = len(generation.content)
        if generation.is_striped is not False:
            writer.unsure_before = len(generation.content)
            writer.is_aligned = False

    def _made(self, writer: Writer) -> Generation:
        data = bytes(writer.content).ljust(writer.size, b"\0")
        is_striped: bool | None = len(data) > self.unit_bytes
        origin = writer.published or writer.base
        if not is_striped and (writer.unsure_before or (origin and origin.is_striped is not False)):
            is_striped = None
        return Generation(data, is_striped)

    def _publish(self, one: Description) -> None:
        writer = one.writer
        assert writer is not None
        if not writer.is_dirty or writer.is_detached or one.name is None:
            if writer.is_detached:
                writer.sent = 0
                writer.wrote.clear()
                if len(writer.content) > self.unit_bytes:
                    # The announced bytes are zeros now.
                    writer.content += bytes(writer.size - len(writer.content))
                    writer.unsure_before, writer.is_aligned = len(writer.content), False
            return
        generation = self._made(writer)
        if writer.wrote and writer.base is None:
            for other in self.at(one.mount, one.name):
                # Who made the name without O_TRUNC empties nothing that is published since.
                if other.only_empties and (other.was_flushed or not other.flags & os.O_TRUNC):
                    other.is_superseded = True
        self._replace(one.mount, one.name, generation)
        self._note_published(one, generation)

    def _ask(self, one: Description) -> None:
        """Leave it to a read of the storage whether this was published."""
        writer = one.writer
        assert writer is not None
        if one.name is None or writer.is_detached:
            return
        writer.may_be_published = True
        self.open_questions.setdefault(one.name, []).append((self._made(writer), one))

    def _publishing_errors(self, one: Description) -> tuple[set[int], bool]:
        """Return the errors with which a publication may end, and whether it must fail."""
        writer = one.writer
        assert writer is not None
        if writer.errors:
            return set(writer.errors), True
        is_gap_too_large = self._is_gap_too_large(writer)
        if writer.is_detached and is_gap_too_large and len(writer.content) > self.unit_bytes:
            # The bytes of a nameless file are stored, to be read back.
            return {errno.EOPNOTSUPP, *writer.doubts}, False
        if not writer.is_dirty or writer.is_detached:
            return set(writer.doubts), False
        if is_gap_too_large:
            return {errno.EOPNOTSUPP}, True
        stale = self._stale(one)
        errors = {errno.ESTALE} if True in stale else set()
        return errors | writer.doubts, False not in stale

    def _is_gap_too_large(self, writer: Writer) -> bool:
        """Return whether the announced size exceeds the written bytes by more than is filled with
        zeros."""
        return writer.announced - len(writer.content) > self.unit_bytes

    def _fail(self, writer: Writer, *codes: int) -> None:
        writer.errors = frozenset(codes)

    # ---- opening and closing --------------------------------------------------------------

    def _do_open(self, answer: Answer, who: str, slot: str, path: str, flags: int) -> None:
        mount = self.processes[who]
        exists = self._exists(mount, path)
        if parent_of(path) not in self.dirs:
            self._refused(answer, {errno.ENOENT}, must_fail=True)
            return
        if flags & os.O_CREAT and flags & os.O_EXCL:
            is_stale = any(was is not None for was in self._were(mount, path))
            errors = {errno.EEXIST} if True in exists or is_stale else set()
            must_fail = False not in exists
        elif flags & os.O_CREAT:
            errors, must_fail = set(), False
        else:
            errors, must_fail = {errno.ENOENT} if False in exists else set(), True not in exists
        if self._refused(answer, errors, must_fail=must_fail):
            return
        current = self.files.get(path)
        one = Description(mount, path, flags, holders={(who, slot)})
        if one.writes:
            is_anew = self._is_made_anew(mount, path, flags)
            for other in self.at(mount, path):
                if flags & os.O_TRUNC or is_anew:
                    other.is_superseded = True
                elif is_anew is None:
                    other.is_superseded = other.is_superseded or None
            if current is None or flags & os.O_TRUNC:
                one.writer = Writer(bytearray())
                # Without O_TRUNC it does not empty a file that another writer is about to publish.
                if not flags & os.O_TRUNC and not is_anew:
                    one.is_superseded = None if is_anew is None else True
                one.made_the_name = current is None and one.is_superseded is False
                one.found_no_file = current is None
            else:
                one.base = current
        if one.writer is None:
            one.generation = current
        self.descriptions.append(one)

    def _is_made_anew(self, mount: str, path: str, flags: int) -> bool | None:
        """Return whether an open has made the name in its mount; None where that is left open."""
        if not flags & os.O_CREAT or self._exists(mount, path) == {True}:
            return False
        may_be_held = any(one.found_no_file for one in self.at(mount, path))
        return True if flags & os.O_EXCL or not may_be_held else None

    def _do_dup(self, answer: Answer, who: str, slot: str, new: str) -> None:
        self._refused(answer)
        self.slots(who)[slot].holders.add((who, new))

    def _do_close(self, answer: Answer, who: str, slot: str) -> None:
        one = self.slots(who)[slot]
        errors, must_fail = self._close_errors(one, who)
        failed = self._refused(answer, errors, must_fail=must_fail)
        self._drop(one, {(who, slot)}, who, code=answer["errno"] if failed else None)

    def _close_errors(self, one: Description, who: str) -> tuple[set[int], bool]:
        writer = one.writer
        if writer is None:
            return set(one.refused), False
        if not writer.errors and who not in writer.wrote:
            return set(writer.doubts), False
        errors, must_fail = self._publishing_errors(one)
        if writer.wrote - {who}:
            must_fail = must_fail and bool(writer.errors)
        return errors, must_fail

    def _drop(
        self,
        one: Description,
        holders: set[tuple[str, str]],
        who: str,
        *,
        code: int | None = None,
        is_killed: bool = False,
        is_settled: bool = False,
    ) -> None:
        """Close the descriptors of a process; `is_settled`: the published content is known."""
        had_closed = one.was_flushed
        one.holders -= holders
        one.was_flushed = True
        writer = one.writer
        is_last = not one.holders and not one.maps
        if writer is not None:
            if code is not None:
                self._fail(writer, code)
            if not is_last and is_killed:
                writer.was_killed |= who in writer.wrote or one.only_empties
                # A process that looks the name up before others go on writing does not find it.
                one.made_the_name &= not writer.was_killed
            elif is_killed and is_last:
                if one.is_unfinished and had_closed and who not in writer.wrote:
                    self._ask(one)  # others have finished with it
            elif not is_settled and not writer.errors:
                self._closed(one, writer, who, is_last=is_last)
            if is_last:
                self.needs_releases.add(one.mount)
        if is_last:
            self.descriptions.remove(one)
            for other in self.at(one.mount, one.name or ""):
                # It is not promised whether an unpublished name is visible then.
                other.made_the_name = False

    def _closed(self, one: Description, writer: Writer, who: str, *, is_last: bool) -> None:
        if writer.may_be_published:
            self._ask(one)
        elif who in writer.wrote and not writer.wrote - {who} and not writer.was_killed:
            self._publish(one)
        elif not writer.is_dirty or not (writer.wrote or is_last):
            return
        elif who in writer.wrote or (is_last and (writer.was_killed or self._unsure(one))):
            self._ask(one)
        elif is_last:
            # No call can report a failure then.
            if self._publishing_errors(one)[0]:
                self._ask(one)
            else:
                self._publish(one)

    def _unsure(self, one: Description) -> bool:
        assert one.writer is not None
        return one.is_superseded is not False or one.writer.was_restarted

    # ---- writing --------------------------------------------------------------------------

    def _begin_writing(self, one: Description, *, is_empty: bool = False) -> set[int]:
        """Make the writer of a file that is opened for adding; return the errors that this may
        give."""
        if one.writer is not None:
            # A new server reads the file to which the writer adds when the writer goes on.
            may_be_stale = one.writer.was_restarted and True in self._stale(one)
            return {errno.ESTALE} if may_be_stale else set()
        base = one.base
        stale = True in self._stale(one) or one.lost_s is not None
        if is_empty or base is None:
            one.writer = Writer(bytearray(), is_dirty=False)
        else:
            length = len(base.content)
            unsure = 0 if base.is_striped is False else length
            one.writer = Writer(bytearray(base.content), base, unsure_before=unsure, is_dirty=False)
            one.writer.is_aligned = base.is_striped is False
            one.writer.unchanged = length
        if one.name is None:
            one.writer.is_detached = True
        return {errno.EIO, errno.ESTALE} if stale else set()

    def _do_write(
        self, answer: Answer, who: str, slot: str, offset: int | None, size: int, seed: int
    ) -> None:
        one = self.slots(who)[slot]
        if not one.writes:
            self._refused(answer, {errno.EBADF}, must_fail=True)
            return
        had_writer = one.writer is not None
        errors = self._begin_writing(one)
        writer = one.writer
        assert writer is not None
        if writer.errors:
            self._refused(answer, writer.errors, must_fail=True)
            return
        errors = errors | writer.doubts
        at = writer.size if offset is None else offset
        gap = at - len(writer.content)
        if at < writer.unsure_before or gap > self.unit_bytes:
            errors = errors | {errno.EOPNOTSUPP}
        if self._refused(answer, errors):
            self._fail(writer, answer["errno"])
            if not had_writer and answer["errno"] in (errno.EIO, errno.ESTALE):
                one.writer, one.refused = None, one.refused | {answer["errno"]}
            return
        if answer["ok"] != size:
            raise DeviationError(f"{answer['ok']} of {size} bytes were written")
        data = content(seed, size)
        writer.unchanged = min(writer.unchanged, at)
        writer.content += bytes(max(0, gap))
        writer.content[at : at + size] = data
        self._changed(one, who)
        while len(writer.content) - writer.sent > self.unit_bytes:
            writer.sent += self.unit_bytes
        if not writer.is_aligned:
            writer.sent = len(writer.content)
        writer.unsure_before = max(writer.unsure_before, writer.sent)

    def _changed(self, one: Description, who: str) -> None:
        assert one.writer is not None
        one.writer.is_dirty = True
        one.writer.may_be_published = one.writer.was_killed = False
        one.writer.wrote.add(who)
        one.was_flushed = False

    def _do_ftruncate(self, answer: Answer, who: str, slot: str, size: int) -> None:
        one = self.slots(who)[slot]
        if not one.writes:
            self._refused(answer, {errno.EBADF, errno.EINVAL}, must_fail=True)
            return
        had_writer = one.writer is not None
        was = len(one.base.content) if one.base is not None else 0
        errors = self._begin_writing(one, is_empty=size == 0)
        writer = one.writer
        assert writer is not None
        if writer.errors:
            self._refused(answer, writer.errors, must_fail=True)
            return
        errors = errors | writer.doubts
        if size and size < min(writer.unsure_before, writer.size):
            errors = errors | {errno.EOPNOTSUPP}
        if self._refused(answer, errors):
            if answer["errno"] != errno.EOPNOTSUPP:
                self._fail(writer, answer["errno"])
            if not had_writer:
                one.writer, one.refused = None, one.refused | {answer["errno"]}
            return
        if size == writer.size and (had_writer or size == was):
            is_new = writer.is_dirty or not had_writer
            if size == 0 and is_new and not (writer.may_be_published or writer.was_restarted):
                # An unpublished file that was emptied is certainly empty.
                self._changed(one, who)
                return
            # It is not defined whether this is a change.
            writer.may_be_published |= writer.is_dirty
            return
        if size == 0:
            writer.content.clear()
            writer.base = None
            if writer.published is not None:
                # From here on it is a new file, which replaces any file of the name.
                writer.published = None
            writer.unsure_before = writer.sent = writer.announced = writer.unchanged = 0
            writer.is_aligned = True
        else:
            del writer.content[size:]
            writer.announced = size
            writer.unchanged = min(writer.unchanged, size)
            writer.sent = min(writer.sent, len(writer.content))
        self._changed(one, who)

    def _do_truncate(self, answer: Answer, who: str, path: str, size: int) -> None:
        mount = self.processes[who]
        current = self.files.get(path)
        if current is None:
            exists = self._local(mount, path)
            self._refused(answer, {errno.ENOENT}, must_fail=True not in exists)
            return
        length = len(current.content)
        is_refused = (size < length and size and current.is_striped is not False) or (
            size - length > self.unit_bytes
        )
        if self._refused(answer, {errno.EOPNOTSUPP} if is_refused else set()):
            return
        if size != length:
            data = current.content[:size].ljust(size, b"\0")
            writer = Writer(bytearray(data), current if size else None)
            self._replace(mount, path, self._made(writer))

    def _do_fsync(self, answer: Answer, who: str, slot: str) -> None:
        one = self.slots(who)[slot]
        if one.writer is None:
            self._refused(answer, one.refused)
            return
        if one.is_late:
            self._refused(answer)
            return
        errors, must_fail = self._publishing_errors(one)
        if self._refused(answer, errors, must_fail=must_fail):
            self._fail(one.writer, answer["errno"])
            return
        if one.writer.may_be_published or one.may_be_late:
            self._ask(one)
        else:
            self._publish(one)

    # ---- reading --------------------------------------------------------------------------

    def _sizes_here(self, mount: str, path: str) -> set[int]:
        """Return the sizes that a name may have on the node that writes it."""
        return {one.writer.size for one in self.at(mount, path) if one.writer is not None} | (
            {0} if self._local(mount, path) != {False} and path not in self.files else set()
        )

    def _do_stat(self, answer: Answer, who: str, path: str) -> None:
        mount = self.processes[who]
        if path in self.dirs:
            was_not = any(was != "dir" for was in self._were(mount, path))
            self._refused(answer, {errno.ENOENT} if was_not else set())
            return
        exists = self._exists(mount, path)
        were = list(self._were(mount, path))
        errors = {errno.ENOENT} if False in exists or None in were else set()
        must_fail = True not in exists and not any(was is not None for was in were)
        if self._refused(answer, errors, must_fail=must_fail):
            return
        if "dir" in were:
            return
        sizes = self._sizes_here(mount, path)
        sizes |= {len(was.content) for was in were if isinstance(was, Generation)}
        if path in self.files:
            sizes.add(len(self.files[path].content))
        self._expect_value(answer, sorted(sizes), "the size")

    def _do_peek(self, answer: Answer, who: str, path: str) -> None:
        mount = self.processes[who]
        current = self.files.get(path)
        if current is not None:
            self._refused(answer)
            self._expect_shown(answer, [current.content])
            return
        local = self._local(mount, path)
        errors = {errno.ENOENT} if False in local else set()
        if self._refused(answer, errors, must_fail=True not in local):
            return
        writers = [one.writer for one in self.at(mount, path) if one.writer is not None]
        failed = {errno.EOPNOTSUPP}.union(*(writer.errors for writer in writers))
        if answer["ok"].get("errno") not in failed:
            self._expect_shown(answer, self._unpublished(mount, path))

    def _unpublished(self, mount: str, path: str) -> list[bytes]:
        """Return the contents that a file which no other node sees may have here."""
        writers = [one.writer for one in self.at(mount, path) if one.writer is not None]
        return [b"", *(writer.bytes_at(0, writer.size) for writer in writers)]

    def _expect_shown(self, answer: Answer, allowed: list[bytes]) -> None:
        if any(_shows(answer, data) for data in allowed):
            return
        raise DeviationError(f"it shows {answer['ok']}; expected {_sizes(allowed)}")

    def _do_fstat(self, answer: Answer, who: str, slot: str) -> None:
        one = self.slots(who)[slot]
        self._refused(answer)
        if one.writer is not None:
            writer = one.writer
            if not (writer.errors or writer.was_restarted or writer.was_killed):
                sizes = [writer.size]
                if one.may_be_late:
                    # It is not defined whether this will empty it.
                    sizes += self._stored_sizes(one.name)
                self._expect_value(answer, sizes, "the size")
        elif one.generation is not None:
            self._expect_value(answer, [len(one.generation.content)], "the size")

    def _stored_sizes(self, path: str | None) -> list[int]:
        return [len(self.files[path].content)] if path in self.files else []

    def _do_read(self, answer: Answer, who: str, slot: str, offset: int, length: int) -> None:
        one = self.slots(who)[slot]
        if not one.reads:
            self._refused(answer, {errno.EBADF}, must_fail=True)
            return
        writer = one.writer
        if writer is not None:
            self._read_back(answer, one, writer, offset, length)
            return
        if one.generation is None:
            return
        if not self._refused(answer, self._reading_errors(one) | one.refused):
            data = one.generation.content[offset : offset + length]
            self._expect_value(answer, [described(data)], "what is read")

    def _read_back(
        self, answer: Answer, one: Description, writer: Writer, offset: int, length: int
    ) -> None:
        if writer.errors:
            return
        data = writer.bytes_at(offset, length)
        errors = self._reading_errors(one) | writer.doubts | one.refused
        if writer.is_dirty and offset < writer.sent and writer.unchanged < writer.sent:
            errors = errors | {errno.EOPNOTSUPP}
        if writer.was_restarted and writer.is_detached:
            errors = errors | {errno.ESTALE, errno.EOPNOTSUPP}
        if not self._refused(answer, errors):
            self._expect_value(answer, [described(data)], "what is read back")

    def _reading_errors(self, one: Description) -> set[int]:
        if one.lost_s is None:
            return set()
        origins = [one.generation]
        if one.writer is not None:
            origins += [one.writer.base, one.writer.published]
        # An ordinary file is reached by its name only.
        is_ordinary = any(held is not None and held.is_striped is not True for held in origins)
        return {errno.EIO} if is_ordinary or self._ended_s > one.lost_s + GRACE_S else set()

    def _do_map(self, answer: Answer, who: str, slot: str, new: str) -> None:
        one = self.slots(who)[slot]
        assert one.generation is not None
        self._refused(answer)
        self._expect_value(answer, [len(one.generation.content)], "the length")
        one.maps.add((who, new))

    def _do_look(self, answer: Answer, who: str, slot: str, offset: int, length: int) -> None:
        one = self.mapped(who)[slot]
        assert one.generation is not None
        self._refused(answer)
        data = one.generation.content[offset : offset + length]
        self._expect_value(answer, [described(data)], "what is mapped")

    def _do_unmap(self, answer: Answer, who: str, slot: str) -> None:
        one = self.mapped(who)[slot]
        self._refused(answer)
        one.maps.discard((who, slot))
        if not one.maps and not one.holders:
            self.descriptions.remove(one)

    def _do_list(self, answer: Answer, who: str, path: str) -> None:
        mount = self.processes[who]
        if path not in self.dirs:
            was = "dir" in self._were(mount, path)
            self._refused(answer, {errno.ENOENT}, must_fail=not was)
            return
        if self._refused(answer, {errno.ENOENT} if None in self._were(mount, path) else set()):
            return
        start = path + "/" if path else ""
        sure = self.children(path)
        maybe: set[str] = set()
        for one in self.descriptions:
            name = one.name
            if one.mount != mount or not one.writes or name is None or parent_of(name) != path:
                continue
            if name not in self.files:
                exists = self._local(mount, name)
                (sure if exists == {True} else maybe).add(name[len(start) :])
        for past in self._recent(mount):
            if past.path and parent_of(past.path) == path:
                maybe.add(past.path[len(start) :])
        shown = set(answer["ok"])
        if not sure - maybe <= shown <= sure | maybe:
            raise DeviationError(f"the names are {sorted(shown)}; expected {sorted(sure)}")

    # ---- names ----------------------------------------------------------------------------

    def _detach(self, one: Description) -> None:
        """Note that the written name is gone, or another file's now."""
        if one.writer is None and one.base is not None:
            # If that was replaced before, the first write may report so.
            doubts = self._begin_writing(one)
            assert one.writer is not None
            one.writer.doubts |= doubts
        if one.writer is not None:
            one.writer.is_detached = True
        one.name = None

    def _do_unlink(self, answer: Answer, who: str, path: str) -> None:
        mount = self.processes[who]
        exists = self._exists(mount, path)
        errors = {errno.ENOENT} if False in exists else set()
        if self._refused(answer, errors, must_fail=True not in exists):
            return
        for one in self.at(mount, path):
            self._detach(one)
        if path in self.files:
            self._replace(mount, path, None)

    def _do_mkdir(self, answer: Answer, who: str, path: str) -> None:
        mount = self.processes[who]
        if parent_of(path) not in self.dirs:
            self._refused(answer, {errno.ENOENT}, must_fail=True)
            return
        exists = path in self.dirs or path in self.files
        stale = any(was is not None for was in self._were(mount, path))
        errors = {errno.EEXIST} if exists or stale else set()
        if not self._refused(answer, errors, must_fail=exists):
            self._past.append(_Past(self._ended_s, mount, path, None))
            self.dirs.add(path)

    def _do_rmdir(self, answer: Answer, who: str, path: str) -> None:
        mount = self.processes[who]
        if path not in self.dirs:
            self._refused(answer, {errno.ENOENT}, must_fail=True)
            return
        unfinished = [
            self._local(mount, one.name)
            for one in self.descriptions
            if one.mount == mount and one.writes and one.name and parent_of(one.name) == path
        ]
        local = any(True in exists for exists in unfinished)
        must_fail = bool(self.children(path)) or {True} in unfinished
        may_fail = must_fail or local or self._may_have_nameless_parts(mount)
        errors = {errno.ENOTEMPTY} if may_fail else set()
        if not self._refused(answer, errors, must_fail=must_fail):
            self._past.append(_Past(self._ended_s, mount, path, "dir"))
            self.dirs.discard(path)

    def _do_rename(
        self,
        answer: Answer,
        who: str,
        source: str,
        target: str,
        replace: bool,
        target_is_file: bool,
    ) -> None:
        mount = self.processes[who]
        is_dir = source in self.dirs
        exists = {True} if is_dir else self._exists(mount, source)
        if source == target:
            self._refused(answer, {errno.ENOENT, errno.EEXIST})
            return
        errors, must_fail = self._renaming_errors(mount, source, target, is_dir, replace)
        if False in exists:
            errors = errors | {errno.ENOENT}
            must_fail = must_fail or True not in exists
        stale = [*self._were(mount, source), *self._were(mount, target)]
        if stale:
            # The kernel and the mount decide by their own knowledge of both names.
            errors |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY}
        if self._refused(answer, errors, must_fail=must_fail):
            return
        if is_dir:
            self._move_directory(mount, source, target)
        else:
            self._move_file(mount, source, target)

    def _renaming_errors(
        self, mount: str, source: str, target: str, is_dir: bool, replace: bool
    ) -> tuple[set[int], bool]:
        errors: set[int] = set()
        if not replace and (target in self.dirs or target in self.files):
            errors.add(errno.EEXIST)
        if not replace and target not in self.files and True in self._local(mount, target):
            if self._local(mount, target) == {True}:
                errors.add(errno.EEXIST)
            else:
                return {errno.EEXIST, errno.EXDEV}, False
        unfinished = [
            one for one in self.at(mount, source) if one.is_unfinished and not one.is_late
        ]
        if is_dir:
            if target.startswith(source + "/"):
                errors.add(errno.EINVAL)
            if target in self.files or True in self._local(mount, target):
                errors.add(errno.ENOTDIR)
            if self.children(target):
                errors |= {errno.ENOTEMPTY, errno.EEXIST}
            unfinished = [
                one
                for one in self.descriptions
                if one.mount == mount
                and one.is_unfinished
                and one.name is not None
                and one.name.startswith((source + "/", target + "/"))
            ]
            # A file that was only emptied and opened again since loses nothing.
            if any(not one.may_be_late for one in unfinished):
                errors |= {errno.EBUSY, errno.ENOTEMPTY}
            must_fail = bool(errors)
            if unfinished or self._may_have_nameless_parts(mount):
                errors |= {errno.EBUSY, errno.ENOTEMPTY}
            return errors, must_fail
        if target in self.dirs:
            errors |= {errno.EISDIR, errno.ENOTEMPTY} if self.children(target) else {errno.EISDIR}
            if parent_of(source) == target or source.startswith(target + "/"):
                errors.add(errno.ENOTEMPTY)
        if errors:
            if parent_of(source) != parent_of(target):
                errors.add(errno.EXDEV)
            return errors, True
        for one in unfinished:
            assert one.writer is not None
            if self._is_gap_too_large(one.writer):
                # It cannot be published as it is. The file with the added bytes is published after
                # the rename, and only the writer sees an error.
                one.writer.doubts |= {errno.EOPNOTSUPP}
                adds = one.writer.base is not None or one.writer.published is not None
                return {errno.EOPNOTSUPP, errno.EXDEV}, not adds
        if parent_of(source) == parent_of(target):
            return set(), False
        kinds = {self.files[source].is_striped} if source in self.files else set()
        for one in unfinished:
            assert one.writer is not None
            kinds.add(self._made(one.writer).is_striped)
        if kinds == {True}:
            return {errno.EXDEV}, True
        return ({errno.EXDEV} if kinds - {False} else set()), False

    def _may_have_nameless_parts(self, mount: str) -> bool:
        """Return whether a nameless file that is open for writing is, or was, larger than a unit.

        The folder of its name is not known any more.
        """
        for one in self.descriptions:
            writer = one.writer
            if one.mount != mount or writer is None or not writer.is_detached:
                continue
            known = [held.content for held in (writer.base, writer.published) if held is not None]
            sizes = [writer.size, writer.unsure_before, *map(len, known)]
            if max(sizes) > self.unit_bytes:
                return True
        return False

    def _move_file(self, mount: str, source: str, target: str) -> None:
        moving = self.at(mount, source)
        for one in self.at(mount, target):
            self._detach(one)
        for one in moving:
            if one.is_unfinished and not one.is_late:
                assert one.writer is not None
                if self._is_gap_too_large(one.writer):
                    self._fail(one.writer, errno.EOPNOTSUPP)
                else:
                    self._publish(one)
        moved = self.files.get(source)
        if moved is None:
            raise DeviationError("a file that nobody has published was renamed")
        # What another node has replaced a moment before is shown under the new name as well.
        stale = [past for past in self._recent(mount) if past.path == source]
        self._replace(mount, target, moved)
        self._replace(mount, source, None)
        self._past += [_Past(p.until_s, p.mount, target, p.was) for p in stale if p.was != "dir"]
        for one in moving:
            one.name = target

    def _move_directory(self, mount: str, source: str, target: str) -> None:
        until = self._ended_s
        if target in self.dirs:
            self._past.append(_Past(until, mount, target, "dir"))
        else:
            self._past.append(_Past(until, mount, target, None))

        def moved(path: str) -> str:
            return target + path[len(source) :]

        for path in sorted(self.dirs):
            if path == source or path.startswith(source + "/"):
                self._past.append(_Past(until, mount, path, "dir"))
                self._past.append(_Past(until, mount, moved(path), None))
                self.dirs.discard(path)
                self.dirs.add(moved(path))
        for path in sorted(self.files):
            if path.startswith(source + "/"):
                self._past.append(_Past(until, mount, path, self.files[path]))
                self._past.append(_Past(until, mount, moved(path), None))
                self.files[moved(path)] = self.files.pop(path)
        for one in self.descriptions:
            if one.mount == mount and (one.name or "").startswith(source + "/"):
                one.name = moved(one.name or "")

    # ---- processes and servers ------------------------------------------------------------

    def begin(self, who: str, mount: str) -> None:
        """Add a process without open files."""
        self.processes[who] = mount

    def _do_fork(self, answer: Answer, who: str, child: str) -> None:
        self._refused(answer)
        self.processes[child] = self.processes[who]
        for one in self.descriptions:
            one.holders |= {(child, slot) for holder, slot in one.holders if holder == who}
            one.maps |= {(child, slot) for holder, slot in one.maps if holder == who}

    def _do_spawn(self, answer: Answer, who: str, inherits: bool) -> None:
        self._refused(answer)
        for one in self.slots(who).values():
            one.was_flushed = True

    def _do_exit(self, answer: Answer, who: str) -> None:
        self._end(who, is_killed=False)

    def _do_kill(self, answer: Answer, who: str) -> None:
        self._end(who, is_killed=True)

    def _end(self, who: str, *, is_killed: bool) -> None:
        for one in list(self.descriptions):
            one.maps = {(holder, slot) for holder, slot in one.maps if holder != who}
            mine = {(holder, slot) for holder, slot in one.holders if holder == who}
            if mine:
                is_settled = not is_killed and self._end_writing(one, who)
                self._drop(one, mine, who, is_killed=is_killed, is_settled=is_settled)
            elif not one.holders and not one.maps:
                self.descriptions.remove(one)
        del self.processes[who]

    def _end_writing(self, one: Description, who: str) -> bool:
        """Settle a writer that may fail when its process ends: no call reports the failure."""
        writer = one.writer
        if writer is None or writer.errors:
            return False
        errors, must_fail = self._close_errors(one, who)
        if must_fail:
            self._fail(writer, *errors)
        elif errors:
            writer.doubts |= errors
            self._ask(one)
        return bool(errors)

    def _do_restart(self, answer: Answer, mount: str, how: str) -> None:
        """Restart the server; `how` is "kill", "force" or "wait"."""
        unsaved = any(one.has_unsaved_bytes for one in self.descriptions if one.mount == mount)
        if "busy" in answer:
            if how != "wait" or not unsaved:
                raise DeviationError(f"the server does not restart: {answer['busy']}")
            return
        for one in self.descriptions:
            writer = one.writer
            if one.mount == mount and one.refused:
                # The successor knows that the writer has failed, but not why.
                one.refused |= {errno.EIO}
            if one.mount != mount or writer is None:
                continue
            if writer.errors:
                self._fail(writer, *writer.errors, errno.EIO, errno.ESTALE)
            elif writer.is_detached:
                dirty = {errno.EIO} if writer.wrote else set()
                self._fail(writer, errno.ESTALE, *dirty)
            elif writer.wrote:
                self._fail(writer, errno.EIO)
            else:
                writer.was_restarted = True
                if not writer.is_dirty:
                    writer.base = writer.base or writer.published
                    writer.unsure_before = max(writer.unsure_before, len(writer.content))


def _shows(answer: Answer, data: bytes) -> bool:
    return answer.get("ok") == {"size": len(data), "read": described(data)}


def _sizes(choices: Iterable[Any]) -> list[Any]:
    """Return contents as sizes, for a message."""
    found: list[Any] = []
    for choice in choices:
        data = choice.content if isinstance(choice, Generation) else choice
        found.append(described(data) if isinstance(data, bytes) else data)
    return found
