"""What makes two checkpoint files the same, decided in milliseconds.

A file is the one that the sidecar read if it is the very same inode, not written since; otherwise, if it is another copy,
only if its size, its header and a *sample* of its content agree. Names, sizes and headers alone are not enough: a fine-tune has
them in common with its base. What has taken the place of the file that was read is never a copy: whatever was changed in it,
the sample may not show it. The sample takes at least one block of every tensor, up to a budget, at places that follow from the
tensors' sizes alone, so that both sides choose the same.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Optional, Sequence

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Damaged, Mismatch

BLOCK = 4096  # bytes of a sample block: one page of the page cache, the least that a disk reads
BUDGET = 1024  # blocks a file: some 4 MiB, a few milliseconds from a page cache, about 0.1 s from a cold disk
SPREAD = 64  # blocks over and above one per tensor, laid where the large tensors are
DIGEST_BYTES = 16
_HEADER_LIMIT = 100_000_000 + 8  # the most that safetensors itself accepts
# A file written just before it was read may be written again without its times changing: the kernel stamps files with a
# clock that ticks every few milliseconds, and some file systems keep whole seconds only.
TICK_NS = 100_000_000
COARSE_TICK_NS = 2_000_000_000


def digest(*parts: bytes) -> str:
    """blake2b of 16 bytes, in hexadecimal; from the standard library, since the shim has nothing else."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.hexdigest()


@dataclass(frozen=True)
class Stat:
    """What tells one file, and one state of it, from another: device, inode, size in bytes, times in nanoseconds."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stat:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def settled(self, now_ns: int) -> bool:
        """Whether a write from `now_ns` on would certainly show in the times."""
        coarse = self.mtime_ns % 1_000_000_000 == self.ctime_ns % 1_000_000_000 == 0
        return max(self.mtime_ns, self.ctime_ns) + (COARSE_TICK_NS if coarse else TICK_NS) < now_ns


def replaced(path: Path, here: Stat, source: Optional[Path], there: Optional[Stat]) -> bool:
    """Whether the file at `path` is what has become of the one that was read at `source`: written to, or in its place."""
    if there is None or here == there or here.dev != there.dev:  # on another file system it is another copy
        return False
    return here.ino == there.ino or (source is not None and os.path.realpath(path) == os.path.realpath(source))


def sample_plan(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where to look in tensors of these sizes (bytes, in file order): (index of tensor, offset in it, length) each.

    With up to BUDGET non-empty tensors each has a block in its middle; with more, BUDGET of them, evenly chosen. SPREAD more
    blocks fall on the tensors by size, evenly over each.
    """
    filled = [index for index, size in enumerate(sizes) if size]
    if len(filled) > BUDGET:
        filled = [filled[i * len(filled) // BUDGET] for i in range(BUDGET)]
    stride = max(1, sum(sizes[index] for index in filled) // SPREAD)
    plan = []
    for index in filled:
        size = sizes[index]
        count = 1 + size // stride // 2 * 2  # odd, so that one of them is the middle
        if size <= BLOCK * count:
            # small: whole, if one block holds it
            plan.append((index, max(0, (size - BLOCK) // 2), min(size, BLOCK)))
            continue
        for i in range(count):
            plan.append((index, (size - BLOCK) * (2 * i + 1) // (2 * count), BLOCK))
    return plan


def sample_digest(fd: int, blocks: Iterable[tuple[int, int]], path: Path) -> str:
    """The digest of (position, length) blocks of an open file or segment. Raises Damaged if it ends too early."""
    places = list(blocks)
    for position, length in places:  # all at once to the disk's queue, instead of one after the other
        os.posix_fadvise(fd, position, length, os.POSIX_FADV_WILLNEED)
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for position, length in places:
        state.update(posix.read_exactly(fd, length, position, path))
    return state.hexdigest()


def header_digest(fd: int, path: Path) -> tuple[str, int]:
    """(digest, length in bytes) of a safetensors file's beginning: its length field and its header."""
    prefix = posix.read_exactly(fd, 8, 0, path)
    length = 8 + int.from_bytes(prefix, "little")
    if length > _HEADER_LIMIT:
        raise Damaged(f"{path} has a header of {length} bytes, more than any safetensors file may have")
    return digest(prefix, posix.read_exactly(fd, length - 8, 8, path)), length


@dataclass(frozen=True)
class FileIdentity:
    """A checkpoint file as the sidecar read it. `sample` is empty while it is still being loaded."""

    size: int
    header: str
    sample: str
    stat: Optional[Stat]


class File:
    """An open checkpoint file that wants to know whether it is a known one. Reads its header once at most."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self.stat = Stat.of(os.fstat(fd))
        self._header: Optional[tuple[str, int]] = None

    @property
    def header(self) -> tuple[str, int]:
        """Digest and length of the header. Raises Mismatch if it is no safetensors file."""
        if self._header is None:
            try:
                self._header = header_digest(self.fd, self.path)
            except Damaged as error:
                raise Mismatch(str(error)) from None
        return self._header

    def check(
        self,
        known: FileIdentity,
        sizes: Sequence[int],
        starts: Sequence[int],
        sample: Optional[str] = None,
        source: Optional[Path] = None,
    ) -> None:
        """Raises Mismatch unless the file holds what the sidecar read, at `source`.

        `sizes` and `starts` (bytes, from the beginning of the data area) are its tensors', in file order; `sample`
        replaces the recorded one where that is not there yet.
        """
        here, there = self.stat, known.stat
        if here == there:
            return
        if here.size != known.size:
            raise Mismatch(f"{self.path} has {here.size} bytes and the pool's has {known.size}")
        if replaced(self.path, here, source, there):
            if there is not None and here.ino != there.ino:
                raise Mismatch(f"{self.path} took the place of what the sidecar read; the sidecar will read it again")
            raise Mismatch(f"{self.path} was written to after the sidecar read it; the sidecar will read it again")
        header, length = self.header
        if header != known.header:
            raise Mismatch(f"{self.path} has another header than the pool's")
        places = [(length + starts[i] + offset, count) for i, offset, count in sample_plan(sizes)]
        try:
            found = sample_digest(self.fd, places, self.path)
        except Damaged as error:
            raise Mismatch(str(error)) from None
        if found != (sample or known.sample):
            raise Mismatch(f"{self.path} has the pool's header but other content, as a fine-tune has")
