"""Messages and bytes between the ranks of a process group that load one checkpoint.

Each collective ends within the deadline on every rank, with the bytes or with the same error. After
a failure nothing more is sent, and the process group cannot be used any more. For one thread.
Importing this module imports torch.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bootseer import errors
from bootseer.base.redact import redact
from bootseer.errors import BootseerError, DeadlineError, InvalidInputError, UnavailableError

_MAX_MESSAGE_BYTES = 1 << 16
_BREAK_TAG = 0x6273


class GroupChannel:
    """Channel between this rank and the others of its group."""

    def __init__(self, group: Any, deadline_s: float) -> None:
        """Make a channel for `group`, or for the default group if it is None.

        Without an initialized torch.distributed, this process is the whole group. Raises:
        InvalidInputError.
        """
        self._deadline_s = deadline_s
        self._group = None
        self.rank, self.size = 0, 1
        self._device = torch.device("cpu")
        if not (dist.is_available() and dist.is_initialized()):
            return
        self._group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise InvalidInputError("this rank is not in the process group that it is to load with")
        # "cpu:gloo,cuda:nccl": a backend that moves host memory needs no copy to the device.
        kinds = [part.partition(":")[0] for part in dist.get_backend_config(self._group).split(",")]
        if "cpu" not in kinds:
            self._device = torch.device(kinds[0], torch.accelerator.current_device_index())

    def agree(self, error: BaseException | None) -> None:
        """Tell all ranks whether one has failed. All ranks call this with their error or None.

        Returns on all ranks or raises on all: a failed rank its own error, the others the error of
        the first failed rank. Raises also: DeadlineError, UnavailableError.
        """
        if self._group is None:
            if error is not None:
                raise error
            return
        worst = torch.tensor([0 if error is None else self.size - self.rank], device=self._device)
        self._wait(
            lambda: [dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group, async_op=True)]
        )
        if found := int(worst.item()):
            text = None if error is None else f"{type(error).__name__}\0{redact(str(error))}"
            message = self._broadcast_bytes(
                None if text is None else text.encode(), self.size - found
            )
            if error is not None:
                raise error
            _raise_error_of(message, self.size - found)

    def broadcast(self, data: bytes | None, error: BaseException | None) -> bytes:
        """Return rank 0's `data` on all ranks, or raise its error on all."""
        self.agree(error)
        if self._group is None:
            assert data is not None
            return data
        return self._broadcast_bytes(data, 0, limit_bytes=None)

    def exchange(
        self,
        sends: Sequence[tuple[memoryview, Sequence[int]]],
        receives: Sequence[tuple[memoryview, int]],
    ) -> None:
        """Send bytes to ranks and receive bytes from ranks, in the same order as the other side.

        Raises: DeadlineError, UnavailableError.
        """
        operations = []
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view, peers in sends:
            tensor = torch.frombuffer(view, dtype=torch.uint8).to(self._device)
            operations += [self._p2p_operation(dist.isend, tensor, peer) for peer in peers]
        for view, peer in receives:
            host = torch.frombuffer(view, dtype=torch.uint8)
            tensor = host if self._is_host else torch.empty_like(host, device=self._device)
            arriving.append((host, tensor))
            operations.append(self._p2p_operation(dist.irecv, tensor, peer))
        if operations:
            self._wait(lambda: dist.batch_isend_irecv(operations))
        if not self._is_host:
            for host, tensor in arriving:
                host.copy_(tensor)

    @property
    def _is_host(self) -> bool:
        return bool(self._device.type == "cpu")

    def _p2p_operation(self, kind: Any, tensor: torch.Tensor, peer: int) -> Any:
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer)

    def _broadcast_bytes(
        self, data: bytes | None, source: int, limit_bytes: int | None = _MAX_MESSAGE_BYTES
    ) -> bytes:
        known = (data or b"")[:limit_bytes]
        length = torch.tensor([len(known)], device=self._device)
        self._broadcast_tensor(length, source)
        buffer = bytearray(known or int(length.item()))
        if buffer:
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            tensor = host.to(self._device)
            self._broadcast_tensor(tensor, source)
            if not self._is_host:
                host.copy_(tensor)
        return bytes(buffer)

    def _broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        self._wait(
            lambda: [dist.broadcast(tensor, group_src=source, group=self._group, async_op=True)]
        )

    def _wait(self, start: Callable[[], Sequence[Any]]) -> None:
        try:
            for work in start():
                work.wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            self._break()
            if "imed out" in str(error):
                raise DeadlineError(
                    f"a rank of the group has not answered rank {self.rank} within "
                    f"{self._deadline_s:.0f} s; the checkpoint is not loaded"
                ) from error
            raise UnavailableError(
                f"rank {self.rank} has lost a rank of its group while loading: {error}"
            ) from error

    def _break(self) -> None:
        """Make every wait of a rank in this group fail.

        gloo closes the group's connections when a receive times out, but not when a collective
        times out. So this lets a receive time out: otherwise the next collective of DCP would wait
        for the group's time-out of half an hour.
        """
        if self._is_host:
            with contextlib.suppress(RuntimeError, ValueError):
                nothing = torch.empty(1, dtype=torch.uint8)
                peer = (self.rank + 1) % self.size
                work = dist.irecv(nothing, group=self._group, group_src=peer, tag=_BREAK_TAG)
                work.wait(timedelta(milliseconds=1))


def _raise_error_of(message: bytes, rank: int) -> NoReturn:
    """Raise the error that `rank` has sent in `message`."""
    name, _, text = message.decode("utf-8", errors="replace").partition("\0")
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BootseerError)):
        kind, text = UnavailableError, f"{name}: {text}"
    raise kind(f"rank {rank} failed: {text}")
