"""The page cache of given files: emptied without privileges, filled, and looked at, so that "cold" and "warm" are facts."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
COLD = 0.001  # the share of a file that may still be cached for it to count as cold
WARM = 0.999


def resident(paths: Iterable[Path]) -> int:
    """How many bytes of the files are in the page cache, by mincore(2); only a file's owner (or root) is told."""
    return sum(_resident(path) for path in paths)


def _resident(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    fd = os.open(path, os.O_RDONLY)
    try:
        # Private and writable, which ctypes asks for to give an address; nothing is written and no page is touched.
        view = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    start = ctypes.c_char.from_buffer(view)
    try:
        if _libc.mincore(ctypes.addressof(start), size, flags):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        del start
        view.close()
    return sum(bytes(flags).translate(_LOWEST_BIT)) * mmap.PAGESIZE


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def evict(paths: Iterable[Path]) -> None:
    """Drops the files from the page cache. Raises SystemExit if they will not go: a measurement would be a lie."""
    paths = list(paths)
    size = sum(path.stat().st_size for path in paths)
    deadline = time.monotonic() + 10
    while True:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # a dirty page is not dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        left = resident(paths)
        if left <= COLD * size:
            return
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{left / 1e6:.0f} MB of {paths[0].parent} stay in the page cache: who else has it mapped?"
            )
        time.sleep(0.1)


def warm(paths: Iterable[Path]) -> None:
    """Reads the files into the page cache. Raises SystemExit if they do not stay there, for want of memory."""
    paths = list(paths)
    size = sum(path.stat().st_size for path in paths)
    buffer = bytearray(4 << 20)
    for _ in range(3):
        if resident(paths) >= WARM * size:
            return
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    if resident(paths) < WARM * size:
        raise SystemExit(
            f"{size / 1e9:.1f} GB of checkpoint do not stay in the page cache: this machine is too small for it"
        )
