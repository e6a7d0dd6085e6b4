"""The promise that what this mount has open survives its name.

Owns what happens to the readers of a file that is about to be replaced, removed or moved. Callers
(`tree`) make one change of names at a time; reading goes on meanwhile.
"""

from bootseer.fuse.striped.layout import DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.names.stored import new_generation
from bootseer.fuse.striped.reading.chunks import OpenFile
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.view import FileView, generation_folder, parts_folder
from bootseer.store.backend import Backend

# An ordinary file of at most this size is kept in memory when its name is about to go away under a
# reader; larger ones are moved aside.
_PIN_MAX_BYTES = DEFAULT_STRIPE_UNIT_BYTES


class OpenReaders:
    """Keeps files that this mount has open whole while their names change."""

    def __init__(self, backend: Backend, reader: StripedReader) -> None:
        self._backend = backend
        self._reader = reader

    def open_here(self, view: FileView) -> list[OpenFile]:
        """The open files whose ordinary file `view` is still read from the storage."""
        return [
            file
            for file in self._reader.open_files()
            if file.pinned is None and file.view.path == view.path and _is_same(file.view, view)
        ]

    def keep(self, old: FileView | None) -> None:
        """Before the ordinary file `old` is replaced: its readers get its content in memory.

        Striped files need nothing: their parts outlive the layout. The readers of an ordinary file
        too large for that get an error when they read on, never the new file's bytes.
        """
        if old is not None and old.layout is None:
            self.pin(old)

    def pin(self, view: FileView) -> bool:
        """Whether the readers of an ordinary file no longer need the stored file."""
        files = self.open_here(view)
        if view.size_bytes > _PIN_MAX_BYTES:
            return not files
        for file in files:
            file.pinned = self._backend.read(view.path)
        return True

    def move_aside(self, view: FileView) -> str:
        """Unlink a large ordinary file that is being read: it goes into the hidden folder.

        Returns the generation that now holds it.
        """
        generation = new_generation()
        aside = f"{generation_folder(view.directory, generation)}/kept"
        self._backend.rename(view.path, aside)
        for file in self.open_here(view):
            file.view = file.view.moved(aside)
        return generation

    def generations_in_use(self) -> set[str]:
        """The generations of the files that are open in this mount."""
        used: set[str] = set()
        for file in self._reader.open_files():
            if file.view.layout is not None:
                used.update(segment.generation for segment in file.view.layout.segments)
            elif parts_folder("") in file.view.directory:
                used.add(file.view.directory.rpartition("/")[2])
        return used

    def renamed(self, source: str, target: str, old: FileView | None = None) -> None:
        """The file `old`, of the name `source`, lies at `target` now; with None, all that lay in
        the directory `source`.

        The identity of an ordinary file does not tell which one it is: it begins with the name that
        the file had when it was opened.
        """
        for file in self._reader.open_files():
            view = file.view
            if old is None:
                if view.path.startswith(source + "/"):
                    file.view = view.moved(target + view.path[len(source) :])
            elif view.path == source and _is_same(view, old):
                file.view = view.moved(target)


def _is_same(view: FileView, other: FileView) -> bool:
    """Whether two views of one path are of the same generation."""
    if view.layout is not None or other.layout is not None:
        return view.identity == other.identity
    return (view.size_bytes, view.modified_ns) == (other.size_bytes, other.modified_ns)
