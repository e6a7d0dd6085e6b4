"""The C program that is the lower limit of an extraction's time, and the plan it carries out."""

import shutil
import stat
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bootseer.blob.tree import Tree
from testbed.needs import MissingError
from testbed.packages import Packages

_SOURCE = Path(__file__).with_name("floor.c")
_TASK_BYTES = 2**20
_PART_BYTES = 2**24
_SUITE = "bookworm"
_DEADLINE_S = 120.0

_HEADER = struct.Struct("=6I")
_FRAME = struct.Struct("=QQII")
_DIRECTORY = struct.Struct("=4Iq")
_TASK = struct.Struct("=4I")
_PIECE = struct.Struct("=4I4Qq")
_LINK = struct.Struct("=4Iq")


def fetch_zstd(packages: Packages) -> Path:
    """Return the folder of zstd's header and library. Raises: MissingError."""
    return packages.unpacked(_SUITE, "libzstd-dev") / "usr"


def compile_floor(packages: Packages, program: Path) -> None:
    """Compile the extractor. Raises: MissingError."""
    if shutil.which("gcc") is None:
        raise MissingError("there is no gcc; apt install gcc libc6-dev")
    development = fetch_zstd(packages)
    headers, libraries = development / "include", next(development.glob("lib/*/libzstd.a"))
    command = ["gcc", "-O2", "-pthread", f"-I{headers}", str(_SOURCE), str(libraries)]
    done = subprocess.run(
        [*command, "-o", str(program)],
        capture_output=True, text=True, timeout=_DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise MissingError(f"the floor cannot be compiled: {done.stderr.strip()[-300:]}")


@dataclass(slots=True)
class _Heap:
    data: bytearray = field(default_factory=bytearray)

    def add(self, name: bytes) -> int:
        offset = len(self.data)
        self.data += name + b"\0"
        return offset


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    """Number of the inode."""
    directory: int
    name: int
    is_part: bool
    stream: int
    length: int
    offset: int


def write_plan(tree: Tree, target: Path) -> None:
    """Write the plan for a tree of one blob whose files have one extent and one name each.

    Raises: MissingError for any other tree.
    """
    heap = _Heap()
    folders = {0: 0}
    directories, links, pieces = [], [], []
    for path, number in tree.walk():
        if not path:
            continue
        inode = tree.inode(number)
        folder = folders[tree.parent(number)]
        name = heap.add(path.rpartition(b"/")[2])
        if stat.S_ISDIR(inode.mode):
            directories.append(_DIRECTORY.pack(folder, name, inode.mode, 0, inode.mtime_ns))
            folders[number] = len(directories)
        elif stat.S_ISLNK(inode.mode):
            text = heap.add(inode.link_target)
            links.append(_LINK.pack(folder, name, text, 0, inode.mtime_ns))
        elif not stat.S_ISREG(inode.mode) or len(inode.extents) > 1 or tree.link_count(number) > 1:
            raise MissingError("the floor knows files of one piece and one name only")
        else:
            length = inode.extents[0].length if inode.extents else 0
            stream = inode.extents[0].blob_offset if inode.extents else 0
            pieces.append(_Piece(number, folder, name, length > _PART_BYTES, stream, length, 0))
    pieces.sort(key=lambda piece: (piece.is_part, piece.stream))
    frames = tree.blobs[0].frames
    starts = [frame.stream_offset for frame in frames]
    cut = [part for piece in pieces for part in _parts(piece, starts)]
    tasks: list[bytes] = []
    written: list[_Piece] = []
    for first, count, members in _tasks(cut, starts):
        tasks.append(_TASK.pack(first, count, len(written), len(members)))
        written += members
    header = _HEADER.pack(
        len(frames), len(directories), len(tasks), len(written), len(links), len(heap.data)
    )
    columns = tree.columns
    with target.open("wb") as file:
        file.write(header)
        for frame in frames:
            file.write(
                _FRAME.pack(frame.offset, frame.stream_offset, frame.length, frame.stream_length)
            )
        file.writelines(directories)
        file.writelines(tasks)
        for piece in written:
            mode, mtime_ns = columns.mode[piece.number], columns.mtime_ns[piece.number]
            size = columns.size_bytes[piece.number]
            file.write(
                _PIECE.pack(
                    piece.directory, piece.name, mode, piece.is_part,
                    piece.stream, piece.length, piece.offset, size, mtime_ns,
                )
            )  # fmt: skip
        file.writelines(links)
        file.write(heap.data)


def _parts(piece: _Piece, starts: list[int]) -> Iterator[_Piece]:
    """Cut a large piece into several, each beginning with a frame."""
    if not piece.is_part:
        yield piece
        return
    start, end = piece.stream, piece.stream + piece.length
    while start < end:
        number = bisect_right(starts, start + _PART_BYTES // 4)
        until = min(starts[number] if number < len(starts) else end, end)
        offset = piece.offset + start - piece.stream
        yield _Piece(piece.number, piece.directory, piece.name, True, start, until - start, offset)
        start = until


def _tasks(pieces: list[_Piece], starts: list[int]) -> Iterator[tuple[int, int, list[_Piece]]]:
    """Yield (first frame, number of frames, pieces) for each task of a thread."""
    members: list[_Piece] = []
    for piece in pieces:
        if members and (
            piece.stream + piece.length - members[0].stream > _TASK_BYTES
            or piece.is_part
            or piece.stream < members[-1].stream + members[-1].length
        ):
            yield _task(members, starts)
            members = []
        members.append(piece)
    if members:
        yield _task(members, starts)


def _task(members: list[_Piece], starts: list[int]) -> tuple[int, int, list[_Piece]]:
    filled = [piece for piece in members if piece.length]
    if not filled:
        return 0, 0, members
    first = bisect_right(starts, filled[0].stream) - 1
    end = bisect_right(starts, filled[-1].stream + filled[-1].length - 1)
    return first, end - first, members
