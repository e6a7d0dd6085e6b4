"""What the bytes of a file, or a link, become when the prefix that they name moves.

Pure (no I/O). Alone knows how a prefix is told from a longer path that holds it, how long the first
line of a script may be, and how C strings are replaced in binaries.
"""

import json
import posixpath
import re
from functools import cached_property
from urllib.parse import quote

from msgspec import Struct

from bootseer.errors import InvalidInputError

# Linux before 5.1 reads 128 bytes of a script, its line end included (BINPRM_BUF_SIZE); pip and
# conda go by that as well.
_SHEBANG_BYTES_MAX = 127
# What shells, csh, fish, Python and `#!` lines all take without quotes: what the old prefix stood
# in is not known to have any.
_PLAIN = re.compile(r"/[A-Za-z0-9_/.+@=~-]*")
# Bytes that go on with a name. A dot does where a name follows it, else it ends a sentence.
_NAME = rb"A-Za-z0-9_\x80-\xff"
_BEHIND = rb"(?![" + _NAME + rb"+~@-]|\.[" + _NAME + rb"])"
# "/data/opt/env" does not hold "/opt/env", nor "/usr/bin/env" a prefix "/env"; but
# "-L/opt/env/lib" does.
_BEFORE = rb"(?:(?<=-[BFILR])|(?<=-isystem)|(?<![" + _NAME + rb".+~@-]))"
_PYTHON = re.compile(rb"(python|pypy)[0-9.]*t?")


class Prefix(Struct, frozen=True, dict=True):
    """Where an environment was, and where it will be: absolute, without a slash at the end."""

    old: bytes
    new: bytes

    @cached_property
    def forms(self) -> dict[bytes, bytes]:
        """How files write the old prefix -> the new one: as it is, in URLs, in JSON."""
        found = {}
        for write in (quote, lambda text: json.dumps(text)[1:-1], lambda text: text):
            old, new = (
                write(path.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
                for path in (self.old, self.new)
            )
            found[old] = new
        return found

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        forms = b"|".join(re.escape(form) for form in self.forms)
        return re.compile(_BEFORE + b"(" + forms + b")" + _BEHIND)

    def is_in(self, data: bytes) -> bool:
        """Whether `data` holds the old prefix, not as a part of another path."""
        return self._pattern.search(data) is not None

    def text(self, data: bytes) -> bytes:
        """Text with the new prefix."""
        return self._pattern.sub(lambda match: self.forms[match[1]], data)

    def binary(self, data: bytes, reserved_bytes: int) -> bytes | None:
        """A binary of the same size, whose C strings have the new prefix; None where it has no
        room. `reserved_bytes` is the length of the prefix that it was built with: an installer
        has put a shorter one in its place and filled up with NULs behind the string."""
        one = re.compile(_BEFORE + re.escape(self.old) + _BEHIND)
        pieces = []
        position = 0
        while (match := one.search(data, position)) is not None:
            start = match.start()
            end = data.find(b"\0", start)
            end = len(data) if end < 0 else end
            replaced, count = one.subn(lambda _: self.new, data[start:end])
            spare = count * max(reserved_bytes - len(self.old), 0)
            filling = data[end + 1 : end + 1 + spare]
            # Only what is there; the last NUL ends the string.
            end += len(filling) - len(filling.lstrip(b"\0"))
            if len(replaced) > end - start:
                return None
            pieces += [data[position:start], replaced.ljust(end - start, b"\0")]
            position = end
        pieces.append(data[position:])
        return b"".join(pieces)

    def script(self, data: bytes) -> bytes:
        """Text with the new prefix, whose first line still names an interpreter.

        Where it would be too long for the kernel a shell starts Python, as pip writes it, and
        `env` finds any other.
        """
        changed = self.text(data)
        line, _, rest = changed.partition(b"\n")
        words = line[2:].split(None, 1)
        if (
            not line.startswith(b"#!")
            or not words
            or len(line) < _SHEBANG_BYTES_MAX
            or data.startswith(line + b"\n")
        ):
            return changed
        program, options = words[0], words[1:]
        if _PYTHON.fullmatch(posixpath.basename(program)):
            # A string that Python skips and the shell executes.
            command = b" ".join([b"'''exec'", program, *options, b'"$0" "$@"'])
            return b"#!/bin/sh\n" + command + b"\n' '''\n" + rest
        found = [b"-S", posixpath.basename(program), *options]
        return b"#!/usr/bin/env " + b" ".join(found if options else found[1:]) + b"\n" + rest

    def link(self, path: bytes, target: bytes) -> bytes:
        """The target of a symbolic link at `path`, relative to the prefix: it leads to the same
        place inside the prefix, or outside of it."""
        if target == self.old or target.startswith(self.old + b"/"):
            return self.new + target[len(self.old) :]
        if target.startswith(b"/"):
            return target
        folder = posixpath.dirname(path)
        if not posixpath.normpath(posixpath.join(folder, target)).startswith(b".."):
            return target
        meant = posixpath.normpath(posixpath.join(self.old, folder, target))
        if meant == self.old or meant.startswith(self.old + b"/"):
            meant = self.new + meant[len(self.old) :]
        return posixpath.relpath(meant, posixpath.join(self.new, folder))


def prefix_of(old: bytes, new: str) -> Prefix:
    """Raises: InvalidInputError for a new place that scripts cannot name without quotes."""
    if not _PLAIN.fullmatch(new) or new == "/":
        raise InvalidInputError(
            f"an environment cannot be moved to {new!r}: its scripts cannot name it; use a path of "
            "letters, digits and '/', '.', '_', '-', '+', '@', '=', '~' only"
        )
    return Prefix(old, new.encode("utf-8", "surrogateescape"))
