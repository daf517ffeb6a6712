"""The guard and the bell: named semaphores that make waiting cheap and decide nothing by themselves.

A named semaphore whose holder is killed is never given back. So behind the guard stands a kernel lock on a byte of the
control page, which the kernel releases, and only that lock decides; and nobody waits for the bell longer than a moment
before looking for himself. Where `posix_ipc` is not installed both fall back to looking often.

Nor does anybody wait by the wall clock. sem_timedwait(3) does, and with it the library's own timeout: a clock that is set back
by an hour meanwhile makes an hour of a fifth of a second. sem_clockwait(3) waits by the monotonic clock.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Optional

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Busy, HandoffError, NotFound
from engine_shim.handoff.names import DEFAULT_DIR, PoolPaths

try:
    import posix_ipc
except ImportError:
    posix_ipc = None

LIFE_BYTE = 0  # of the control page: locked while its sidecar lives
GUARD_BYTE = 1  # of the control page: locked while somebody writes

# The longest sleep between two looks. A ring lost for ever costs its waiter this much and nothing else.
GLANCE = 0.2
_POLL = 0.005


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)
_CLOCKWAIT = hasattr(_libc, "sem_clockwait")  # glibc 2.30; musl has none
_FAILED = (None, ctypes.c_void_p(-1).value)
if _CLOCKWAIT:
    _libc.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
    _libc.sem_open.argtypes = [ctypes.c_char_p, ctypes.c_int]
    _libc.sem_open.restype = ctypes.c_void_p
    _libc.sem_close.argtypes = [ctypes.c_void_p]


class _Semaphore:
    """A named semaphore that is open."""

    def __init__(self, semaphore: Any, name: str) -> None:
        self._semaphore = semaphore
        # The C library knows that it has this one open, and gives the same address once more.
        self._address = _libc.sem_open(name.encode(), 0) if _CLOCKWAIT else None

    def acquire(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds; a handled signal counts as a wait that ended early."""
        if self._address not in _FAILED:
            until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(timeout * 1e9)
            deadline = _Timespec(*divmod(until, 1_000_000_000))
            return not _libc.sem_clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(deadline))
        end = time.monotonic() + timeout
        semaphore = self._semaphore
        while True:
            with suppress(OSError, posix_ipc.Error):
                semaphore.acquire(0)
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL))

    def raise_to_one(self) -> None:
        semaphore = self._semaphore
        with suppress(OSError, posix_ipc.Error):
            if semaphore.value == 0:
                semaphore.release()

    def close(self) -> None:
        if self._address not in _FAILED:
            _libc.sem_close(self._address)
        self._semaphore.close()


def _file(name: str) -> os.stat_result:
    """The file that a semaphore is, where the C library keeps it: glibc as `sem.<name>`, musl as `<name>`.

    Raises NotFound, or Foreign: a semaphore is a map of that file, and whoever may make the file shorter kills everybody who
    has it open (SIGBUS). So one of another user's is not taken, although it could decide nothing.
    """
    try:
        return posix.status(Path(DEFAULT_DIR, f"sem.{name[1:]}"))
    except NotFound:
        return posix.status(Path(DEFAULT_DIR, name[1:]))


def _open(name: str, create: bool, initial: int) -> Optional[_Semaphore]:
    """The named semaphore, or None where there is none to be had (no library, no permission, not made yet, a stranger's)."""
    if posix_ipc is None:
        return None
    if create:  # anew, or else what is there: O_CREAT alone would not say which of the two it was
        with suppress(OSError, ValueError, posix_ipc.Error):
            posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=posix.PRIVATE, initial_value=initial).close()
    try:
        before = _file(name)
        semaphore = _Semaphore(posix_ipc.Semaphore(name), name)
        try:
            if os.path.samestat(before, _file(name)):
                return semaphore
        except HandoffError:
            pass
        semaphore.close()  # somebody has put another in its place meanwhile
    except (OSError, ValueError, posix_ipc.Error, HandoffError):
        pass
    return None


def unlink(paths: PoolPaths) -> None:
    """Removes both semaphores of a pool. Whoever has them open keeps what he has."""
    if posix_ipc is None:
        return
    for name in (paths.guard, paths.bell):
        with suppress(OSError, posix_ipc.Error):
            posix_ipc.unlink_semaphore(name)


class Bell:
    """Rung after every change of the catalog; wakes one waiter, who rings again for the next when it was news to him."""

    def __init__(self, paths: PoolPaths, create: bool = False) -> None:
        self._semaphore = _open(paths.bell, create, 0)

    def ring(self) -> None:
        # Never above one: otherwise rings that nobody waits for would pile up and make later waits spin.
        if self._semaphore is not None:
            self._semaphore.raise_to_one()

    def wait(self, timeout: float) -> bool:
        """Sleeps until somebody rings, at most `timeout` seconds and never longer than a glance."""
        timeout = max(0.0, min(timeout, GLANCE))
        if self._semaphore is None:
            time.sleep(min(timeout, GLANCE / 4))
            return False
        return self._semaphore.acquire(timeout)

    def close(self) -> None:
        if self._semaphore is not None:
            self._semaphore.close()
            self._semaphore = None


class Guard:
    """Mutual exclusion between writers of one pool, on the control page that `fd` has open for writing."""

    def __init__(self, paths: PoolPaths, fd: int, create: bool = False) -> None:
        self._paths = paths
        self._fd = fd
        self._semaphore = _open(paths.guard, create, 1)

    def reset(self) -> None:
        """Gives a leaked semaphore back. Only for the sidecar, which holds the control page's flock."""
        if self._semaphore is not None and not posix.byte_is_locked(self._fd, GUARD_BYTE):
            self._semaphore.raise_to_one()

    @contextmanager
    def hold(self, timeout: float) -> Iterator[None]:
        """Holds the guard. Raises Busy after `timeout` seconds in which a *living* process held it."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._semaphore is not None:
                # Its holder may be dead: wait a glance, then ask the kernel, whatever the semaphore says.
                self._semaphore.acquire(max(0.0, min(left, GLANCE)))
            if posix.try_lock_byte(self._fd, GUARD_BYTE):
                break
            if left <= 0:
                raise Busy(f"pool {self._paths.pool!r} is being written by another process; try again in a moment")
            time.sleep(_POLL)
        try:
            yield
        finally:
            posix.unlock_byte(self._fd, GUARD_BYTE)
            # The lock decides, so a value that is wrong for a moment lets nobody in who should wait.
            if self._semaphore is not None:
                self._semaphore.raise_to_one()

    def close(self) -> None:
        if self._semaphore is not None:
            self._semaphore.close()
            self._semaphore = None
