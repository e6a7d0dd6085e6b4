"""Process of the exerciser that uses a mount on behalf of its coordinator.

The coordinator runs it as a script with the address of a Unix socket and a name. It imports only
the standard library, so that it starts quickly. A request is one line of JSON, and so is its
answer: `{"ok": value}`, or `{"errno": number}` if the call was refused.
"""

import errno
import hashlib
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from typing import Any, NoReturn

_STEP_BYTES = 300_000
_RENAME_NOREPLACE = 1


class Worker:
    """Open files and mappings of one process, by the coordinator's names."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._files: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}

    def serve(self, name: str) -> NoReturn:
        """Answer requests until the coordinator is gone or asks to exit."""
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(self._address)
        channel.sendall(json.dumps({"name": name, "pid": os.getpid()}).encode() + b"\n")
        for line in channel.makefile("rb"):
            request = json.loads(line)
            do = request.pop("do")
            if do == "exit":
                break
            if do == "fork":
                if not os.fork():
                    os.close(channel.fileno())
                    self.serve(request["child"])
                answer: dict[str, Any] = {"ok": None}
            else:
                try:
                    answer = {"ok": getattr(self, do)(**request)}
                except OSError as error:
                    answer = {"errno": error.errno}
                except ValueError:
                    answer = {"errno": errno.EINVAL}  # a mapping of an empty file
            channel.sendall(json.dumps(answer).encode() + b"\n")
        # The kernel closes open files, as for any program that ends.
        os._exit(0)

    # ---- files ----------------------------------------------------------------------------

    def open(self, slot: str, path: str, flags: int) -> None:
        self._files[slot] = os.open(path, flags, 0o644)

    def dup(self, slot: str, new: str) -> None:
        self._files[new] = os.dup(self._files[slot])

    def close(self, slot: str) -> None:
        os.close(self._files.pop(slot))

    def write(self, slot: str, offset: int | None, size: int, seed: int) -> int:
        """Write random bytes at `offset`, or by write(2) if it is None."""
        descriptor, data = self._files[slot], random.Random(seed).randbytes(size)
        for at in range(0, size, _STEP_BYTES):
            piece = data[at : at + _STEP_BYTES]
            if offset is None:
                written = os.write(descriptor, piece)
            else:
                written = os.pwrite(descriptor, piece, offset + at)
            if written != len(piece):
                return at + written
        return size

    def fsync(self, slot: str) -> None:
        os.fsync(self._files[slot])

    def ftruncate(self, slot: str, size: int) -> None:
        os.ftruncate(self._files[slot], size)

    def fstat(self, slot: str) -> int:
        return os.fstat(self._files[slot]).st_size

    def read(self, slot: str, offset: int, length: int) -> list[Any]:
        """Return the number of bytes up to the end of the file, or `length`, and their digest."""
        return _described(self._read(self._files[slot], offset, length))

    def _read(self, descriptor: int, offset: int, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            wanted = min(_STEP_BYTES, length - len(found))
            piece = os.pread(descriptor, wanted, offset + len(found))
            if not piece:
                break
            found += piece
        return bytes(found)

    def map(self, slot: str, new: str) -> int:
        """Map a whole open file, and return its size."""
        self._maps[new] = mmap.mmap(self._files[slot], 0, prot=mmap.PROT_READ)
        return len(self._maps[new])

    def look(self, slot: str, offset: int, length: int) -> list[Any]:
        """Read a range of a mapping, as `read` does with a file."""
        return _described(self._maps[slot][offset : offset + length])

    def unmap(self, slot: str) -> None:
        self._maps.pop(slot).close()

    # ---- names ----------------------------------------------------------------------------

    def peek(self, path: str) -> dict[str, Any]:
        """Open a file; return its size by fstat(2), and then its bytes up to the end."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            try:
                return {"size": size, "read": _described(self._read(descriptor, 0, 2**40))}
            except OSError as error:
                return {"size": size, "errno": error.errno}
        finally:
            os.close(descriptor)

    def stat(self, path: str) -> int:
        return os.stat(path).st_size

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def truncate(self, path: str, size: int) -> None:
        os.truncate(path, size)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str, replace: bool) -> None:
        if replace:
            os.rename(source, target)
            return
        import ctypes  # imported by few: it is slow to load

        libc = ctypes.CDLL(None, use_errno=True)
        at = ctypes.c_int(-100)
        names = os.fsencode(source), os.fsencode(target)
        if libc.renameat2(at, names[0], at, names[1], ctypes.c_uint(_RENAME_NOREPLACE)):
            raise OSError(ctypes.get_errno(), "renameat2")

    # ---- processes ------------------------------------------------------------------------

    def spawn(self, inherits: bool) -> None:
        """Run a program while files are open; it gets copies of them if it `inherits`."""
        if inherits:
            for descriptor in self._files.values():
                os.set_inheritable(descriptor, True)
        subprocess.run(["true"], check=True, close_fds=not inherits)
        for descriptor in self._files.values():
            os.set_inheritable(descriptor, False)


def _described(data: bytes) -> list[Any]:
    return [len(data), hashlib.blake2b(data, digest_size=16).hexdigest()]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No process waits for a forked child: it is gone when it ends.
    Worker(sys.argv[1]).serve(sys.argv[2])
