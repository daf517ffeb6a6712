"""Device copies as the sidecar has to do with them: a holder is started, and what holders have goes into the manifests.

The memory itself is the holder's (`sidecar.holder`). A holder outlives a sidecar that crashes, and the next sidecar finds it
and changes nothing. Where the holder is gone, what it exported is taken out of the manifests, and another one is started, which
copies everything again from host memory.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time

from engine_shim.handoff import catalog, holder, manifest
from engine_shim.handoff.catalog import Generation
from engine_shim.handoff.errors import HandoffError, NotFound
from engine_shim.handoff.manifest import DeviceCopy, Manifest
from sidecar.pool import PoolWriter

log = logging.getLogger("ballast")

_FOLLOW_EVERY = 0.2
_AGAIN = (1.0, 5.0, 30.0, 300.0)  # seconds until a holder that ended is started again; the last value from then on
_END = 10.0  # seconds that a removed pool's holder is waited for


class Residency:
    """What a sidecar does about device memory, turn by turn. `spec` as for `--device`; None: only follow the holders that
    others have started."""

    def __init__(self, pool: PoolWriter, spec: str | None) -> None:
        self._pool = pool
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._next_start = 0.0
        self._next_follow = 0.0
        self._known: dict[int, tuple[object, tuple[DeviceCopy, ...]]] = {}  # generation -> state of its manifest, copies in it
        self._pages: dict[tuple[str, int], tuple[object, tuple[DeviceCopy, ...]]] = {}

    def turn(self) -> None:
        """Starts a holder where one is wanted and none lives; brings the manifests up to date. Raises HandoffError."""
        now = time.monotonic()
        if now < self._next_follow:
            return
        self._next_follow = now + _FOLLOW_EVERY
        living = {one.identifier for one in holder.alive(self._pool.paths)}
        self._look_after(bool(living), now)
        for generation in self._pool.catalog.generations:
            if generation.state == catalog.READY:
                self._follow(generation, living)
        ready = {g.number for g in self._pool.catalog.generations if g.state == catalog.READY}
        for number in self._known.keys() - ready:
            del self._known[number]
        for place in [place for place in self._pages if place[0] not in living or place[1] not in ready]:
            del self._pages[place]

    def _look_after(self, alive: bool, now: float) -> None:
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            self._process = None
            pause = _AGAIN[min(self._failures, len(_AGAIN) - 1)]
            self._failures += 1
            self._next_start = now + pause
            log.warning(
                "the holder of device memory ended with %d; host memory serves, and another is started in %.0f s", code, pause
            )
        elif alive and self._process is not None:
            self._failures = 0
        if self._spec is None or alive or self._process is not None or now < self._next_start:
            return
        paths = self._pool.paths
        command = [sys.executable, "-m", "sidecar", "hold", "--no-wait", "--pool", paths.pool, "--dir", os.fspath(paths.dir)]
        try:
            # In a session of its own: what ends the sidecar, a Ctrl-C at its terminal say, is not to end the holder.
            self._process = subprocess.Popen(
                [*command, "--device", self._spec], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._next_start = now + _AGAIN[-1]
            log.warning("no holder of device memory can be started (%s); host memory serves", error.strerror)

    def _follow(self, generation: Generation, living: set[str]) -> None:
        """Puts into a manifest the copies that there are, if they are not those that it has."""
        paths = self._pool.paths
        path = paths.manifest(generation.number)
        concerned = generation.number in self._known or generation.number in self._pool.copied
        if not concerned and not any(paths.copies(one, generation.number).exists() for one in living):
            return  # a manifest may have a million rows: it is not read to learn that there is nothing to do
        try:
            stamp = _stamp(path)
            known = self._known.get(generation.number)
            contents: Manifest | None = None
            if known is None or known[0] != stamp:
                contents = manifest.read(path)
                known = self._known[generation.number] = (stamp, contents.devices)
            sizes = None
            copies: list[DeviceCopy] = []
            for identifier in sorted(living):
                place = (identifier, generation.number)
                try:
                    page_stamp = _stamp(paths.copies(identifier, generation.number))
                    cached = self._pages.get(place)
                    if cached is None or cached[0] != page_stamp:
                        if sizes is None:
                            contents = contents or manifest.read(path)
                            sizes = contents.segments
                        page = holder.read(paths, identifier, generation.number, sizes)
                        cached = self._pages[place] = (page_stamp, page.copies)
                    copies += cached[1]
                except NotFound:
                    continue
            if tuple(copies) != known[1]:
                devices = tuple(copies)
                status = self._pool.amend(generation.number, lambda now: dataclasses.replace(now, devices=devices))
                self._known[generation.number] = ((status.st_ino, status.st_mtime_ns), devices)
        except NotFound:
            return  # dropped meanwhile
        except HandoffError as error:
            log.warning("%s", error)

    def end(self, removed: bool) -> None:
        """The sidecar ends. A holder stays, with the pool, for the next one; or goes, with the pool, once nobody uses it."""
        if self._process is None or not removed:
            return
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            log.info("its holder goes on until the engines that use its memory have ended")


def _stamp(path: os.PathLike[str]) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        raise NotFound(f"{path} is gone") from None
    return status.st_ino, status.st_mtime_ns
