"""A segment under construction gets huge pages, where the kernel has them at hand, before its bytes come.

A tmpfs makes small pages unless it is mounted otherwise. Of a run that holds a single page the kernel makes a huge page of
zeros when asked to. Filling a segment then takes half the processor's time, and an engine reads it without a fault a page.

Where memory is full of other files' pages the kernel would first move those out of the way, which takes thirty times as long
as the huge page is worth. So a page that took too long is the last that is asked for, for a while.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from engine_shim.handoff import maps, posix
from engine_shim.handoff.maps import HUGE_PAGE

_RUN = 8  # huge pages asked for at a time
PATIENCE = 0.003  # seconds a huge page may take: it takes 0.0003 of free memory, and its small pages 0.002
_SLACK = 0.02  # seconds: somebody else may have had the processor meanwhile
REST = 10.0  # seconds before the kernel is asked again


class HugePages:
    """For one segment file, of which `buffer` is a map. Several threads may use it. `buffer` None: pages stay small."""

    _asked_again = 0.0  # time.monotonic(); for all segments of the process, since they fill the same memory

    def __init__(self, fd: int, buffer: maps.Buffer, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._map = buffer
        self._asked = bytearray(len(buffer) // HUGE_PAGE if buffer is not None else 0)
        self._lock = threading.Lock()

    def make(self, begin: int, end: int) -> None:
        """Huge pages for these bytes, as far as they are to be had quickly. Raises NoRoom if the file system is full."""
        for first in range(begin // HUGE_PAGE, min(-(-end // HUGE_PAGE), len(self._asked)), _RUN):
            if time.monotonic() < HugePages._asked_again:
                return
            with self._lock:
                last = min(first + _RUN, -(-end // HUGE_PAGE), len(self._asked))
                wanted = [index for index in range(first, last) if not self._asked[index]]
                for index in wanted:
                    self._asked[index] = 1
            if wanted:
                self._make(wanted)

    def _make(self, wanted: list[int]) -> None:
        for index in wanted:
            posix.allocate(self._fd, index * HUGE_PAGE, posix.PAGE, self._path)
        began = time.monotonic()
        # One run: what others have made already lies at its ends.
        maps.make_huge(self._map, HUGE_PAGE * wanted[0], HUGE_PAGE * (wanted[-1] + 1 - wanted[0]))
        now = time.monotonic()
        if now - began > _SLACK + PATIENCE * len(wanted):
            HugePages._asked_again = now + REST
