"""The few libc calls the host runtimes need, through ctypes, which releases the GIL around each of them.

`ctypes.memmove` and `ctypes.memset` hold the GIL (they are PyDLL functions), so they are not used.
`mmap.mmap(-1, n)` is shared memory, which gets no huge pages: memory is mapped MAP_PRIVATE here.
"""

from __future__ import annotations

import array
import ctypes
import os

PAGE = os.sysconf("SC_PAGESIZE")
HUGE_PAGE = 2 << 20

PROT_NONE = 0
PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_SYS_PROCESS_MADVISE = 440
_MOST_RANGES = 1024
_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_size_t(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int

_mmap = _libc.mmap
_mmap.restype = _SIZE
_mmap.argtypes = [_SIZE, _SIZE, _INT, _INT, _INT, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [_SIZE, _SIZE]
_madvise = _libc.madvise
_madvise.argtypes = [_SIZE, _SIZE, _INT]
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_mprotect = _libc.mprotect
_mprotect.argtypes = [_SIZE, _SIZE, _INT]

memcpy = _libc.memcpy
"""memcpy(dst, src, nbytes); the ranges must not overlap."""
memcpy.restype = None
memcpy.argtypes = [_SIZE, _SIZE, _SIZE]

memset = _libc.memset
"""memset(address, byte, nbytes)."""
memset.restype = None
memset.argtypes = [_SIZE, _INT, _SIZE]


def round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def map_memory(nbytes: int, protection: int = PROT_READ_WRITE) -> int:
    """Private anonymous memory of `nbytes` (a multiple of the page size). Raises OSError, usually ENOMEM."""
    address: int = _mmap(0, nbytes, protection, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def map_huge(nbytes: int) -> int:
    """Like `map_memory`, aligned to 2 MiB and advised to huge pages."""
    wide = map_memory(nbytes + HUGE_PAGE)
    address = round_up(wide, HUGE_PAGE)
    if address > wide:
        _munmap(wide, address - wide)
    tail = wide + HUGE_PAGE - address
    if tail:
        _munmap(address + nbytes, tail)
    _madvise(address, nbytes, _MADV_HUGEPAGE)  # advice: a kernel without huge pages just says no
    return address


def keep_from_children(address: int, nbytes: int) -> None:
    """Leave a range out of forked children: before Linux 5.12 pages that a device
    reads would become theirs."""
    _madvise(address, nbytes, _MADV_DONTFORK)


def unmap(address: int, nbytes: int) -> None:
    _munmap(address, nbytes)


def populate(address: int, nbytes: int) -> None:
    """Have the pages of a range made now (MADV_POPULATE_WRITE, Linux 5.14), what they hold kept; where that
    is unknown, nothing happens.

    Linux zeroes a new huge page beginning at the end that lies furthest from the address that was touched:
    touched at its first page it is zeroed backwards, at its last page forwards, which is 2.3 times as fast
    (27 and 11 GiB/s a core). So each is touched at its last page first.
    """
    first, last = address // PAGE * PAGE, round_up(address + nbytes, PAGE)
    lasts = range(round_up(first + 1, HUGE_PAGE) - PAGE, last, HUGE_PAGE)
    for at in range(0, len(lasts), _MOST_RANGES):
        _populate_pages(lasts[at : at + _MOST_RANGES])
    _madvise(first, last - first, _MADV_POPULATE_WRITE)


def _populate_pages(pages: range) -> None:
    """Populate a page at each of these addresses. Many are one system call where Linux has it
    (process_madvise on oneself, 6.13): a thread that holds the interpreter's lock meanwhile is then waited
    for once, not for each page."""
    done = 0
    try:
        fd = os.pidfd_open(os.getpid()) if len(pages) > 1 else -1
    except (OSError, AttributeError):
        fd = -1  # a full table of descriptors, or an old C library: one call for each page does as well
    if fd >= 0:
        try:
            ranges = array.array("Q", [n for page in pages for n in (page, PAGE)])
            where = _SIZE(ranges.buffer_info()[0])
            pid, count = _INT(fd), _SIZE(len(pages))
            done = _syscall(_SIZE(_SYS_PROCESS_MADVISE), pid, where, count, _MADV_POPULATE_WRITE, 0)
        finally:
            os.close(fd)
    for page in pages[max(0, done) // PAGE :]:
        _madvise(page, PAGE, _MADV_POPULATE_WRITE)


def map_file(fd: int, file_offset: int, nbytes: int) -> int:
    """Map a page-aligned range of a file, shared and for reading only. Raises OSError."""
    address: int = _mmap(0, nbytes, _PROT_READ, _MAP_SHARED, fd, file_offset)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def protect(address: int, nbytes: int, protection: int) -> None:
    _mprotect(address, nbytes, protection)


def fill(address: int, value: int, nbytes: int, width: int) -> None:
    """Repeat `value` of `width` bytes (1, 2 or 4, little endian) over `nbytes`, a multiple of `width`."""
    pattern = (value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
    if pattern == pattern[:1] * width:
        memset(address, pattern[0], nbytes)
        return
    block = pattern * (min(nbytes, 4096) // width)
    seed = ctypes.create_string_buffer(block, len(block))
    memcpy(address, ctypes.addressof(seed), len(block))
    done = len(block)
    while done < nbytes:  # double what is there: few calls, each without the GIL
        step = min(done, nbytes - done)
        memcpy(address + done, address, step)
        done += step
