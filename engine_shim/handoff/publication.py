"""A publication: an engine's own state on its way to the sidecar.

The engine writes segments and a manifest under temporary names, holding a kernel lock on each so that a sweep can tell a
living publisher's from a dead one's, and renames the manifest last. From then on the sidecar may adopt it: it checks every
number, computes the digests and makes a generation of it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Mapping, Optional, Protocol

from engine_shim.handoff import manifest, posix
from engine_shim.handoff.catalog import ENGINE, ControlPage
from engine_shim.handoff.errors import NotFound
from engine_shim.handoff.manifest import ALIGNMENT, SEGMENT_ALIGNMENT, Manifest, Tensor, align
from engine_shim.handoff.names import TMP, PoolPaths, check_model, new_id
from engine_shim.handoff.room import room
from engine_shim.handoff.semaphores import Guard

# A segment is closed when it has this many bytes; a larger storage gets one of its own. Few, large segments attach fastest.
SEGMENT_BYTES = 4 << 30
_LOCK_BYTE = 0
_GUARD_TIMEOUT = 30.0


class Storage(Protocol):
    """A run of bytes to publish: its size, and its bytes piece by piece."""

    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Any:
        """Yields memoryviews or bytes that together are the storage."""


class Publication:
    """One publication under construction. Used as a context: what was not committed is gone afterwards."""

    def __init__(self, paths: PoolPaths, model: str) -> None:
        self._paths = paths
        self._model = check_model(model)
        self.identifier = new_id()
        self.nbytes = 0
        self._sizes: list[int] = []
        self._rows: list[Tensor] = []
        self._files: list[tuple[int, Path, Path]] = []  # descriptor, temporary name, real name
        self._committed = False

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: Any) -> None:
        for fd, new, real in self._files:
            if not self._committed:
                posix.remove(new)
                posix.remove(real)
            os.close(fd)
        self._files.clear()

    def _create(self, real: Path) -> int:
        new = real.with_name(real.name + TMP)
        fd = posix.create(new)
        self._files.append((fd, new, real))
        posix.try_lock_byte(fd, _LOCK_BYTE)
        return fd

    def add(self, storage: Storage) -> None:
        """Copies one storage into the present segment, or a new one. Raises NoRoom before anything is written."""
        size = storage.nbytes
        room(self._paths.dir).require(size, f"publishing {self._model!r}")
        if not self._sizes or (self._sizes[-1] and self._sizes[-1] + size > SEGMENT_BYTES):
            self._create(self._paths.publication_segment(self.identifier, len(self._sizes)))
            self._sizes.append(0)
        fd, path, _ = self._files[-1]
        offset = align(self._sizes[-1], ALIGNMENT)
        place = offset
        for piece in storage.pieces():
            view = memoryview(piece).cast("B")
            posix.write_exactly(fd, view, place, path)
            place += len(view)
        segment = len(self._sizes) - 1
        self._rows.append(Tensor(str(len(self._rows)), "U8", (size,), None, segment, offset, size, None, 0))
        self._sizes[-1] = offset + size
        self.nbytes += size

    def commit(self, state: Mapping[str, Any], engine: Mapping[str, Any], key: str) -> None:
        """Closes the segments and gives everything its name, the manifest last. Raises NoRoom or Busy."""
        for index, (fd, path, _) in enumerate(self._files):
            used = self._sizes[index]
            full = self._sizes[index] = align(max(used, 1), SEGMENT_ALIGNMENT)
            posix.allocate(fd, used, full - used, path)
            os.fchmod(fd, posix.PUBLISHED)
        contents = Manifest(
            generation=0, model=self._model, kind=ENGINE, complete=False, created=time.time(), source="",
            segments=tuple(self._sizes), tensors=self._rows, state=state, engine={**engine, "key": key},
        )  # fmt: skip
        fd = self._create(self._paths.publication(self.identifier))
        posix.write_exactly(fd, manifest.encode(contents), 0, self._files[-1][1])
        page = ControlPage.open(self._paths, write=True)
        try:
            # Under the guard, so that nobody sweeps or purges between the first rename and the last.
            with Guard(self._paths, page.fd).hold(_GUARD_TIMEOUT):
                for _, new, real in self._files:
                    posix.rename(new, real)
                self._committed = True
        finally:
            page.close()


def alive(path: Path) -> Optional[bool]:
    """Whether the publisher of this object still holds it; None if the object is gone."""
    try:
        fd = posix.open_existing(path)
    except NotFound:
        return None
    try:
        return posix.byte_is_locked(fd, _LOCK_BYTE)
    finally:
        os.close(fd)
