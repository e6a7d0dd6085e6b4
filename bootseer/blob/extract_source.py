"""The content of a few files that lie close together: reads runs of frames, decodes each once. A
stream that is stored nowhere is read as it is.

Belongs to one thread. Holds the stored frames of one group of files, and a few decoded ones.
"""

from collections import OrderedDict
from collections.abc import Iterable

from bootseer.blob.extract_plan import Place
from bootseer.blob.frames import decode_frame, frames_for
from bootseer.blob.read import ReadBlob
from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError

_RUN_BYTES = 4 * 1024 * 1024
"""At most so much is asked for in one read."""
_DECODED_BYTES = 16 * 1024 * 1024


class Source:
    """Decoded frames for a list of places, read in runs of neighbouring frames."""

    def __init__(self, tree: Tree, read: ReadBlob, places: Iterable[Place]) -> None:
        self._tree = tree
        self._read = read
        needed: set[tuple[int, int]] = set()
        last: tuple[int, int, int] = (-1, 0, 0)
        for _, blob, offset, length in places:
            if blob == last[0] and last[1] <= offset and offset + length <= last[2]:
                continue
            if not tree.blobs[blob].frames:
                continue
            numbers = frames_for(tree.blobs[blob], offset, length)
            needed.update((blob, number) for number in numbers)
            frame = tree.blobs[blob].frames[numbers[-1]]
            last = (blob, frame.stream_offset, frame.stream_offset + frame.stream_length)
        self._needed = needed
        self._stored: dict[tuple[int, int], memoryview] = {}
        self._decoded: OrderedDict[tuple[int, int], tuple[int, bytes]] = OrderedDict()
        self._decoded_bytes = 0
        self._current = (-1, 0, 0, memoryview(b""))

    def view(self, blob: int, offset: int, length: int) -> memoryview:
        """At least one and at most `length` bytes from `offset` of the stream."""
        current, start, end, content = self._current
        if not self._tree.blobs[blob].frames:
            return memoryview(self._read(blob, offset, min(length, _RUN_BYTES)))
        if current != blob or not start <= offset < end:
            number = frames_for(self._tree.blobs[blob], offset, 1)[0]
            start, data = self._frame(blob, number)
            content = memoryview(data)
            self._current = (blob, start, start + len(data), content)
        return content[offset - start : offset - start + length]

    def _frame(self, blob: int, number: int) -> tuple[int, bytes]:
        key = (blob, number)
        found = self._decoded.get(key)
        if found is not None:
            self._decoded.move_to_end(key)
            return found
        frame = self._tree.blobs[blob].frames[number]
        if key not in self._stored:
            self._fetch_run(blob, number)
        data = decode_frame(frame, self._stored[key])
        self._decoded[key] = (frame.stream_offset, data)
        self._decoded_bytes += len(data)
        while self._decoded_bytes > _DECODED_BYTES and len(self._decoded) > 1:
            _, (_, dropped) = self._decoded.popitem(last=False)
            self._decoded_bytes -= len(dropped)
        return frame.stream_offset, data

    def _fetch_run(self, blob: int, first: int) -> None:
        """Read frame `first` and what is needed right after it, in one go."""
        frames = self._tree.blobs[blob].frames
        run = [frames[first]]
        length = run[0].length
        while (blob, first + len(run)) in self._needed:
            following = frames[first + len(run)]
            if length + following.length > _RUN_BYTES:
                break
            run.append(following)
            length += following.length
        data = memoryview(self._read(blob, run[0].offset, length))
        if len(data) != length:
            raise CorruptError(
                f"the blob {self._tree.blobs[blob].digest} gave {len(data)} of {length} bytes "
                f"at offset {run[0].offset}"
            )
        for i, frame in enumerate(run):
            start = frame.offset - run[0].offset
            self._stored[blob, first + i] = data[start : start + frame.length]
