"""The guard and the bell: named semaphores that make waiting cheap and decide nothing by themselves.

A named semaphore whose holder is killed is never given back. So behind the guard stands a kernel lock on a byte of the
control page, which the kernel releases, and only that lock decides; and nobody waits for the bell longer than a moment
before looking for himself. Where `posix_ipc` is not installed both fall back to looking often.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import Any, Iterator

from engine_shim.handoff import posix
from engine_shim.handoff.errors import Busy
from engine_shim.handoff.names import PoolPaths

try:
    import posix_ipc
except ImportError:
    posix_ipc = None

LIFE_BYTE = 0  # of the control page: locked while its sidecar lives
GUARD_BYTE = 1  # of the control page: locked while somebody writes

# The longest sleep between two looks. A ring lost for ever costs its waiter this much and nothing else.
GLANCE = 0.2
_POLL = 0.005


def _open(name: str, create: bool, initial: int) -> Any:
    """The named semaphore, or None where there is none to be had (no library, no permission, not made yet)."""
    if posix_ipc is None:
        return None
    try:
        if create:
            return posix_ipc.Semaphore(name, posix_ipc.O_CREAT, mode=posix.PRIVATE, initial_value=initial)
        return posix_ipc.Semaphore(name)
    except (OSError, ValueError, posix_ipc.Error):
        return None


def _acquire(semaphore: Any, timeout: float) -> bool:
    """Waits at most `timeout` seconds; a handled signal counts as a wait that ended early."""
    try:
        semaphore.acquire(timeout)
    except (posix_ipc.BusyError, posix_ipc.SignalError):
        return False
    except (OSError, posix_ipc.Error):
        time.sleep(min(timeout, GLANCE))
        return False
    return True


def _raise_to_one(semaphore: Any) -> None:
    if semaphore is not None:
        with suppress(OSError, posix_ipc.Error):
            if semaphore.value == 0:
                semaphore.release()


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
        _raise_to_one(self._semaphore)

    def wait(self, timeout: float) -> bool:
        """Sleeps until somebody rings, at most `timeout` seconds and never longer than a glance."""
        timeout = max(0.0, min(timeout, GLANCE))
        if self._semaphore is None:
            time.sleep(min(timeout, GLANCE / 4))
            return False
        return _acquire(self._semaphore, timeout)

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
        if not posix.byte_is_locked(self._fd, GUARD_BYTE):
            _raise_to_one(self._semaphore)

    @contextmanager
    def hold(self, timeout: float) -> Iterator[None]:
        """Holds the guard. Raises Busy after `timeout` seconds in which a *living* process held it."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._semaphore is not None:
                # Its holder may be dead: wait a glance, then ask the kernel, whatever the semaphore says.
                _acquire(self._semaphore, max(0.0, min(left, GLANCE)))
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
            _raise_to_one(self._semaphore)

    def close(self) -> None:
        if self._semaphore is not None:
            self._semaphore.close()
            self._semaphore = None
