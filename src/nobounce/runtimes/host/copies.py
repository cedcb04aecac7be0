"""Copies and fills of the host runtimes: who blocks the host, as HIP rules 46-72 say.

What the rules leave to timing is taken at its strictest: nothing returns later than its rule allows,
overlaps and kinds that contradict their pointers are refused, and a pageable source is consumed
before its call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from nobounce.errors import DeviceError, RuntimeStatus
from nobounce.route.types import MemoryKind
from nobounce.runtimes import libc
from nobounce.runtimes.base import CopyKind
from nobounce.runtimes.host.calls import api, invalid_value
from nobounce.runtimes.host.core import INLINE_NBYTES, HostCore, Spot
from nobounce.runtimes.host.ops import HostDevice, HostStream, Op, Work
from nobounce.runtimes.host.tickets import Ordered

_NO_COMPUTE_UNITS = 1024
"""hipMemcpyDeviceToDeviceNoCU, the one kind outside 0..4 that HIP takes (HIP rule 64)."""

DEVICE, MANAGED, PAGEABLE = MemoryKind.DEVICE, MemoryKind.MANAGED, MemoryKind.PAGEABLE


class Move(NamedTuple):
    """A copy that has been found good."""

    dst: Spot
    src: Spot
    nbytes: int

    @property
    def managed(self) -> bool:
        return self.dst.kind is MANAGED or self.src.kind is MANAGED

    @property
    def between_devices(self) -> bool:
        """Device memory on both sides: the host does not wait (HIP rules 49, 50, 55)."""
        return self.dst.kind is DEVICE and self.src.kind is DEVICE

    @property
    def to_device(self) -> bool:
        return self.dst.kind is DEVICE and self.src.kind is not DEVICE

    @property
    def host_only(self) -> bool:
        return not self.managed and self.dst.kind is not DEVICE and self.src.kind is not DEVICE


class HostCopies(HostCore):
    """Everything that moves bytes inside memory."""

    # copies

    @api
    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind = CopyKind.DEFAULT) -> None:
        """On the null stream of the device whose memory it is (case C98), not of the
        thread's current device."""
        move = self._checked("copy", dst, src, nbytes, kind)
        if move is not None:
            self._copy_on_null(move, "copy")

    @api
    def copy_async(
        self, dst: int, src: int, nbytes: int, stream: int, kind: CopyKind = CopyKind.DEFAULT
    ) -> None:
        s = self._stream(stream, "copy_async")
        move = self._checked("copy_async", dst, src, nbytes, kind)
        if move is not None:
            self._copy_on(s, move, "copy_async")

    @api
    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int | None = None
    ) -> None:
        """Without peer access the result is the same, as a copy through the host gives it (HIP rule 70)."""
        to = self._device(dst_device, "copy_peer")
        of = self._device(src_device, "copy_peer")
        s = None if stream is None else self._stream(stream, "copy_peer")
        move = self._checked("copy_peer", dst, src, nbytes, CopyKind.DEVICE_TO_DEVICE)
        if move is None:
            return
        for spot, device in ((move.dst, to), (move.src, of)):
            if spot.allocation is None or spot.allocation.device != device.ordinal:
                raise invalid_value("copy_peer", f"memory that is not of {device.name}")
        if s is None:
            self._copy_on_null(move, "copy_peer")
        else:
            self._copy_on(s, move, "copy_peer")

    @api
    def copy_batch(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """All or nothing: the first bad copy is named by its index, and then none is done (HIP rule 72)."""
        s = self._stream(stream, "copy_batch")
        moves: list[Move] = []
        for i, (dst, src, nbytes) in enumerate(copies):
            try:
                move = self._checked("copy_batch", dst, src, nbytes, CopyKind.DEFAULT)
            except DeviceError as e:
                raise DeviceError("copy_batch", e.status, detail=f"copy {i}: {e}", name=e.name) from e
            if move is not None:
                moves.append(move)
        if not moves:
            return
        works = [self._staged(m) if m.to_device else self._work(m) for m in moves]
        op = self._executor.submit(
            s,
            self._task(s.device, "copy", lambda: _run_all(works)),
            touches=_touches(*moves),
            call="copy_batch",
        )
        if not all(m.between_devices or (m.to_device and not m.managed) for m in moves):
            self._wait_for(op, "copy_batch")

    # fills

    @api
    def fill(self, address: int, value: int, nbytes: int) -> None:
        """At once for device memory, complete for pinned and managed memory (HIP rules 58, 59)."""
        spot = self._fillable("fill", address, nbytes, 1)
        if spot is None:
            return
        device = self._home(spot) or self._current("fill")
        op = self._fill_on(device.null, spot, value, nbytes, 1, "fill")
        if spot.kind is not DEVICE:
            self._wait_for(op, "fill")

    @api
    def fill_async(self, address: int, value: int, nbytes: int, stream: int, width: int = 1) -> None:
        s = self._stream(stream, "fill_async")
        spot = self._fillable("fill_async", address, nbytes, width)
        if spot is not None:
            self._fill_on(s, spot, value, nbytes, width, "fill_async")

    def _fill_on(self, s: HostStream, spot: Spot, value: int, nbytes: int, width: int, call: str) -> Op:
        work = partial(libc.fill, spot.where, value, nbytes, width)
        return self._executor.submit(
            s,
            self._task(s.device, "fill", work),
            inline=nbytes <= INLINE_NBYTES,
            touches=_ordered(spot),
            call=call,
        )

    def _fillable(self, call: str, address: int, nbytes: int, width: int) -> Spot | None:
        if nbytes < 0 or width not in (1, 2, 4) or nbytes % width or address % width:
            raise invalid_value(
                call, f"{nbytes} bytes at {address:#x} in values of {width} bytes (1, 2 or 4)"
            )
        if nbytes == 0:
            return None
        spot = self._spot(address, nbytes, call)
        if spot.kind is PAGEABLE:
            raise invalid_value(call, f"{address:#x} is pageable memory, which a device cannot fill")
        return spot

    # validation

    def _checked(self, call: str, dst: int, src: int, nbytes: int, kind: int) -> Move | None:
        """The copy, or None where there is nothing to do. Size 0 is fine whatever the
        pointers are (HIP rule 62)."""
        if nbytes == 0:
            return None
        if nbytes < 0:
            raise invalid_value(call, f"{nbytes} bytes")
        if kind == _NO_COMPUTE_UNITS:
            kind = CopyKind.DEVICE_TO_DEVICE
        if not 0 <= kind <= CopyKind.DEFAULT:
            raise DeviceError(call, RuntimeStatus.InvalidMemcpyDirection, detail=f"kind {kind}")
        move = Move(self._spot(dst, nbytes, call), self._spot(src, nbytes, call), nbytes)
        if dst == src and kind == CopyKind.DEFAULT:
            return None
        if abs(dst - src) < nbytes:
            raise invalid_value(call, "source and destination overlap")
        if kind != CopyKind.DEFAULT:
            to_device = kind in (CopyKind.HOST_TO_DEVICE, CopyKind.DEVICE_TO_DEVICE)
            of_device = kind in (CopyKind.DEVICE_TO_HOST, CopyKind.DEVICE_TO_DEVICE)
            for spot, device, side in ((move.dst, to_device, "destination"), (move.src, of_device, "source")):
                if spot.kind is not MANAGED and (spot.kind is DEVICE) != device:
                    raise invalid_value(
                        call, f"kind {CopyKind(kind).name}, but the {side} is {spot.kind.value} memory"
                    )
        return move

    # submission

    def _copy_on_null(self, move: Move, call: str) -> None:
        of, to = self._home(move.src), self._home(move.dst)
        device = of or to or self._current(call)
        null = device.null
        if move.host_only:  # drain the stream, then copy on this thread (HIP rule 51)
            self._wait_for(self._executor.submit(null, None, touches=_touches(move), call=call), call)
            self._task(device, "copy", self._work(move))()
            return
        crossing = of is not None and to is not None and of is not to
        before = self._executor.tails(to.null.device, blocking_only=True) if crossing and to else []
        blocks = move.managed or not move.between_devices
        op = self._executor.submit(
            null,
            self._task(device, "copy", self._work(move)),
            after=before,
            inline=blocks or move.nbytes <= INLINE_NBYTES,
            touches=_touches(move),
            call=call,
        )
        if crossing and to:  # later null-stream work there comes after this copy (HIP rule 71)
            self._executor.submit(to.null, None, after=(op,))
        if blocks:
            self._wait_for(op, call)

    def _copy_on(self, s: HostStream, move: Move, call: str) -> None:
        blocks = move.managed or not (move.between_devices or move.to_device or _pinned_out(move))
        consume = move.to_device and move.src.kind is PAGEABLE
        if consume and not blocks:  # where nothing is before it, copying costs what staging would
            now = self._executor.run_now(s, self._task(s.device, "copy", self._work(move)))
            if now is not None:
                self._wait_for(now, call)
                return
        work = self._staged(move) if consume and not blocks else self._work(move)
        op = self._executor.submit(
            s,
            self._task(s.device, "copy", work),
            inline=blocks or move.nbytes <= INLINE_NBYTES,
            touches=_touches(move),
            call=call,
        )
        if blocks:
            self._wait_for(op, call)

    def _home(self, spot: Spot) -> HostDevice | None:
        """The device whose memory it is."""
        a = spot.allocation
        return None if a is None or a.device is None else self._devices[a.device]

    def _work(self, move: Move) -> Work:
        return partial(libc.memcpy, move.dst.where, move.src.where, move.nbytes)

    def _staged(self, move: Move) -> Work:
        """Take the source's bytes now, for a copy later (HIP rule 52)."""
        if move.src.kind is not PAGEABLE:
            return self._work(move)
        mapped = libc.round_up(move.nbytes, libc.PAGE)
        stage = libc.map_memory(mapped)
        libc.memcpy(stage, move.src.where, move.nbytes)
        return partial(_from_stage, move.dst.where, stage, move.nbytes, mapped)


def _from_stage(dst: int, stage: int, nbytes: int, mapped: int) -> None:
    libc.memcpy(dst, stage, nbytes)
    libc.unmap(stage, mapped)


def _pinned_out(move: Move) -> bool:
    """Device memory to pinned memory: at once (HIP rule 53)."""
    return move.src.kind is DEVICE and move.dst.kind is MemoryKind.PINNED


def _ordered(*spots: Spot) -> list[Ordered]:
    """Stream-ordered memory among them, each once."""
    found = (s.allocation.order for s in spots if s.allocation is not None)
    return list(dict.fromkeys(o for o in found if o is not None))


def _touches(*moves: Move) -> list[Ordered]:
    return _ordered(*(spot for m in moves for spot in (m.dst, m.src)))


def _run_all(works: list[Work]) -> None:
    for work in works:
        work()
