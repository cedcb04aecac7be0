"""The copies out of a bounce slot that are too many to be queued one by one: a kernel
of the device makes them.

Each copy that the host queues takes it some 3 us; the kernel reads a table of them, and the slot itself, out
of pinned memory. It is text that the driver compiles, loaded and launched once where no stream is held at a
gate: the first launch of a kernel waits for the device.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from nobounce.errors import DeviceError
from nobounce.io.quiet import quiet_of

if TYPE_CHECKING:
    import numpy as np

    from nobounce.io.movers.bounce import Ring
    from nobounce.runtimes.base import CopyCalls
    from nobounce.runtimes.powers import Modules

    Array = np.ndarray[Any, Any]

TABLE_NBYTES = 64 << 10
"""At the end of a slot: room for the table."""
ROW_WORDS = 3
"""64-bit words of a row: to, from, bytes."""
MOST_COPIES = TABLE_NBYTES // (8 * ROW_WORDS)
LEAST_COPIES = 4
"""Fewer are queued one by one."""
PART = 64 << 10
"""Bytes that one block of threads copies."""
THREADS = 256
NAME = "nobounce_scatter"
TEXT = """\
.version 6.5
.target sm_60
.address_size 64

.visible .entry nobounce_scatter(.param .u64 table)
{
    .reg .pred %p<5>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<15>;

    ld.param.u64 %rd1, [table];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 24;
    add.u64 %rd1, %rd1, %rd2;
    ld.u64 %rd3, [%rd1];
    ld.u64 %rd4, [%rd1+8];
    ld.u64 %rd5, [%rd1+16];
    mov.u32 %r2, %ctaid.y;
    mul.wide.u32 %rd6, %r2, 65536;
    setp.ge.u64 %p1, %rd6, %rd5;
    @%p1 ret;
    add.u64 %rd7, %rd6, 65536;
    min.u64 %rd7, %rd7, %rd5;
    or.b64 %rd8, %rd3, %rd4;
    or.b64 %rd8, %rd8, %rd5;
    and.b64 %rd8, %rd8, 15;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %ntid.x;
    cvt.u64.u32 %rd9, %r3;
    cvt.u64.u32 %rd11, %r4;
    setp.ne.u64 %p2, %rd8, 0;
    @%p2 bra BYTES;
    shl.b64 %rd9, %rd9, 4;
    shl.b64 %rd11, %rd11, 4;
    add.u64 %rd10, %rd6, %rd9;
VECTORS:
    setp.ge.u64 %p3, %rd10, %rd7;
    @%p3 ret;
    add.u64 %rd12, %rd4, %rd10;
    ld.v4.u32 {%r5, %r6, %r7, %r8}, [%rd12];
    add.u64 %rd13, %rd3, %rd10;
    st.v4.u32 [%rd13], {%r5, %r6, %r7, %r8};
    add.u64 %rd10, %rd10, %rd11;
    bra VECTORS;
BYTES:
    add.u64 %rd10, %rd6, %rd9;
EACH:
    setp.ge.u64 %p4, %rd10, %rd7;
    @%p4 ret;
    add.u64 %rd12, %rd4, %rd10;
    ld.u8 %r5, [%rd12];
    add.u64 %rd13, %rd3, %rd10;
    st.u8 [%rd13], %r5;
    add.u64 %rd10, %rd10, %rd11;
    bra EACH;
}
"""


class Scatter:
    """The kernel on one device."""

    def __init__(self, modules: Modules, device: int) -> None:
        """Raises DeviceError where the driver does not take it."""
        self._modules = modules
        self._kernel = modules.load_kernel(device, TEXT.encode(), NAME)

    def launch(self, table: int, rows: int, most_nbytes: int, stream: int) -> None:
        """Make the copies of the table at this address of pinned memory, none of more than `most_nbytes`
        bytes. Raises DeviceError."""
        self._modules.launch(self._kernel, (rows, max(1, -(-most_nbytes // PART))), THREADS, table, stream)


_known: weakref.WeakKeyDictionary[Ring, Scatter | None] = weakref.WeakKeyDictionary()


def scatter_of(ring: Ring, slot: int, calls: CopyCalls, stream: int) -> Scatter | None:
    """The kernel of the ring's device; None where there is none, or where it has not been loaded and a stream
    is held at a gate. `slot` is a free one, `stream` one with nothing in it."""
    if ring in _known:
        return _known[ring]
    modules = ring.runtime.modules
    if modules is None:
        _known[ring] = None
        return None
    quiet = quiet_of(ring.runtime)
    if quiet is not None and not quiet.try_call():
        return None
    try:
        found: Scatter | None = Scatter(modules, ring.device)
        if found is not None:
            where = table(ring, slot, 1)
            where[:] = 0
            found.launch(slot + ring.slot_nbytes - TABLE_NBYTES, 1, 0, stream)
            calls.finish(stream)
    except DeviceError:
        found = None  # the driver has no compiler, or takes no such text
    finally:
        if quiet is not None:
            quiet.called()
    _known[ring] = found
    return found


def ready(ring: Ring) -> None:
    """Load the kernel now, if the device takes one: behind a closed gate it could not be."""
    if ring in _known:
        return
    stream = ring.copy_stream()
    try:
        slot = ring.acquire(wait=True)
        if slot is None:
            return
        try:
            with ring.runtime.copy_calls(ring.device) as calls:
                scatter_of(ring, slot[0], calls, stream)
        finally:
            ring.release(slot)
    finally:
        ring.return_stream(stream)


def table(ring: Ring, slot: int, rows: int) -> Array:
    """The table at the end of a slot, (rows, ROW_WORDS) of 64-bit words."""
    import numpy as np

    first = ring.slot_nbytes - TABLE_NBYTES
    memory = ring.view(slot)[first : first + 8 * ROW_WORDS * rows]
    return np.frombuffer(memory, np.int64).reshape(rows, ROW_WORDS)
