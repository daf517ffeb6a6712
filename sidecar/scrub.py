"""The scrubber: reads what is served over and over, slowly, and takes out of service what is not as it was published.

A bit that flips in memory is noticed by nobody who maps it. Digests were computed while loading; here they are computed
again, with the lowest priority and a bound on the rate, so that engines do not feel it. What is found damaged is retired at
once, so that nobody attaches to it any more, and loaded again from its files. Engines that hold it are named in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator

from engine_shim.handoff import attachment, catalog, manifest
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import NOT_AS_PUBLISHED, NameRefused
from sidecar import pool as pools
from sidecar.pool import PoolWriter

log = logging.getLogger("ballast")

RATE = 256 << 20  # bytes a second: some hundredth of what memory gives, and a 100 GB model in seven minutes
_DURATION = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[smhd]?)\s*\Z")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float:
    """Seconds from what people write: 6h, 30m, 90s, 1.5d. Raises NameRefused."""
    found = _DURATION.match(text)
    if not found or not float(found["number"]):
        raise NameRefused(f"{text!r} is not a time: write it like 6h, 30m, 90s or 1d")
    return float(found["number"]) * _SECONDS[found["unit"]]


class Scrubber:
    """A thread that looks at every ready generation once in `every` seconds. Calls `found` with each that is damaged, which
    is retired by then."""

    def __init__(self, pool: PoolWriter, every: float, found: Callable[[Generation], None], rate: int = RATE) -> None:
        self._pool = pool
        self._every = every
        self._found = found
        self._rate = rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ballast-scrub")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends it, and says whether it has ended: it looks up after each block, but has the lowest priority."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # this thread alone; where it may not, it has the rate still
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while not self._stop.wait(self._every):
            try:
                self.round()
            except Exception as error:  # the next round is another try; nothing else rests on this one
                log.warning("scrubbing was cut short: %s", error)
                log.debug("the whole story", exc_info=True)

    def round(self) -> int:
        """Looks at every generation that is ready now; says how many were damaged. Raises HandoffError if it cannot look, for
        want of descriptors or address space, say; nothing is retired for that."""
        ready = [g for g in self._pool.catalog.generations if g.state == catalog.READY]
        return sum(self._look(generation) for generation in ready)

    def _look(self, generation: Generation) -> bool:
        began = time.monotonic()
        done = 0

        def pace(count: int) -> None:
            nonlocal done
            done += count
            ahead = done / self._rate - (time.monotonic() - began)
            if ahead > 0:
                self._stop.wait(ahead)
            now = self._pool.catalog.get(generation.number)
            if self._stop.is_set() or now is None or now.state != catalog.READY:  # its memory is wanted for something else
                raise _Stopped

        paths = self._pool.paths
        token = attachment.Token.take(paths, generation.number, generation.model, pools.SCRUBBER)
        try:
            now = self._pool.catalog.get(generation.number)
            if now is None or now.state != catalog.READY:
                return False
            contents = manifest.read(paths.manifest(generation.number))
            damage = [f"{what} in segment {segment}" for what, segment in pools.damaged(paths, contents, pace)]
        except _Stopped:
            return False
        except NOT_AS_PUBLISHED as error:  # any other cuts the round short: what could not be read is not damaged by that
            damage = [str(error)]
        finally:
            token.release()
        if damage:
            self._quarantine(generation, damage)
        return bool(damage)

    def _quarantine(self, generation: Generation, damage: list[str]) -> None:
        some = "; ".join(damage[:3]) + (f"; and {len(damage) - 3} more" if len(damage) > 3 else "")
        self._pool.retire(generation.number, reason=f"damaged in memory: {some}")
        holders = ", ".join(self._holders(generation.number)) or "nobody"
        log.error(
            "%s, generation %d, is damaged in memory and is served no more: %s; attached to it: %s (restart them); if it "
            "comes again, test the machine's memory", generation.model, generation.number, some, holders,
        )  # fmt: skip
        self._found(generation)

    def _holders(self, number: int) -> Iterator[str]:
        for record in attachment.alive(self._pool.paths):
            if record.generation in (number, -1):
                yield f"{record.command or record.engine or 'a process'} (pid {record.pid})"


class _Stopped(Exception):
    """The sidecar ends, or the generation was taken out of service meanwhile."""
