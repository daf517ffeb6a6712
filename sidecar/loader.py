"""From checkpoint files into segments: parallel positioned reads, digests on the way, progress.

A worker reads a unit of a few MiB into a buffer that stays in its CPU's cache, digests it there, and writes it to the
segment. Writing, rather than reading into a map, means no page faults, no zeroing of pages that are about to be filled, and
an honest ENOSPC from a full tmpfs. What was read is dropped from the page cache: the pool is the copy to keep.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import tenacity

from engine_shim.handoff import identity, posix
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.identity import Stat
from engine_shim.handoff.manifest import ALIGNMENT, SEGMENT_ALIGNMENT, align
from sidecar import checkpoint, digest
from sidecar.checkpoint import CheckpointError, TensorEntry

ATTEMPTS = 5  # of a read that fails: a network file system's hiccup is over within the seconds these take
_BATCH = 4  # units a worker takes at a time: few enough to share the end of a file, enough to keep the queue short
THREADS = max(2, min(8, 2 * (os.cpu_count() or 1)))


class Cancelled(Exception):
    """Loading was told to stop."""


@dataclass(frozen=True)
class Placed:
    """A tensor and its place in the segment."""

    entry: TensorEntry
    offset: int

    @property
    def nbytes(self) -> int:
        return self.entry.end - self.entry.begin


@dataclass(frozen=True)
class Piece:
    """A block of one tensor, or all of it: where it is in the unit's buffer and where it goes."""

    tensor: int
    block: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Unit:
    """One read: a run of the file, and the pieces in it."""

    position: int
    length: int
    pieces: tuple[Piece, ...]


def place(shard: checkpoint.Shard) -> tuple[list[Placed], int]:
    """The tensors of a shard in file order, each with its place, and the size of the segment they make."""
    placed = []
    offset = 0
    for entry in sorted(shard.tensors, key=lambda entry: (entry.begin, entry.end)):
        offset = align(offset, ALIGNMENT)
        placed.append(Placed(entry, offset))
        offset += entry.end - entry.begin
    return placed, align(max(offset, 1), SEGMENT_ALIGNMENT)  # never empty: an empty file cannot be mapped


def units(placed: Sequence[Placed], data_start: int) -> Iterator[Unit]:
    """Reads of up to one block each, together all bytes: small tensors share one, large ones have many."""
    pieces: list[Piece] = []
    position = length = 0
    for index, tensor in enumerate(placed):
        for number, (inside, size) in enumerate(digest.blocks(tensor.nbytes)):
            begin = data_start + tensor.entry.begin + inside
            if pieces and length + size > digest.BLOCK:
                yield Unit(position, length, tuple(pieces))
                pieces, length = [], 0
            if not pieces:
                position = begin
            pieces.append(Piece(index, number, begin - position, size, tensor.offset + inside))
            length = begin - position + size
    if pieces:
        yield Unit(position, length, tuple(pieces))


@dataclass(frozen=True)
class Loaded:
    """What loading one shard found: a digest for each tensor in file order, the sample, and the file's state if settled."""

    digests: list[str]
    sample: str
    stat: Stat | None


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(OSError),
    wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
    stop=tenacity.stop_after_attempt(ATTEMPTS),
    reraise=True,
)
def _read(fd: int, buffer: memoryview, position: int) -> int:
    """As much of the buffer as the file has from there; tries a failing read again, a bounded number of times."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], position + done)
        if not count:
            break
        done += count
    return done


class ShardLoader:
    """Loads one shard into an open segment file, or with `segment` None only digests it."""

    def __init__(
        self,
        shard: checkpoint.Shard,
        placed: Sequence[Placed],
        segment: int | None,
        segment_path: Path,
        stop: threading.Event,
        progress: Callable[[int], None],
    ) -> None:
        self._shard = shard
        self._segment = segment
        self._path = segment_path
        self._stop = stop
        self._progress = progress
        self._placed = placed
        self._blocks = [[b""] * len(list(digest.blocks(tensor.nbytes))) for tensor in self._placed]

    def load(self, executor: ThreadPoolExecutor, buffers: threading.local) -> Loaded:
        """Reads everything. Raises CheckpointError if the file fails, shrinks or changes meanwhile; NoRoom; Cancelled."""
        shard = self._shard
        try:
            fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{shard.path} cannot be read: {error.strerror}") from error
        try:
            settled = self._unchanged(fd)
            data_start = 8 + shard.header_len
            failed = threading.Event()

            def work(todo: list[Unit]) -> None:
                for unit in todo:
                    if failed.is_set() or self._stop.is_set():
                        return
                    try:
                        self._load_unit(fd, unit, buffers)
                    except BaseException:
                        failed.set()
                        raise

            batch: list[Unit] = []
            futures = []
            for unit in units(self._placed, data_start):
                batch.append(unit)
                if len(batch) == _BATCH:
                    futures.append(executor.submit(work, batch))
                    batch = []
            if batch:
                futures.append(executor.submit(work, batch))
            # All of them, also after a failure: a worker that went on would read and write through descriptors that
            # are closed by then, and may be another model's.
            wait(futures)
            for future in futures:
                future.result()
            if self._stop.is_set():
                raise Cancelled
            self._unchanged(fd)
            sample = self._sample(fd, data_start)
        finally:
            os.close(fd)
        return Loaded([digest.join(parts) for parts in self._blocks], sample, settled)

    def _unchanged(self, fd: int) -> Stat | None:
        """The file's state if a write from now on would show in it. Raises CheckpointError if it is not the planned file."""
        now_ns = time.time_ns()
        here = Stat.of(os.fstat(fd))
        if here != self._shard.stat:
            raise CheckpointError(
                f"{self._shard.path} changed while it was being read: it will be loaded again once it stays as it is"
            )
        return here if here.settled(now_ns) else None

    def _load_unit(self, fd: int, unit: Unit, buffers: threading.local) -> None:
        buffer = getattr(buffers, "view", None)
        if buffer is None:
            buffer = buffers.view = memoryview(mmap.mmap(-1, digest.BLOCK))
        try:
            count = _read(fd, buffer[: unit.length], unit.position)
        except OSError as error:
            raise CheckpointError(
                f"{self._shard.path} cannot be read at byte {unit.position} after {ATTEMPTS} attempts ({error.strerror}): "
                "check the disk or the network volume"
            ) from error
        if count < unit.length:
            raise CheckpointError(
                f"{self._shard.path} ended at byte {unit.position + count} while it was being read: it was cut short; "
                "download it again"
            )
        for piece in unit.pieces:
            part = buffer[piece.start : piece.start + piece.length]
            self._blocks[piece.tensor][piece.block] = digest.block(part)
            if self._segment is not None and piece.length:
                posix.write_exactly(self._segment, part, piece.offset, self._path)
        os.posix_fadvise(fd, unit.position, unit.length, os.POSIX_FADV_DONTNEED)
        self._progress(sum(piece.length for piece in unit.pieces))

    def _sample(self, fd: int, data_start: int) -> str:
        """Of what is in the segment, not of the file: the file may be another by now, and then the shim must see it."""
        plan = identity.sample_plan([tensor.nbytes for tensor in self._placed])
        if self._segment is None:
            places = [(data_start + self._placed[i].entry.begin + offset, count) for i, offset, count in plan]
            return identity.sample_digest(fd, places, self._shard.path)
        places = [(self._placed[i].offset + offset, count) for i, offset, count in plan]
        return identity.sample_digest(self._segment, places, self._path)


def used_bytes(placed: Sequence[Placed]) -> int:
    """Where a segment's last tensor ends."""
    return max((tensor.offset + tensor.nbytes for tensor in placed), default=0)


def create_segment(path: Path, placed: Sequence[Placed], size: int) -> int:
    """A new segment file whose tail, which no tensor covers, already has its pages. Raises NoRoom."""
    fd = posix.create(path)
    try:
        used = used_bytes(placed)
        os.ftruncate(fd, size)
        posix.allocate(fd, used, size - used, path)
    except BaseException:
        os.close(fd)
        posix.remove(path)
        raise
    return fd


def segment_digests(fd: int, rows: Sequence[tuple[int, int]], path: Path, buffers: threading.local) -> Iterator[str]:
    """The digest of each (offset, size) run of a segment, as it is now. Raises Damaged if the segment is too short."""
    buffer = getattr(buffers, "view", None)
    if buffer is None:
        buffer = buffers.view = memoryview(mmap.mmap(-1, digest.BLOCK))
    for offset, nbytes in rows:
        parts = []
        for inside, size in digest.blocks(nbytes):
            if _read(fd, buffer[:size], offset + inside) < size:
                raise HandoffError(f"{path} ends too early: run 'ballast purge' and start the sidecar again")
            parts.append(digest.block(buffer[:size]))
        yield digest.join(parts)
