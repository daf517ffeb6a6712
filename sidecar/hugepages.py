"""A segment under construction gets huge pages, where the kernel has them to give, before its bytes come.

A tmpfs makes small pages unless it is mounted otherwise. Of a run that holds a single page the kernel makes a huge page of
zeros when asked to. Filling a segment then takes half the processor's time, and an engine reads it without a fault a page.
"""

from __future__ import annotations

import threading
from pathlib import Path

from engine_shim.handoff import maps, posix
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.maps import HUGE_PAGE


class HugePages:
    """For one segment file of `size` bytes, a multiple of a huge page. Several threads may use it."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._made = bytearray(size // HUGE_PAGE)
        self._lock = threading.Lock()
        try:
            self._map: maps.Buffer = maps.shared(fd, size)
        except HandoffError:  # no address space: small pages will do
            self._map = None

    def make(self, begin: int, end: int) -> None:
        """Huge pages for these bytes, or nothing. Raises NoRoom if the file system is full."""
        if self._map is None:
            return
        first, last = begin // HUGE_PAGE, -(-end // HUGE_PAGE)
        with self._lock:
            wanted = [index for index in range(first, last) if not self._made[index]]
            for index in wanted:
                self._made[index] = 1
        if not wanted:
            return
        for index in wanted:
            posix.allocate(self._fd, index * HUGE_PAGE, posix.PAGE, self._path)
        # One run: what others have made already lies at its ends.
        run = HUGE_PAGE * (wanted[-1] + 1 - wanted[0])
        if not maps.make_huge(self._map, HUGE_PAGE * wanted[0], run) and not any(self._made[:first]):
            self._map = None  # the very first was refused: this kernel cannot, or has none left
