"""The operating system, each call wrapped once: files in shared memory, kernel locks, rename. No `errno` leaks upward.

Objects are opened by path in a memory file system: that is what shm_open(3) does on Linux, and it lets a pool live on a
tmpfs other than /dev/shm. Descriptors are always close-on-exec: an inherited one would keep a dead process's locks.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import pwd
import stat
import struct
from pathlib import Path
from typing import Iterator, Optional, Sequence

from engine_shim.handoff.errors import Damaged, Foreign, HandoffError, NoRoom, NotFound

PAGE = 4096
_LARGE = 16 << 20  # bytes; what is smaller is read without looking for holes: some file systems report room late
_PARTS = 1024  # IOV_MAX of Linux
PRIVATE = 0o600  # while under construction, and for records that their owner rewrites
PUBLISHED = 0o400  # segments and manifests: nobody writes to them again, not even their owner by mistake
GROUP_READS = 0o040  # added to both where a pool is shared with a group

# struct flock of <fcntl.h> on 64-bit Linux: l_type, l_whence, (padding) l_start, l_len, l_pid. See fcntl(2).
_FLOCK = struct.Struct("hhqqi4x")
_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
_GETLK = getattr(fcntl, "F_OFD_GETLK", 36)


_ONE_USER = "run the sidecar and the engine as one user, or share the pool with a group (docs/threat-model.md)"


def _error(error: OSError, path: Path) -> HandoffError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(f"{path} is not there: start the sidecar with 'ballast serve', or check BALLAST_DIR")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoom(f"{path.parent} has no room left for {path.name}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Foreign(f"{path} belongs to another user: {_ONE_USER}")
    if error.errno == errno.ELOOP:
        return Foreign(f"{path} is a symbolic link, which nothing of Ballast ever is: remove it")
    if error.errno == errno.EISDIR:
        return Foreign(f"{path} is a directory, which nothing of Ballast ever is: remove it")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return HandoffError(f"{path} cannot be opened: too many open files; raise the limit (ulimit -n)")
    return HandoffError(f"{path}: {os.strerror(error.errno or 0)}")


def create(path: Path, mode: int = PRIVATE) -> int:
    """A new empty file, opened read-write. The mode is set exactly, whatever the umask. Raises FileExistsError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise
    except OSError as error:
        raise _error(error, path) from error
    os.fchmod(fd, mode)
    return fd


def share(fd: int, mode: int, group: Optional[int]) -> None:
    """Sets the mode exactly, whatever the umask; with a group, gives the file to it and lets it read."""
    if group is not None:
        try:
            os.fchown(fd, -1, group)
        except PermissionError:
            raise HandoffError(f"nothing can be given to group {group}: this process's user is not a member of it") from None
        mode |= GROUP_READS
    os.fchmod(fd, mode)


def group_of(path: Path) -> Optional[int]:
    """The group that may read this object; None if only its owner may, or if it is not there."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_gid if found.st_mode & GROUP_READS else None


def open_existing(path: Path, write: bool = False, group: Optional[int] = None) -> int:
    """An object that is already there, never created and never resized by opening it.

    Refuses (Foreign) what is not a plain file, is writable by others, or belongs to a user whom this process does not trust.
    With `group`, what a member of that group has given to it is opened as well.
    """
    flags = os.O_RDWR if write else os.O_RDONLY
    try:
        # O_NONBLOCK: if somebody has put a FIFO in our way, opening it must not hang.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _error(error, path) from error
    try:
        trusted(os.fstat(fd), path, group)
    except BaseException:
        os.close(fd)
        raise
    return fd


@functools.lru_cache(maxsize=8)
def _named(text: str) -> frozenset[int]:
    """The users that BALLAST_TRUST names, by number or by name. Who does not exist cannot own anything."""
    found = set()
    for word in text.replace(",", " ").split():
        try:
            found.add(int(word) if word.isdigit() else pwd.getpwnam(word).pw_uid)
        except KeyError:
            continue
    return frozenset(found)


def trusted(status: os.stat_result, path: Path, group: Optional[int] = None) -> None:
    """Raises Foreign unless `status` is that of a plain file that only somebody whom we trust could have written: we
    ourselves, root, the users that BALLAST_TRUST names, or (for what is asked of anybody in it) a member of `group`."""
    if not stat.S_ISREG(status.st_mode):
        raise Foreign(f"{path} is not a plain file: remove it")
    owner = status.st_uid
    if owner not in (os.geteuid(), 0) and owner not in _named(os.environ.get("BALLAST_TRUST", "")):
        if group is None or status.st_gid != group:
            raise Foreign(f"{path} belongs to user {owner} and this process is user {os.geteuid()}: {_ONE_USER}")
    if status.st_mode & 0o022:
        raise Foreign(f"{path} is writable by other users, so nothing in it is trusted: remove it (ballast purge)")


def read_all(path: Path, limit: int) -> bytes:
    """The whole of a small object. Raises Damaged if it is larger than `limit` bytes."""
    fd = open_existing(path)
    try:
        found = os.fstat(fd)
        size = found.st_size
        if size > limit:
            raise Damaged(f"{path} has {size} bytes where at most {limit} make sense: run 'ballast purge'")
        if size > _LARGE and found.st_blocks * 512 < size // 2:
            # What is written takes its room. Holes cost nothing to make, and would cost all their length to read.
            raise Damaged(f"{path} has {size} bytes and is mostly holes: run 'ballast purge'")
        return read_exactly(fd, size, 0, path)
    finally:
        os.close(fd)


def read_exactly(fd: int, length: int, offset: int, path: Path) -> bytes:
    """`length` bytes at `offset`. Raises Damaged if the file ends before."""
    parts = []
    while length:
        part = os.pread(fd, min(length, 1 << 30), offset)
        if not part:
            raise Damaged(f"{path} ends at byte {offset}, {length} bytes too early: run 'ballast purge'")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_exactly(fd: int, data: bytes | memoryview, offset: int, path: Path) -> None:
    """All of `data` at `offset`. Writing (unlike touching a map) reports a full file system as NoRoom, never as SIGBUS."""
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    while view:
        try:
            written = os.pwrite(fd, view, offset)
        except OSError as error:
            raise _error(error, path) from error
        offset += written
        view = view[written:]


def write_parts(fd: int, parts: Sequence[bytes | memoryview], offset: int, path: Path) -> None:
    """The parts one after the other, at `offset`, in as few calls as can be; for many small ones."""
    for first in range(0, len(parts), _PARTS):
        some = parts[first : first + _PARTS]
        length = sum(map(len, some))
        try:
            written = os.pwritev(fd, some, offset)
        except OSError as error:
            raise _error(error, path) from error
        if written < length:
            write_exactly(fd, memoryview(b"".join(some))[written:], offset + written, path)
        offset += length


def allocate(fd: int, offset: int, length: int, path: Path) -> None:
    """Makes sure that these bytes have pages, as zeros where nothing was written. Raises NoRoom."""
    if length <= 0:
        return
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        raise _error(error, path) from error


def rename(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        raise _error(error, source) from error


def link_new(source: Path, target: Path) -> bool:
    """Gives `source` the name `target` if nobody has that name yet, atomically; says whether it did."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        raise _error(error, target) from error
    return True


def remove(path: Path) -> bool:
    """Unlinks `path`; says whether it was there. Processes that have it mapped keep their bytes."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _error(error, path) from error
    return True


def files(directory: Path) -> list[str]:
    """The names in a directory; none if it is not there. Raises HandoffError, as when no descriptor is left to look with."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _error(error, directory) from error


def status(path: Path) -> os.stat_result:
    """What is at `path` itself, if it is one of ours. Raises NotFound or Foreign."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise _error(error, path) from error
    trusted(found, path)
    return found


def same_file(fd: int, path: Path) -> bool:
    """Whether `path` still names the file that `fd` has open: an object unlinked and made again is another inode."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return still(fd, (there.st_dev, there.st_ino))


def try_flock(fd: int) -> bool:
    """Takes the exclusive lock on the whole open file if it is free. See flock(2)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_byte(fd: int, byte: int) -> bool:
    """Takes an open-file-description write lock on one byte if it is free. `fd` must be open for writing.

    Such a lock belongs to the open file, not to the process: the kernel gives it back when the last descriptor goes,
    however the process dies, and sees it across containers, users and PID namespaces. See fcntl(2), "OFD locks".
    """
    try:
        fcntl.fcntl(fd, _SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock_byte(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, _SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def byte_is_locked(fd: int, byte: int) -> bool:
    """Whether some *other* open file holds a lock on this byte; `fd` may be open for reading only."""
    answer = fcntl.fcntl(fd, _GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def still(fd: int, known: tuple[int, int]) -> bool:
    """Whether a descriptor that was kept for a while still means the file that it was opened for. A program may close what it
    does not know, as daemons do when they start; the next file or socket of its own then has our number."""
    try:
        return inode(fd) == known
    except OSError:
        return False


def close_kept(fd: int, known: tuple[int, int]) -> None:
    """Closes such a descriptor, unless it is somebody else's by now."""
    if still(fd, known):
        os.close(fd)


def ancestors(path: Path) -> Iterator[Path]:
    yield path
    yield from path.parents


def read_number(path: Path) -> Optional[int]:
    """The number in a one-line file of /proc or /sys/fs/cgroup; None if it is not there or says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
