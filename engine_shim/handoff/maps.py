"""Memory maps, as far as Python's `mmap` module cannot say what is wanted: where they begin, how large their pages are.

Huge pages matter: an engine's first read of a map in pages of 4 KiB takes a fault for every few of them, and runs at less than
half the speed of one in huge pages. The kernel can use those only where file offset and address agree modulo 2 MiB, so maps
begin at such a boundary. It needs no privilege and no mount option, but Linux 6.1; without it pages stay small.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Callable

from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.posix import PAGE

HUGE_PAGE = 2 << 20
_POPULATED = 64 << 20  # bytes at a time, since other threads' mmap waits meanwhile

# Not all are in every Python's mmap module; the values are the same on Linux's common architectures. See mmap(2), madvise(2).
_NONE = 0
_FIXED = 0x10
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_POPULATE_READ = 22
_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

Buffer = Any  # an array of bytes that lives as long as anything looks at it; the map goes with it


def _error(what: str) -> HandoffError:
    return HandoffError(f"{what}: {os.strerror(ctypes.get_errno())}; is there a limit on address space (ulimit -v)?")


def private(fd: int, size: int) -> Buffer:
    """A map of the first `size` bytes of a file, readable and writable; what is written stays this process's own."""
    return _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NORESERVE)


def shared(fd: int, size: int) -> Buffer:
    """A map of the first `size` bytes of a file, to look at it."""
    return _map(fd, size, mmap.PROT_READ, mmap.MAP_SHARED)


def writable(fd: int, size: int) -> Buffer:
    """A map of the first `size` bytes of a file; what is written is the file's."""
    return _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)


def _map(fd: int, size: int, protection: int, flags: int) -> Buffer:
    room = size + HUGE_PAGE
    whole = _libc.mmap(None, room, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
    if whole == _FAILED:
        raise _error(f"{room} bytes cannot be mapped")
    base = -(-whole // HUGE_PAGE) * HUGE_PAGE
    if _libc.mmap(base, size, protection, flags | _FIXED, fd, 0) != base:
        error = _error(f"{size} bytes of a file cannot be mapped")
        _libc.munmap(whole, room)
        raise error
    buffer = (ctypes.c_ubyte * size).from_address(base)
    weakref.finalize(buffer, _libc.munmap, whole, room).atexit = False  # at the end the kernel unmaps, after everybody
    return buffer


def make_private(buffer: Buffer, fd: int) -> None:
    """Turns the shared map of the whole file that `fd` has open into a private one, at the same address, in one step.

    Whoever reads through it notices nothing; writes are its own from now on. See mmap(2), MAP_FIXED. Raises HandoffError.
    """
    where = ctypes.addressof(buffer)
    flags = mmap.MAP_PRIVATE | _NORESERVE | _FIXED
    if _libc.mmap(where, len(buffer), mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != where:
        raise _error("a map cannot be made private")


def make_huge(buffer: Buffer, offset: int, length: int) -> bool:
    """Joins the pages of a run of huge pages that each hold at least one page; says whether the kernel did.

    What is missing becomes zeros. Bytes that are there, or being written, stay.
    """
    return not _libc.madvise(ctypes.addressof(buffer) + offset, length, _COLLAPSE)


def populate(buffer: Buffer) -> None:
    """Maps every page that the file has, so that whoever reads next takes no fault for each few of them. Linux 5.14."""
    start, size = ctypes.addressof(buffer), len(buffer)
    for offset in range(0, size, _POPULATED):
        if _libc.madvise(start + offset, min(_POPULATED, size - offset), _POPULATE_READ):
            return


def own_memory() -> list[tuple[int, int]]:
    """Where memory is that is this process's alone, and of no file, as (start, end) in order.

    There, and nowhere else, a page that is not in memory has never been written to, and reads as zeros. Empty where the kernel
    does not tell.
    """
    return _ranges(lambda permissions, inode: permissions[3] == "p" and inode == "0")


def shared_memory() -> list[tuple[int, int]]:
    """Where memory is that other processes may see change, as (start, end) in order. Empty where the kernel does not tell."""
    return _ranges(lambda permissions, inode: permissions[3] == "s")


def _ranges(wanted: Callable[[str, str], bool]) -> list[tuple[int, int]]:
    """What proc_pid_maps(5) has of one kind; neighbours are joined."""
    found: list[tuple[int, int]] = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                addresses, permissions, _, _, inode = line.split(None, 5)[:5]
                if wanted(permissions, inode):
                    start, end = (int(part, 16) for part in addresses.split("-"))
                    if found and found[-1][1] == start:
                        start = found.pop()[0]
                    found.append((start, end))
    except OSError:
        return []
    return found


def in_memory(buffer: Buffer, offset: int, length: int) -> float:
    """The share of these bytes' pages that are in the page cache; 1 where the kernel does not tell. See mincore(2)."""
    first = offset // PAGE * PAGE
    pages = (ctypes.c_ubyte * -(-(offset + length - first) // PAGE))()
    if _libc.mincore(ctypes.addressof(buffer) + first, offset + length - first, pages):
        return 1.0
    return sum(page & 1 for page in pages) / max(1, len(pages))
