"""Holders: who owns device memory, whether he is alive, and what copies he keeps there.

A holder is a process with a record `d.<id>` that it keeps locked, as an engine its attachment; when it dies the lock goes,
and with it every handle that it has exported. Beside its record it keeps one page `d.<id>.g<N>` for each generation: which
GPUs have a whole copy, by which handles, and why others have none. The sidecar takes the copies from there into the
manifest. A copy that is not on its holder's page any more must not be opened: the holder takes it off the page first, looks
for attachments then, and frees last.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, Optional, Sequence

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Damaged, Foreign, HandoffError, NotFound
from engine_shim.handoff.manifest import DeviceCopy, device_row, parse_device
from engine_shim.handoff.names import PoolPaths, new_id, temporary

_LOCK_BYTE = 0
_SETTLED_BYTE = 1
_LIMIT = 16 << 20  # bytes: a page has some 150 for each segment

DEVICE = "cuda:"  # an attachment's residency begins with it where handles are open, and goes on with the GPU's UUID
CLAIM = "claim:"  # and so where an engine is about to use a GPU for weights of its own


@dataclass(frozen=True)
class Holder:
    """What a holder says about itself."""

    identifier: str
    gpus: tuple[str, ...]
    pid: int = 0  # in its own PID namespace
    host: str = ""
    since: float = 0.0
    settled: bool = True  # it has found nobody else on its GPUs, and stays


@dataclass(frozen=True)
class Page:
    """One generation on one holder's GPUs."""

    generation: int
    copies: tuple[DeviceCopy, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)  # GPU -> why it has no copy
    held: tuple[str, ...] = ()  # GPUs with memory of it: also of a copy that is being made, or is withdrawn and still in use
    gpus: tuple[str, ...] = ()  # those with a whole copy that may be opened


class Token:
    """A holder's own record. It lasts until `release`, or until the process is gone."""

    def __init__(self, paths: PoolPaths, gpus: Sequence[str]) -> None:
        self._paths = paths
        while True:
            self.identifier = new_id()
            path = paths.holder(self.identifier)
            new = temporary(path)
            self._fd = posix.create(new)
            try:
                if posix.try_lock_byte(self._fd, _LOCK_BYTE):
                    row = {"gpus": list(gpus), "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
                    posix.write_exactly(self._fd, json.dumps(row).encode(), 0, new)
                    posix.rename(new, path)
                    self._inode = posix.inode(self._fd)
                    return
            except NotFound:
                pass  # swept between creating and locking
            except BaseException:
                os.close(self._fd)
                posix.remove(new)
                raise
            os.close(self._fd)

    def settle(self) -> None:
        """Says that it stays: whoever starts on one of its GPUs from now on gives up."""
        posix.try_lock_byte(self._fd, _SETTLED_BYTE)

    def write(self, page: Page) -> None:
        """Replaces a page as a whole; one without content is removed. Raises NoRoom."""
        path = self._paths.copies(self.identifier, page.generation)
        if not page.held and not page.lacking:
            posix.remove(path)
            return
        copies = [device_row(copy) for copy in page.copies]
        row = {"copies": copies, "lacking": dict(page.lacking), "held": list(page.held)}
        new = temporary(path)
        fd = posix.create(new)
        try:
            posix.write_exactly(fd, json.dumps(row).encode(), 0, new)
            posix.rename(new, path)
        except BaseException:
            posix.remove(new)
            raise
        finally:
            os.close(fd)

    def release(self) -> None:
        """Removes the record and all pages, and gives the lock up."""
        for name in self._paths.objects():
            if name.kind in ("holder", "copies") and name.file.split(".")[2] == self.identifier:
                posix.remove(self._paths.dir / name.file)
        posix.close_kept(self._fd, self._inode)


class Watch:
    """An eye on one holder's life, on its record, which may be unlinked meanwhile."""

    def __init__(self, paths: PoolPaths, identifier: str) -> None:
        """Raises NotFound if the holder is gone, or Foreign if he is not of this process's user."""
        self.identifier = identifier
        self._path = paths.holder(identifier)
        try:
            self._fd = posix.open_existing(self._path)
        except Foreign:
            # Also in a pool that is shared with a group: what a handle opens can be written to.
            raise Foreign("its holder is another user's: run holder and engine as one user to map it") from None
        self._inode = posix.inode(self._fd)

    @property
    def alive(self) -> bool:
        if not posix.still(self._fd, self._inode):
            try:
                self._fd = posix.open_existing(self._path)
            except HandoffError as error:
                return not isinstance(error, NotFound)  # who cannot look has not seen that he is gone
            if not posix.still(self._fd, self._inode):
                os.close(self._fd)
                return False
        return posix.byte_is_locked(self._fd, _LOCK_BYTE)

    def close(self) -> None:
        posix.close_kept(self._fd, self._inode)


def alive(paths: PoolPaths) -> Iterator[Holder]:
    """The holders of a pool that live and can be read."""
    for name in paths.objects():
        if name.kind != "holder" or name.tmp:
            continue
        identifier = name.file.split(".")[2]
        path = paths.dir / name.file
        try:
            fd = posix.open_existing(path)
        except HandoffError:
            continue
        try:
            if posix.byte_is_locked(fd, _LOCK_BYTE):
                row = json.loads(posix.read_exactly(fd, min(os.fstat(fd).st_size, _LIMIT), 0, path))
                gpus, pid, host, since = tuple(map(str, row["gpus"])), int(row["pid"]), str(row["host"]), float(row["since"])
                yield Holder(identifier, gpus, pid, host, since, posix.byte_is_locked(fd, _SETTLED_BYTE))
        except (HandoffError, ValueError, KeyError, TypeError):
            continue
        finally:
            os.close(fd)


def read(paths: PoolPaths, identifier: str, generation: int, segments: Optional[Sequence[int]] = None) -> Page:
    """A holder's page. With `segments`, the sizes in the manifest, its copies too. Raises NotFound, Foreign or Damaged."""
    path = paths.copies(identifier, generation)
    data = posix.read_all(path, _LIMIT)
    try:
        row: Any = json.loads(data)
        copies = tuple(parse_device(copy, segments) for copy in row["copies"]) if segments is not None else ()
        if any(copy.holder != identifier for copy in copies):
            raise ValueError("another holder's copy")
        lacking = {str(gpu): str(reason) for gpu, reason in row["lacking"].items()}
        held, gpus = tuple(map(str, row["held"])), tuple(str(copy["gpu"]) for copy in row["copies"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} does not make sense ({error}): restart the holder") from None
    return Page(generation, copies, lacking, held, gpus)


def pages(paths: PoolPaths) -> Iterator[tuple[int, Page]]:
    """What living holders say of all generations, without their handles."""
    living = {one.identifier for one in alive(paths)}
    for name in paths.objects():
        if name.kind == "copies" and not name.tmp and name.file.split(".")[2] in living:
            number = int(name.file.rpartition(".g")[2])
            try:
                yield number, read(paths, name.file.split(".")[2], number)
            except HandoffError:
                continue


def sweep(paths: PoolPaths) -> int:
    """Removes the records and pages of holders that are gone; says how many. Locks first, as for attachments."""
    count = 0
    living = set()
    for name in paths.objects():
        if name.kind != "holder":
            continue
        path = paths.dir / name.file
        try:
            fd = posix.open_existing(path, write=True)
        except (NotFound, Foreign):
            continue
        except HandoffError:  # no descriptor is left to ask with: he may live
            living.add(name.file.split(".")[2])
            continue
        try:
            if posix.try_lock_byte(fd, _LOCK_BYTE) and posix.same_file(fd, path):
                count += posix.remove(path)
            else:
                living.add(name.file.split(".")[2])
        finally:
            os.close(fd)
    for name in paths.objects():
        if name.kind == "copies" and name.file.split(".")[2] not in living:
            try:
                count += posix.remove(paths.dir / name.file)
            except HandoffError:
                continue
    return count
