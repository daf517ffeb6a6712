"""A publication: an engine's own state on its way to the sidecar.

The engine writes segments and a manifest under temporary names, holding a kernel lock on each so that a sweep can tell a
living publisher's from a dead one's, and renames the manifest last. From then on the sidecar may adopt it: it checks every
number, computes the digests and makes a generation of it.

There are two ways in. `add` copies bytes that are somewhere else. `reserve` makes room first, so that an engine can load
straight into it and publishing costs no copy and no second home for the weights; `seal` then takes the room's maps away
from the engine, which goes on with private ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Protocol, Sequence

from engine_shim.handoff import manifest, maps, posix
from engine_shim.handoff.catalog import ENGINE, ControlPage
from engine_shim.handoff.errors import Foreign, HandoffError, NotFound
from engine_shim.handoff.hugepages import HugePages
from engine_shim.handoff.manifest import ALIGNMENT, SEGMENT_ALIGNMENT, Manifest, Tensor, align
from engine_shim.handoff.names import TMP, PoolPaths, check_model, new_id
from engine_shim.handoff.room import room, spare
from engine_shim.handoff.semaphores import Guard

# A segment is closed when it has this many bytes; a larger storage gets one of its own. Few, large segments attach fastest,
# but several threads make the pages of several files faster than those of one.
SEGMENT_BYTES = 4 << 30
_SMALLEST = 1 << 30  # bytes of a segment of a state that is too small for eight larger ones
_ALLOCATING = 8  # threads that make pages, at most
_ALLOCATED = 64 << 20  # bytes that a thread makes pages for at a time
_ASKED_AGAIN = 16 << 20  # bytes that are added before it is asked again whether there is room: that takes a millisecond or two
_LOCK_BYTE = 0
_GUARD_TIMEOUT = 30.0


class Storage(Protocol):
    """A run of bytes to publish: its size, and its bytes piece by piece."""

    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Any:
        """Yields memoryviews or bytes that together are the storage."""


class Place(NamedTuple):
    """Room for one storage: its row in the table of tensors, and its bytes in a writable shared map."""

    row: int
    buffer: maps.Buffer


class Publication:
    """One publication under construction. Used as a context: what was not committed is gone afterwards."""

    def __init__(self, paths: PoolPaths, model: str) -> None:
        self._paths = paths
        self._model = check_model(model)
        with contextlib.suppress(NotFound):
            if posix.status(paths.control).st_uid not in (os.geteuid(), 0):
                raise Foreign(f"pool {paths.pool!r} belongs to another user, who alone publishes to it: nothing was published")
        self.identifier = new_id()
        self.nbytes = 0
        self._sizes: list[int] = []
        self._rows: list[Tensor] = []
        self._files: list[tuple[int, Path, Path]] = []  # descriptor, temporary name, real name
        self._inodes: list[tuple[int, int]] = []  # of these
        self._shared: dict[int, maps.Buffer] = {}  # segment -> a map through which the engine still writes
        self._lent: list[tuple[int, weakref.ReferenceType[maps.Buffer]]] = []  # segment, and a place's part of its map
        self._private: dict[int, maps.Buffer] = {}
        self._adding: Optional[int] = None  # the segment that `add` writes to
        self._fits = 0  # bytes for which there was room, when it was asked last, and that were not added since
        self._finished = False
        self._committed = False
        _living.add(self)

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the files, and removes them unless they were committed. Who has them mapped keeps his bytes."""
        with contextlib.suppress(HandoffError):  # the kernel refuses private maps: those of files that nobody else has will do
            self.seal()
        for (fd, new, real), inode in zip(self._files, self._inodes):
            if not self._committed:
                for path in (new, real):
                    with contextlib.suppress(HandoffError):  # without its lock it is swept
                        posix.remove(path)
            posix.close_kept(fd, inode)
        self._files.clear()
        self._inodes.clear()
        self._shared.clear()

    def leave(self) -> None:
        """In a forked child: what it writes is its own, as ever, and the publication is its parent's business."""
        for segment, buffer in self._shared.items():
            with contextlib.suppress(HandoffError):
                maps.make_private(buffer, self._descriptor(segment))
        self._shared.clear()
        for (fd, _, _), inode in zip(self._files, self._inodes):  # an open one would hold the lock
            posix.close_kept(fd, inode)
        self._files.clear()
        self._inodes.clear()

    def _descriptor(self, index: int) -> int:
        """A file's descriptor, to be written or mapped. Raises HandoffError where its number means another file by now."""
        fd, new, _ = self._files[index]
        if not posix.still(fd, self._inodes[index]):
            raise HandoffError(f"{new} was closed by this program meanwhile: nothing was published")
        return fd

    def _create(self, real: Path) -> int:
        new = real.with_name(real.name + TMP)
        while True:
            fd = posix.create(new)
            # A sweep may come between creating and locking, and take the file for a dead publisher's.
            if posix.try_lock_byte(fd, _LOCK_BYTE) and posix.same_file(fd, new):
                self._files.append((fd, new, real))
                self._inodes.append(posix.inode(fd))
                return fd
            os.close(fd)

    def reserve(self, sizes: Sequence[int]) -> list[Place]:
        """Room for storages of these sizes, in this order, with all its pages. Raises NoRoom before anything is made.

        The maps are shared: what is written there is published, until `seal`.
        """
        total = sum(sizes)
        room(self._paths.dir).require(total, f"publishing {self._model!r}", spare(self._paths.dir))
        limit = min(SEGMENT_BYTES, max(_SMALLEST, total // 8))
        segments: list[list[tuple[int, int]]] = []  # of each, its storages: offset and size
        end = 0
        for size in sizes:
            if not segments or align(end, ALIGNMENT) + size > limit:
                segments.append([])
                end = 0
            offset = align(end, ALIGNMENT)
            segments[-1].append((offset, size))
            end = offset + size
        self._fits = 0
        first = len(self._sizes)
        places = []
        for index, storages in enumerate(segments, first):
            buffer = self._reserve_segment(sum(storages[-1]))
            for offset, size in storages:
                part = (ctypes.c_ubyte * size).from_buffer(buffer, offset)
                self._lent.append((index, weakref.ref(part)))
                places.append(Place(self._row(index, offset, size), part))
        # In any case all pages now: a file system that turned out to be full while the engine writes would kill it (SIGBUS).
        self._allocate(range(first, len(self._sizes)))
        return places

    def _reserve_segment(self, used: int) -> maps.Buffer:
        """The next segment, with huge pages as far as they are to be had; what else it needs is still to be allocated."""
        index = len(self._sizes)
        fd = self._create(self._paths.publication_segment(self.identifier, index))
        size = align(max(used, 1), SEGMENT_ALIGNMENT)
        os.ftruncate(fd, size)
        buffer = maps.writable(fd, size)
        self._shared[index] = buffer
        self._sizes.append(size)
        HugePages(fd, buffer, self._files[-1][1]).make(0, size)
        return buffer

    def _allocate(self, segments: Sequence[int]) -> None:
        """The pages that these segments do not have yet, by several threads, in turn at each file. Raises NoRoom."""
        offsets = range(0, max((self._sizes[index] for index in segments), default=0), _ALLOCATED)
        runs = [(index, offset) for offset in offsets for index in segments if offset < self._sizes[index]]
        if not runs:
            return

        def allocate(run: tuple[int, int]) -> None:
            index, offset = run
            fd, path = self._descriptor(index), self._files[index][1]
            posix.allocate(fd, offset, min(_ALLOCATED, self._sizes[index] - offset), path)

        executor = ThreadPoolExecutor(min(_ALLOCATING, len(os.sched_getaffinity(0)), len(runs)), "ballast-pages")
        try:
            for _ in executor.map(allocate, runs):
                pass
        finally:
            executor.shutdown(cancel_futures=True)

    def _row(self, segment: int, offset: int, size: int) -> int:
        self._rows.append(Tensor(str(len(self._rows)), "U8", (size,), None, segment, offset, size, None, 0))
        self.nbytes += size
        return len(self._rows) - 1

    def seal(self) -> None:
        """Ends the engine's writing into the room that it got.

        A shared map that anything still looks at becomes private, in place: its bytes stay as they are for everybody, and later
        writes stay the engine's own. The others go.
        """
        looked_at = {segment for segment, part in self._lent if part() is not None}
        gone = []
        for segment in list(self._shared):
            if segment in looked_at:
                maps.make_private(self._shared[segment], self._descriptor(segment))
                del self._shared[segment]
            else:
                gone.append(self._shared.pop(segment))
        self._lent.clear()
        if gone:
            with contextlib.suppress(RuntimeError):  # no thread to be had: they go when this function ends
                threading.Thread(target=_settle, args=(list(self._private.values()), gone), name="ballast-maps").start()

    def add(self, storage: Storage) -> int:
        """Copies one storage into the present segment, or a new one, and returns its row. Raises NoRoom beforehand."""
        size = storage.nbytes
        if size > self._fits:
            left, aside = room(self._paths.dir), spare(self._paths.dir)
            left.require(size, f"publishing {self._model!r}", aside)
            self._fits = min(left.bytes, left.file_system - aside, size + _ASKED_AGAIN)
        self._fits -= size
        index = self._adding
        if index is None or (self._sizes[index] and self._sizes[index] + size > SEGMENT_BYTES):
            index = self._adding = len(self._sizes)
            self._create(self._paths.publication_segment(self.identifier, index))
            self._sizes.append(0)
        fd, path = self._descriptor(index), self._files[index][1]
        offset = align(self._sizes[index], ALIGNMENT)
        place = offset
        for piece in storage.pieces():
            view = memoryview(piece).cast("B")
            posix.write_exactly(fd, view, place, path)
            place += len(view)
        self._sizes[index] = offset + size
        return self._row(index, offset, size)

    def view(self, row: int) -> tuple[maps.Buffer, int]:
        """A private map of the segment that holds a row, as it is published, and the row's place in it. Of reserved room, or
        after `finish`."""
        segment = self._rows[row].segment
        if segment not in self._private:
            self._private[segment] = maps.private(self._descriptor(segment), self._sizes[segment])
        return self._private[segment], self._rows[row].offset

    def finish(self) -> None:
        """Closes the segments: nothing is added any more. Raises NoRoom."""
        self.seal()
        for index, (_, path, _) in enumerate(self._files):
            fd = self._descriptor(index)
            used = self._sizes[index]
            full = self._sizes[index] = align(max(used, 1), SEGMENT_ALIGNMENT)
            posix.allocate(fd, used, full - used, path)
            os.fchmod(fd, posix.PUBLISHED)
        self._finished = True

    def commit(self, state: Mapping[str, Any], engine: Mapping[str, Any], key: str) -> None:
        """Gives everything its name, the manifest last. Raises NoRoom or Busy."""
        if not self._finished:
            self.finish()
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


def _settle(used: list[maps.Buffer], gone: list[maps.Buffer]) -> None:
    """What takes the kernel a while and nobody has to wait for: the pages of maps that will be read soon, and those of maps
    that nobody has any more."""
    while used:
        maps.populate(used.pop())
    gone.clear()


_living: weakref.WeakSet[Publication] = weakref.WeakSet()


def _forked() -> None:
    for publication in list(_living):
        publication.leave()


os.register_at_fork(after_in_child=_forked)


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
