"""From checkpoint files into segments: parallel positioned reads, digests on the way, progress.

A worker reads a unit of a few MiB into a buffer that stays in its CPU's cache, digests it there, and writes it to the
segment. Writing, rather than reading into a map, means no page faults and an honest ENOSPC from a full tmpfs. What is not in
the page cache is read past it (O_DIRECT), and what is there is dropped: the pool is the copy to keep.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import tenacity

from engine_shim.handoff import identity, maps, posix
from engine_shim.handoff.errors import Damaged, HandoffError
from engine_shim.handoff.hugepages import HugePages
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
    retry=tenacity.retry_if_exception(lambda error: isinstance(error, OSError) and error.errno != errno.EINVAL),
    wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
    stop=tenacity.stop_after_attempt(ATTEMPTS),
    reraise=True,
)
def _read(fd: int, buffer: memoryview, position: int, needed: int | None = None) -> int:
    """Fills the buffer, or its first `needed` bytes at least, as far as the file has some; says how many it read.

    Tries a failing read again, a bounded number of times. Raises OSError.
    """
    done = 0
    while done < (len(buffer) if needed is None else needed):
        count = os.preadv(fd, [buffer[done:]], position + done)
        if not count:
            break
        done += count
    return done


class Source:
    """A checkpoint file to be read once. Past the page cache where the file is not in it; leaves nothing of it there."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self._fd = fd
        try:
            self._map: maps.Buffer = maps.shared(fd, size)
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (HandoffError, OSError):  # no address space, or a file system that cannot: by way of the page cache
            self._map, self._direct = None, -1

    def read(self, unit: Unit, buffer: memoryview) -> memoryview:
        """The unit's bytes, or fewer if the file ends before; in the buffer. Raises OSError, after some attempts."""
        if self._map is not None and maps.in_memory(self._map, unit.position, unit.length) < 0.5:
            begin = unit.position // posix.PAGE * posix.PAGE
            skip = unit.position - begin
            needed = skip + unit.length
            wanted = -(-needed // posix.PAGE) * posix.PAGE
            try:
                return buffer[skip : max(skip, min(needed, _read(self._direct, buffer[:wanted], begin, needed)))]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._map = None  # this file system does not do it after all
        return buffer[: _read(self._fd, buffer[: unit.length], unit.position)]

    def close(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if self._direct >= 0:
            os.close(self._direct)


def _buffer(buffers: threading.local) -> memoryview:
    """This thread's buffer: page-aligned, and with room for what a direct read has to take along at either end."""
    found: memoryview | None = getattr(buffers, "view", None)
    if found is None:
        try:
            new = mmap.mmap(-1, digest.BLOCK + 2 * posix.PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            raise HandoffError(
                "there is no memory, or no address space, for a buffer to read with: raise the sidecar's limits (ulimit -v)"
            ) from None
        found = buffers.view = memoryview(new)
    return found


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
            remedy = "; raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise CheckpointError(f"{shard.path} cannot be read: {error.strerror}{remedy}") from error
        source = None
        try:
            settled = self._unchanged(fd)
            source = Source(shard.path, fd, shard.size)
            pages = None
            if self._segment is not None:
                buffer: maps.Buffer = None
                with contextlib.suppress(HandoffError):  # no address space: small pages will do
                    buffer = maps.shared(self._segment, os.fstat(self._segment).st_size)
                pages = HugePages(self._segment, buffer, self._path)
            data_start = 8 + shard.header_len
            failed = threading.Event()

            def work(todo: list[Unit]) -> None:
                if pages is not None:
                    last = todo[-1].pieces[-1]
                    pages.make(todo[0].pieces[0].offset, last.offset + last.length)
                for unit in todo:
                    if failed.is_set() or self._stop.is_set():
                        return
                    try:
                        self._load_unit(source, unit, buffers)
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
            if source is not None:
                source.close()
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

    def _load_unit(self, source: Source, unit: Unit, buffers: threading.local) -> None:
        buffer = _buffer(buffers)
        try:
            data = source.read(unit, buffer)
        except OSError as error:
            raise CheckpointError(
                f"{self._shard.path} cannot be read at byte {unit.position} after {ATTEMPTS} attempts ({error.strerror}): "
                "check the disk or the network volume"
            ) from error
        if len(data) < unit.length:
            raise CheckpointError(
                f"{self._shard.path} ended at byte {unit.position + len(data)} while it was being read: it was cut short; "
                "download it again"
            )
        parts: list[memoryview | bytes] = []  # with the gaps between tensors, so that a thousand small ones are one write
        end = unit.pieces[0].offset
        for piece in unit.pieces:
            part = data[piece.start : piece.start + piece.length]
            self._blocks[piece.tensor][piece.block] = digest.block(part)
            if piece.length:
                parts += [bytes(piece.offset - end), part]
                end = piece.offset + piece.length
        if self._segment is not None:
            posix.write_parts(self._segment, parts, unit.pieces[0].offset, self._path)
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


def segment_digests(
    fd: int,
    rows: Sequence[tuple[int, int]],
    path: Path,
    buffers: threading.local,
    pace: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """The digest of each (offset, size) run of a segment, as it is now. Raises Damaged if the segment is too short."""
    buffer = _buffer(buffers)
    for offset, nbytes in rows:
        parts = []
        for inside, size in digest.blocks(nbytes):
            if _read(fd, buffer[:size], offset + inside) < size:
                raise Damaged(f"{path} ends too early: run 'ballast purge' and start the sidecar again")
            parts.append(digest.block(buffer[:size]))
            pace(size)
        yield digest.join(parts)


def first_set(fd: int, offset: int, length: int, path: Path) -> int | None:
    """The position of the first byte of a run that is not zero; None if all are."""
    while length > 0:
        data = posix.read_exactly(fd, min(length, digest.BLOCK), offset, path)
        rest = data.lstrip(b"\0")
        if rest:
            return offset + len(data) - len(rest)
        offset += len(data)
        length -= len(data)
    return None
