"""Attachments: who holds which generation, and whether he is still alive.

Three roles. The *token* is held by an engine process: a small JSON record with a kernel lock on it. The *monitor* asks whether
a record's holder lives. The *cleaner* removes the records of the dead. Liveness is the lock, never a PID: a PID means
nothing in another container and is reused.

A forked child inherits the token's open file and with it the lock: the generation counts as held until both are gone, or
until the parent releases it. What the child has mapped by then stays valid: to unlink a segment takes it from nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Iterator, Optional

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Damaged, Foreign, HandoffError, NotFound
from engine_shim.handoff.names import PoolPaths, new_id, temporary

_LIMIT = 1 << 16  # bytes; a record has some 300
_LOCK_BYTE = 0


@dataclass(frozen=True)
class Record:
    """What an attachment says about itself; for people, except `generation`."""

    generation: int
    model: str
    engine: str = ""
    rank: int = 0
    pid: int = 0  # in its own PID namespace
    host: str = ""
    command: str = ""
    residency: str = "host"
    since: float = 0.0
    note: str = ""
    identifier: str = field(default="", compare=False)


_FIELDS = frozenset(part.name for part in fields(Record))  # a later version's other fields are no concern of ours


class Token:
    """One attachment of this process. It lasts until `release`, or until the process and its forks are gone."""

    def __init__(self, paths: PoolPaths, record: Record, fd: int) -> None:
        self._paths = paths
        self._fd: Optional[int] = fd
        self._inode = posix.inode(fd)
        self._owner = os.getpid()
        self.record = record

    @classmethod
    def take(cls, paths: PoolPaths, generation: int, model: str, engine: str = "", rank: int = 0, **more: Any) -> Token:
        """Writes and locks a record, then gives it its name: nobody ever sees an unlocked one of a living process.

        The caller must then read the catalog again and go on only if the generation is still there.
        """
        group = posix.group_of(paths.control)
        if group is not None:
            sweep(paths)  # what processes of this user have left there, which the sidecar may not be able to remove
        while True:
            identifier = new_id()
            record = Record(
                generation, model, engine, rank, os.getpid(), socket.gethostname(),
                " ".join(sys.argv)[:200], since=time.time(), identifier=identifier, **more,
            )  # fmt: skip
            path = paths.attachment(identifier)
            new = temporary(path)
            fd = posix.create(new)
            try:
                # A cleaner may come between creating and locking, and take the record for a dead one's.
                if posix.try_lock_byte(fd, _LOCK_BYTE):
                    posix.write_exactly(fd, json.dumps(asdict(record)).encode(), 0, new)
                    with contextlib.suppress(HandoffError):  # root is not asked for membership, nor does root ask for it
                        posix.share(fd, posix.PRIVATE, group)
                    posix.rename(new, path)
                    return cls(paths, record, fd)
            except NotFound:
                pass
            except BaseException:
                os.close(fd)
                posix.remove(new)
                raise
            os.close(fd)

    @property
    def held(self) -> bool:
        """Whether the record is still open here, and with it locked: this program may have closed it unknowingly."""
        return self._fd is not None and posix.still(self._fd, self._inode)

    def tell(self, note: str) -> None:
        """Writes `note` into the record, for people. In place: to put another file there would leave a moment in which somebody
        who has opened the old one finds it unlocked. Who reads meanwhile may find a record that makes no sense, which counts
        as held. Does nothing in a forked child, after the release, or without the record. Raises NoRoom.
        """
        if self._fd is None or not self.held or os.getpid() != self._owner:
            return
        self.record = replace(self.record, note=note)
        data = json.dumps(asdict(self.record)).encode()
        path = self._paths.attachment(self.record.identifier)
        posix.write_exactly(self._fd, data.ljust(os.fstat(self._fd).st_size), 0, path)

    def release(self) -> None:
        """Gives the attachment up. Safe to call twice. A forked child only lets go: the record is its parent's.

        A record that cannot be removed, as by a process that has given up its privileges, is unlocked all the same, and so
        a dead one's to all who look. Nothing is raised for it: this is called from finalizers.
        """
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                if os.getpid() == self._owner:
                    with contextlib.suppress(HandoffError):
                        posix.remove(self._paths.attachment(self.record.identifier))
            finally:
                posix.close_kept(fd, self._inode)


def _decode(data: bytes, path: str) -> Record:
    try:
        raw = json.loads(data)
        record = Record(**{name: value for name, value in raw.items() if name in _FIELDS})
        texts = (record.model, record.engine, record.host, record.command, record.residency, record.note, record.identifier)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a text is none")
        if not all(type(number) is int for number in (record.generation, record.rank, record.pid)):
            raise ValueError("a number is none")
        if type(record.since) not in (int, float):
            raise ValueError("a time is none")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"attachment record {path} does not make sense ({error})") from None
    return record


def alive(paths: PoolPaths) -> Iterator[Record]:
    """The attachments whose holders live. A locked record that cannot be read counts as held, of generation -1, and so does one
    that cannot even be opened, for want of a descriptor, say.

    In a pool that is shared with a group, records that its members have given to it count as well.
    """
    group = posix.group_of(paths.control)
    for name in paths.objects():
        if name.kind != "attachment":
            continue
        path = paths.dir / name.file
        try:
            fd = posix.open_existing(path, group=group)
        except (NotFound, Foreign):
            continue  # gone meanwhile, or a stranger's: a stranger holds nothing here
        except HandoffError:
            yield Record(generation=-1, model="")
            continue
        try:
            if not posix.byte_is_locked(fd, _LOCK_BYTE):
                continue
            size = os.fstat(fd).st_size
            yield _decode(posix.read_exactly(fd, min(size, _LIMIT), 0, path), name.file)
        except Damaged:
            yield Record(generation=-1, model="")
        finally:
            os.close(fd)


def sweep(paths: PoolPaths) -> int:
    """Removes the records of the dead and says how many. Locks each first, so that it cannot be one being made.

    A group member's record cannot be locked by us, and needs not be: in its making it is locked before it gets its name.
    """
    group = posix.group_of(paths.control)
    count = 0
    for name in paths.objects():
        if name.kind != "attachment":
            continue
        path = paths.dir / name.file
        try:
            fd = posix.open_existing(path, write=True)
        except HandoffError:
            count += group is not None and not name.tmp and _remove_members(path, group)
            continue
        try:
            if posix.try_lock_byte(fd, _LOCK_BYTE) and posix.same_file(fd, path):
                count += posix.remove(path)
        finally:
            os.close(fd)
    return count


def _remove_members(path: Path, group: int) -> bool:
    """Removes the record of a dead process of another user, if that can be told and the directory lets us."""
    try:
        fd = posix.open_existing(path, group=group)
    except HandoffError:
        return False
    try:
        return not posix.byte_is_locked(fd, _LOCK_BYTE) and posix.same_file(fd, path) and posix.remove(path)
    except HandoffError:  # in a sticky directory it is the other user's to remove: his next attachment does
        return False
    finally:
        os.close(fd)
